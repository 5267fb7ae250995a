"""Language models under the Trainer of Hugging Face: CausalLMLoss is sound, the model's own loss is found out."""

import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, Dataset

from indpriv.integrations.callbacks import hugging_face_callback
from indpriv.norm_log.evidence import lines_of, unverified
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import CausalLMLoss, Recorder

ASK = "pip install 'indpriv[hf]' to test against it"
transformers = pytest.importorskip("transformers", reason=ASK)
pytest.importorskip("accelerate", reason=ASK)
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS, LONGEST = 32, 12


class Texts(Dataset):
    """Random texts of several lengths."""

    def __init__(self, n=60):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, LONGEST, (n,), generator=generator).tolist()
        self.texts = [torch.randint(WORDS, (k,), generator=generator).tolist() for k in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"input_ids": self.texts[index]}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [-100] * (longest - len(row["input_ids"])) for row in rows]
    labels = torch.tensor(padded)
    mask = labels >= 0
    return {"input_ids": labels.clamp(min=0), "attention_mask": mask.long(), "labels": labels}


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
    peft = pytest.importorskip("peft", reason="pip install peft to test against it")
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LONGEST,
        n_embd=16,
        n_layer=1,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1
    )
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)


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
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        num_train_epochs=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    with recorder.attach(model, optimizer, loader):
        (PerText if loss_fn else Trainer)(
            model,
            settings,
            train_dataset=texts,
            optimizers=(optimizer, None),
            callbacks=[callback],
        ).train()
    return {line.key: line for line in lines_of(verify(open_run(tmp_path / "run")), {})}


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
