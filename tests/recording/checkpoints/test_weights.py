from pathlib import Path

import pytest
import torch
from torch import nn

from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import (
    Content,
    fingerprint_of,
    fit,
    load_into,
    state_of,
)
from runs import mlp


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def content(values):
    return Content(Path("a.pt"), values)


def load(model, state, folder):
    torch.save(state, folder / "a.pt")
    return load_into(model, folder / "a.pt")


@pytest.mark.parametrize(
    "place",
    [
        "model_state_dict",
        "module_state_dict",
        "state_dict",
        "model",
        "net",
        "module",
        "weights",
        "params",
        None,
    ],
)
def test_the_usual_places(place):
    state = mlp().state_dict()
    values = (
        state
        if place is None
        else {"step": 3, place: state, "optimizer": {"lr": torch.tensor(1.0)}}
    )
    assert set(state_of(content(values))) == set(state)


def test_an_unusual_place_needs_load():
    values = {"epoch": 3, "inner": {"mine": mlp().state_dict()}}
    with pytest.raises(
        InputError,
        match=r"has no state_dict in a usual place \(a dict of epoch, inner\).*AuditSpec\(load=",
    ):
        state_of(content(values))
    assert len(state_of(content(values), lambda state: state["inner"]["mine"])) == 4
    with pytest.raises(InputError, match="the spec's load failed on it: KeyError"):
        state_of(content(values), lambda state: state["other"])
    for nothing in ([1, 2], {}, {"lr": 0.1}, 5):
        with pytest.raises(InputError, match="has no state_dict"):
            state_of(content(nothing))


@pytest.mark.parametrize(
    "prefix", ["", "_module.", "module.", "_orig_mod.", "module._module.", "net.", "model.net."]
)
def test_prefixes_of_wrappers(prefix, tmp_path):
    model = mlp()
    state = {prefix + name: tensor + 1 for name, tensor in model.state_dict().items()}
    load(model, state, tmp_path)
    assert torch.equal(model[0].weight, state[f"{prefix}0.weight"])


def test_what_a_lightning_module_keeps_besides_is_left_out():
    model = mlp()
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    assert set(
        fit({**state, "accuracy.total": torch.ones(1), "loss.weight": torch.ones(2)}, model)
    ) == set(model.state_dict())
    with pytest.raises(InputError, match=r"several models.*'ema\.'.*'net\.'.*AuditSpec"):
        fit(
            {**state, **{f"ema.{name}": tensor for name, tensor in model.state_dict().items()}},
            model,
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: {**s, "0.weight": torch.ones(8, 7)}, "0.weight is float32 (8, 7) in the file and float32 (8, 6) in the model"),
        (lambda s: {k: v for k, v in s.items() if k != "2.bias"}, "2.bias is missing from the file"),
        (lambda s: {**s, "4.weight": torch.ones(1)}, "4.weight is unknown to the model"),
        (lambda s: {**s, "0.bias": s["0.bias"].half()}, "0.bias is float16 (8,) in the file and float32 (8,)"),
    ],
)  # fmt: skip
def test_differences_are_named(change, words):
    for prefix in ("", "_module."):
        state = {prefix + name: tensor for name, tensor in change(mlp().state_dict()).items()}
        with pytest.raises(InputError) as error:
            fit(state, mlp())
        assert words in str(error.value)
        assert "Build the model that was trained" in str(error.value)


def test_another_architecture_is_one_short_message():
    with pytest.raises(InputError, match=r"and .* more") as error:
        fit(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))).state_dict(), mlp())
    assert len(str(error.value)) < 800


def test_tied_parameters_are_saved_under_one_name(tmp_path):
    model = Tied()
    state = {"embedding.weight": torch.ones(5, 3)}
    assert load(model, state, tmp_path).keys() == model.state_dict().keys()
    assert torch.equal(model.head.weight, torch.ones(5, 3))
    assert set(fit({"head.weight": torch.ones(5, 3)}, model)) == {"embedding.weight", "head.weight"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_that_diverged_is_refused_and_not_loaded(bad, tmp_path):
    model = mlp()
    before = model[0].bias.detach().clone()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["2.bias"][1] = bad
    state["0.bias"] += 1
    with pytest.raises(InputError, match=r"a\.pt: its 2\.bias has NaN or infinite values"):
        load(model, state, tmp_path)
    assert torch.equal(model[0].bias, before)


def test_fingerprints_tell_names_shapes_types_and_values_apart():
    state = {"a": torch.arange(4.0)}
    others = [
        {"b": torch.arange(4.0)},
        {"a": torch.arange(4.0).reshape(2, 2)},
        {"a": torch.arange(4)},
        {"a": torch.ones(4)},
    ]
    assert len({fingerprint_of(s) for s in (state, *others)}) == 5
    assert fingerprint_of({"a": torch.arange(8.0)[::2] / 2}) == fingerprint_of(state)
    assert (
        len(
            fingerprint_of({"half": torch.ones(3, dtype=torch.bfloat16), "scalar": torch.tensor(3)})
        )
        == 64
    )
