"""Every layer, in every form, against autograd in float64, one example at a time."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.layers import DPMultiheadAttention
from torch import nn

from indpriv import InputError
from indpriv.recording import layerwise, per_example_gradient_norms

SIZE = 5


def loss_fn(outputs, targets):
    """Touches every output differently, so that no gradient vanishes by symmetry."""
    weights = torch.linspace(0.5, 1.5, outputs[0].numel(), dtype=outputs.dtype)
    return ((outputs.flatten(1) - targets.to(outputs.dtype).unsqueeze(1)) ** 2 * weights).sum(1)


def reference(model, inputs):
    model = copy.deepcopy(model).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    norms = []
    for i in range(len(inputs)):
        loss = loss_fn(model(inputs[i : i + 1]), torch.arange(SIZE)[i : i + 1]).sum()
        trainable = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
        norms.append(sum(float(g.square().sum()) for g in gradients if g is not None) ** 0.5)
    return np.array(norms)


def check(model, inputs):
    norms = per_example_gradient_norms(model, loss_fn, inputs, torch.arange(SIZE), backend="layerwise").numpy()
    expected = reference(model, inputs)
    assert np.all(norms >= expected * (1 - 1e-6))
    np.testing.assert_allclose(norms, expected, rtol=2e-4)


@given(
    positions=st.integers(1, 40),
    d_in=st.integers(1, 20),
    d_out=st.integers(1, 20),
    bias=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_linear_on_sequences(positions, d_in, d_out, bias):
    torch.manual_seed(1)
    check(nn.Linear(d_in, d_out, bias=bias), torch.randn(SIZE, positions, d_in))


class Tied(nn.Module):
    """One weight used three times: twice by a module, once by another that shares it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(inputs)))))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.second(nn.functional.relu(self.first(inputs), inplace=True))


class WithPosition(nn.Module):
    """A parameter outside any layer."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, 4))
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.layer(inputs + self.position)


class Attention(nn.Module):
    """Opacus's attention puts positions first inside."""

    def __init__(self):
        super().__init__()
        self.attention = DPMultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs):
        return self.head(self.attention(inputs, inputs, inputs, need_weights=False)[0])


def token_model(**options):
    return nn.Sequential(nn.Embedding(6, 4, **options), nn.Linear(4, 3))


TOKENS = torch.tensor([[0, 1, 1], [2, 2, 2], [0, 0, 5], [3, 4, 5], [0, 3, 3]])
MODELS = {
    "tied": (Tied, torch.randn(SIZE, 4)),
    "tied sequence": (Tied, torch.randn(SIZE, 3, 4)),
    "in place": (InPlace, torch.randn(SIZE, 4)),
    "embedding": (token_model, TOKENS),
    "embedding with padding": (lambda: token_model(padding_idx=0), TOKENS),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)), torch.randn(SIZE, 3, 4)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm([3, 4]), torch.randn(SIZE, 2, 3, 4)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6)), torch.randn(SIZE, 3, 4)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), torch.randn(SIZE, 2, 6, 6)),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True)),
        torch.randn(SIZE, 2, 8),
    ),
    "no bias": (lambda: nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 2, bias=False)), torch.randn(SIZE, 4)),
    "parameter of its own": (WithPosition, torch.randn(SIZE, 3, 4)),
    "attention": (Attention, torch.randn(SIZE, 4, 8)),
    "another kind": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten()), torch.randn(SIZE, 1, 3, 3, 3)),
    "bilinear mixture": (lambda: nn.Sequential(nn.PReLU(4), nn.Linear(4, 2)), torch.randn(SIZE, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers(name):
    torch.manual_seed(2)
    build, inputs = MODELS[name]
    check(build(), inputs)


def test_frozen_layers_cost_and_count_nothing():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    check(model, torch.randn(SIZE, 4))
    model[0].requires_grad_(False)
    check(model, torch.randn(SIZE, 4))


def test_an_input_changed_in_place_is_found():
    model = nn.Linear(4, 4)
    twin = layerwise.LayerwiseNorms(model)
    inputs = torch.randn(SIZE, 4)

    def losses():
        outputs = model(inputs)
        inputs.mul_(0.0)
        return outputs.sum(1)

    with pytest.raises(RuntimeError, match="changed in place after its forward pass"):
        twin(losses, SIZE)


def test_a_layer_over_a_folded_batch_is_left_to_others():
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 2), nn.Unflatten(0, (-1, 3)))
    inputs = torch.randn(SIZE, 3, 4)
    norms = per_example_gradient_norms(model, loss_fn, inputs, torch.arange(SIZE))
    np.testing.assert_allclose(norms.numpy(), reference(model, inputs), rtol=2e-4)
    with pytest.raises(InputError, match="is not the batch"):
        per_example_gradient_norms(model, loss_fn, inputs, torch.arange(SIZE), backend="layerwise")
