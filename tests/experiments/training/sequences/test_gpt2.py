from collections import Counter

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import nn

from audits.training.architectures import layer_counts
from audits.training.config import ModelConfig
from audits.training.models import build_model
from indpriv import NormLog, account
from indpriv.errors import InputError
from indpriv.recording import per_example_gradient_norms
from runs import failed, make_run, record

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

CONFIG = ModelConfig("gpt2_lora")
N_SYMBOLS = 7


def model():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    return build_model(CONFIG, (5,), N_SYMBOLS)


def texts(n):
    generator = torch.Generator().manual_seed(1)
    symbols = torch.randint(0, N_SYMBOLS, (n, 6), generator=generator)
    return symbols[:, :-1].float(), symbols[:, -1]


def test_only_adapters_and_head_are_trained_and_no_layer_mixes_texts():
    built = model()
    trained = {name for name, p in built.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name or name.startswith("head.") for name in trained)
    assert ModuleValidator.validate(built, strict=False) == []
    inputs, _ = texts(3)
    alone = torch.cat([built(inputs[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(built(inputs), alone, rtol=1e-4, atol=1e-5)
    leaves = (module for module in built.modules() if not list(module.children()))
    assert layer_counts(CONFIG) == Counter(type(module).__name__ for module in leaves)


def test_norms_are_those_of_one_text_at_a_time_and_a_run_of_it_is_exact(tmp_path):
    built, (inputs, targets) = model(), texts(3)
    norms = per_example_gradient_norms(
        built, nn.CrossEntropyLoss(reduction="none"), inputs, targets
    )
    trained = [p for p in built.parameters() if p.requires_grad]
    for i in range(3):
        loss = nn.functional.cross_entropy(built(inputs[i : i + 1]), targets[i : i + 1])
        gradients = torch.autograd.grad(loss, trained)
        alone = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
        assert norms[i] == pytest.approx(alone, rel=1e-3)
    run = make_run(torch.utils.data.TensorDataset(*texts(60)), built, batch_size=20)
    record(run, tmp_path / "run", epochs=1, every=1)
    assert failed(tmp_path / "run") == set()
    assert account(NormLog.open(tmp_path / "run"), delta=1e-2).claim == "exact"


def test_what_it_needs_is_said_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(InputError, match="pip install transformers peft"):
        build_model(CONFIG, (5,), N_SYMBOLS)


def test_images_are_refused():
    with pytest.raises(InputError, match="takes texts"):
        build_model(CONFIG, (1, 8, 8), N_SYMBOLS)
