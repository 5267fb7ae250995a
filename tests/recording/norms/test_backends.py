"""Our norms, Opacus's modes and autograd in float64, one example at a time, agree on every layer that is supported."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.grad_sample.utils import wrap_model
from opacus.layers import DPMultiheadAttention
from torch import nn
from torch.utils.data import TensorDataset

from indpriv import InputError
from indpriv.recording import Recorder
from indpriv.recording.norms.batches import Batch
from indpriv.recording.norms.layerwise import LayerwiseNorms
from indpriv.recording.norms.model_checks import _norms_in_training
from indpriv.recording.norms.norm_pass import FunctorchNorms
from indpriv.recording.norms.shadow_model import ModelInTraining
from runs import PER_EXAMPLE, make_run

SIZE = 4
LENGTHS = st.integers(1, 6)


def loss_fn(outputs, targets):
    """Touches every output differently, so that no gradient vanishes by symmetry."""
    weights = torch.linspace(0.5, 1.5, outputs[0].numel(), dtype=outputs.dtype)
    return ((outputs.flatten(1) - targets.to(outputs.dtype).unsqueeze(1)) ** 2 * weights).sum(1)


class Attention(nn.Module):
    """Attention to itself, over a projection."""

    def __init__(self, kind, width, heads, *, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.before, self.attention = (
            nn.Linear(width, width),
            kind(width, heads, batch_first=batch_first),
        )

    def forward(self, inputs):
        hidden = self.before(inputs)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        attended = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return attended if self.batch_first else attended.transpose(0, 1)


def linear(draw):
    d_in, positions = draw(st.integers(1, 9)), draw(st.lists(LENGTHS, max_size=2))
    return nn.Linear(d_in, draw(st.integers(1, 9)), bias=draw(st.booleans())), torch.randn(
        SIZE, *positions, d_in
    )


def convolution(kind, dimensions):
    def build(draw):
        groups = draw(st.integers(1, 2))
        options = {
            "stride": st.integers(1, 3),
            "padding": st.integers(0, 2),
            "dilation": st.integers(1, 2),
        }
        drawn = {name: draw(values) for name, values in options.items()}
        layer = kind(
            2 * groups,
            3 * groups,
            draw(st.integers(1, 3)),
            groups=groups,
            bias=draw(st.booleans()),
            **drawn,
        )
        sides = [draw(st.integers(5, 9)) for _ in range(dimensions)]
        return layer, torch.randn(SIZE, 2 * groups, *sides)

    return build


def embedding(draw):
    tokens = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    return nn.Embedding(6, 3), (torch.tensor(tokens) + torch.arange(SIZE).unsqueeze(1)) % 6


def last_dimensions(kind):
    def build(draw):
        width, positions = draw(st.integers(2, 6)), draw(st.lists(LENGTHS, max_size=2))
        return nn.Sequential(nn.Linear(width, width), kind(width)), torch.randn(
            SIZE, *positions, width
        )

    return build


def channels(kind, dimensions):
    def build(draw):
        number, sides = (
            2 * draw(st.integers(1, 3)),
            [draw(st.integers(3, 7)) for _ in range(dimensions)],
        )
        return kind(number), torch.randn(SIZE, number, *sides)

    return build


def attention(kind):
    def build(draw):
        heads = draw(st.integers(1, 2))
        batch_first = kind is DPMultiheadAttention or draw(
            st.booleans()
        )  # Opacus's hooks take one order in all layers
        model = Attention(kind, 4 * heads, heads, batch_first=batch_first)
        return model, torch.randn(SIZE, draw(LENGTHS), 4 * heads)

    return build


OURS = {"layerwise": LayerwiseNorms, "functorch": FunctorchNorms}
ALL = (*OURS, "hooks", "ghost", "ew")
KINDS = {
    "Linear": (linear, ALL),
    "Conv1d": (convolution(nn.Conv1d, 1), ALL),
    "Conv2d": (convolution(nn.Conv2d, 2), ALL),
    "Embedding": (embedding, ALL),
    "LayerNorm": (last_dimensions(nn.LayerNorm), ALL),
    "RMSNorm": (last_dimensions(lambda width: nn.RMSNorm(width, eps=1e-5)), ALL[:-1]),
    "GroupNorm": (channels(lambda number: nn.GroupNorm(2, number), 2), ALL),
    "InstanceNorm1d": (channels(lambda number: nn.InstanceNorm1d(number, affine=True), 1), ALL),
    "InstanceNorm2d": (channels(lambda number: nn.InstanceNorm2d(number, affine=True), 2), ALL),
    "MultiheadAttention": (attention(nn.MultiheadAttention), ("functorch",)),
    "DPMultiheadAttention": (attention(DPMultiheadAttention), ALL[:-1]),
}


def one_by_one(model, inputs, targets):
    model = copy.deepcopy(model).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    norms = []
    for i in range(SIZE):
        loss = loss_fn(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(sum(float(g.square().sum()) for g in gradients) ** 0.5)
    return np.array(norms)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_all_agree(kind, data):
    torch.manual_seed(1)
    build, names = KINDS[kind]
    model, inputs = build(data.draw)
    targets = torch.arange(SIZE)
    expected = one_by_one(model, inputs, targets)
    for name in names:
        if name == "ghost" and inputs.ndim > 3 and kind in ("Linear", "LayerNorm", "RMSNorm"):
            continue  # Opacus has no ghost norm for these
        in_training, batch = ModelInTraining(model, loss_fn), Batch(inputs, targets)
        if name in OURS:
            norms = OURS[name](in_training)(batch)[0]
        else:
            options = {"max_grad_norm": 1.0} if name == "ghost" else {}
            wrapped = wrap_model(copy.deepcopy(model), grad_sample_mode=name, **options)
            norms = _norms_in_training(wrapped, in_training, batch, 1)
        np.testing.assert_allclose(norms.numpy(), expected, rtol=1e-4, err_msg=name)


def test_a_run_on_other_gradients_is_refused_before_training(tmp_path):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(10, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 2))
    tokens = TensorDataset(torch.randint(1, 10, (40, 4)), torch.randint(0, 2, (40,)))
    run = make_run(tokens, model)
    recorder = Recorder(tmp_path / "run", dataset=tokens, loss_fn=PER_EXAMPLE)
    with (
        pytest.raises(InputError, match="padding_idx"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        pass
    assert not (tmp_path / "run").exists()
