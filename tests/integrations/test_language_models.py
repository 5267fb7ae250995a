"""Language models under the Trainer of Hugging Face: CausalLMLoss is sound, the model's own loss is found out."""

import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader

from indpriv.integrations.callbacks import hugging_face_callback
from indpriv.norm_log.evidence import unverified
from indpriv.recording import CausalLMLoss, Recorder
from integrations.language_models import (
    ASK,
    LONGEST,
    WORDS,
    Texts,
    collate,
    gpt2,
    lines_by_key,
    training_arguments,
    with_adapters,
)

transformers = pytest.importorskip("transformers", reason=ASK)
pytest.importorskip("accelerate", reason=ASK)
pytestmark = pytest.mark.filterwarnings("ignore")


def llama():
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2_with_adapters():
    """Its adapters' dropout stays on."""
    return with_adapters(gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1), dropout=0.1)


def fine_tuned(model, tmp_path, loss_fn=None, mode="hooks", **arguments):
    """Lines of evidence, by key, of a run; without a loss_fn the model's own loss trains."""
    texts = Texts()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model.train(),
        optimizer=torch.optim.AdamW(trained, lr=1e-3),
        data_loader=DataLoader(texts, batch_size=12, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    class PerText(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss_fn(model(**inputs), inputs).mean()

    recorder = Recorder(
        tmp_path / "run", dataset=texts, loss_fn=loss_fn or CausalLMLoss(), every="epoch"
    )
    callback = hugging_face_callback(recorder, delta=1e-4, show=False)
    settings = training_arguments(tmp_path, **arguments)
    with recorder.attach(model, optimizer, loader):
        (PerText if loss_fn else Trainer)(
            model,
            settings,
            train_dataset=texts,
            optimizers=(optimizer, None),
            callbacks=[callback],
        ).train()
    return lines_by_key(tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "over_tokens", "settings"),
    [
        (llama, "mean", {}),
        (llama, "sum", {"mode": "functorch"}),
        (llama, "mean", {"bf16": True, "lr_scheduler_type": "cosine"}),
        (gpt2_with_adapters, "mean", {"seed": 7}),
    ],
    ids=["llama", "functorch", "bf16", "adapters"],
)
def test_one_loss_for_each_text_is_supported(make, over_tokens, settings, tmp_path):
    lines = fine_tuned(make(), tmp_path, CausalLMLoss(over_tokens), **settings)
    assert unverified(lines.values()) == []
    assert lines["source"].status == "on trust"
    assert lines["source"].detail == "its state is from the operating system"


@pytest.mark.parametrize("make", [llama, gpt2_with_adapters])
def test_the_mean_over_all_tokens_of_a_batch_is_refuted(make, tmp_path):
    line = fine_tuned(make(), tmp_path)["contribution"]
    assert line.status == "refuted"
    assert line.detail.startswith("train on CausalLMLoss")
