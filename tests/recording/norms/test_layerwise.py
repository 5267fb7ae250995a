"""Every layer, in every variant, against autograd in float64, one example at a time."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from indpriv import InputError
from indpriv.recording import per_example_gradient_norms
from indpriv.recording.norms import layerwise
from indpriv.recording.norms.batches import Batch
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.norms.shadow_model import ModelInTraining

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
        norms.append(
            sum(float(g.to_dense().square().sum()) for g in gradients if g is not None) ** 0.5
        )
    return np.array(norms)


def check(model, inputs, backend="layerwise"):
    norms = per_example_gradient_norms(
        model, loss_fn, inputs, torch.arange(SIZE), backend=backend
    ).numpy()
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
    """Keys and values of their own; positions or the batch first; torch's or Opacus's."""

    def __init__(
        self, kind=nn.MultiheadAttention, *, freeze=(), batch_first=True, kdim=8, **options
    ):
        super().__init__()
        self.batch_first, self.kdim = batch_first, kdim
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 2)
        self.attention = kind(8, 2, batch_first=batch_first, kdim=kdim, vdim=kdim, **options)
        for name in freeze:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, inputs):
        hidden = self.before(inputs)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        memory = torch.tanh(hidden[..., : self.kdim])
        attended = self.attention(hidden, memory, memory, need_weights=False)[0]
        return self.after(attended if self.batch_first else attended.transpose(0, 1))


class Encoder(nn.Module):
    """Attention to itself, then layers whose inputs have the positions first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)

    def forward(self, inputs):
        return self.layer(inputs.transpose(0, 1)).transpose(0, 1)


class TiedHead(nn.Module):
    """The head's weight is the embedding's table."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle, self.head = (
            nn.Embedding(6, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 6, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Conv1D(nn.Module):
    """GPT-2's linear layer, with its weight transposed."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(d_in, d_out)),
            nn.Parameter(torch.zeros(d_out)),
        )

    def forward(self, inputs):
        return inputs @ self.weight + self.bias


class OpacusRNN(nn.Module):
    """Cells of Opacus, whose layers are used at every step of the sequence."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(4, 3, num_layers=2, bidirectional=True, **options)

    def forward(self, inputs):
        outputs = self.layers(inputs)[0]
        return outputs if self.layers.batch_first else outputs.transpose(0, 1)


class Recurrent(nn.Module):
    """One convolution and one normalisation, each used twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Tanh())

    def forward(self, images):
        return self.layers(self.layers(images))


def token_model(**options):
    return nn.Sequential(nn.Embedding(6, 4, **options), nn.Linear(4, 3))


TOKENS = torch.tensor([[0, 1, 1], [2, 2, 2], [0, 0, 5], [3, 4, 5], [0, 3, 3]])
MODELS = {
    "tied": (Tied, torch.randn(SIZE, 4)),
    "tied sequence": (Tied, torch.randn(SIZE, 3, 4)),
    "in place": (InPlace, torch.randn(SIZE, 4)),
    "embedding": (token_model, TOKENS),
    "embedding with padding": (lambda: token_model(padding_idx=0), TOKENS),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
        torch.randn(SIZE, 3, 4),
    ),
    "layer norm of two dimensions": (lambda: nn.LayerNorm([3, 4]), torch.randn(SIZE, 2, 3, 4)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6)), torch.randn(SIZE, 3, 4)),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)),
        torch.randn(SIZE, 2, 6, 6),
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True)),
        torch.randn(SIZE, 2, 8),
    ),
    "no bias": (
        lambda: nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 2, bias=False)),
        torch.randn(SIZE, 4),
    ),
    "parameter of its own": (WithPosition, torch.randn(SIZE, 3, 4)),
    "attention": (Attention, torch.randn(SIZE, 4, 8)),
    "attention, positions first": (lambda: Attention(batch_first=False), torch.randn(SIZE, 4, 8)),
    "attention, as many positions as examples": (
        lambda: Attention(batch_first=False),
        torch.randn(SIZE, SIZE, 8),
    ),
    "attention without bias": (lambda: Attention(bias=False), torch.randn(SIZE, 4, 8)),
    "attention to other features": (lambda: Attention(kdim=4), torch.randn(SIZE, 4, 8)),
    "attention, partly frozen": (
        lambda: Attention(freeze=["attention.in_proj_weight", "attention.out_proj.bias"]),
        torch.randn(SIZE, 4, 8),
    ),
    "attention, only its output trained": (
        lambda: Attention(freeze=["attention.in_proj_weight", "attention.in_proj_bias"]),
        torch.randn(SIZE, 4, 8),
    ),
    "attention of Opacus": (lambda: Attention(DPMultiheadAttention), torch.randn(SIZE, 4, 8)),
    "attention of Opacus, positions first": (
        lambda: Attention(DPMultiheadAttention, batch_first=False),
        torch.randn(SIZE, 4, 8),
    ),
    "encoder": (Encoder, torch.randn(SIZE, 3, 8)),
    "tied head": (TiedHead, TOKENS),
    "recurrent": (Recurrent, torch.randn(SIZE, 2, 5, 4)),
    "GPT-2's Conv1D": (
        lambda: nn.Sequential(Conv1D(4, 6), nn.Tanh(), Conv1D(6, 2)),
        torch.randn(SIZE, 3, 4),
    ),
    "GRU of Opacus": (lambda: OpacusRNN(DPGRU, batch_first=True), torch.randn(SIZE, 6, 4)),
    "LSTM of Opacus": (lambda: OpacusRNN(DPLSTM, batch_first=True), torch.randn(SIZE, 6, 4)),
    "LSTM of Opacus, as many positions as examples": (
        lambda: OpacusRNN(DPLSTM, batch_first=True),
        torch.randn(SIZE, SIZE, 4),
    ),
    "sparse embedding": (lambda: token_model(sparse=True), TOKENS),
    "instance norm of images": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True)),
        torch.randn(SIZE, 2, 5, 4),
    ),
    "convolution in three dimensions": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten()),
        torch.randn(SIZE, 1, 3, 3, 3),
    ),
    "another kind": (lambda: nn.Sequential(nn.PReLU(4), nn.Linear(4, 2)), torch.randn(SIZE, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers(name, monkeypatch):
    torch.manual_seed(2)
    if "PT-2" in name or "Opacus" in name:  # by formula, not by torch.func
        monkeypatch.delattr(layerwise, "_by_torch_func")
    build, inputs = MODELS[name]
    model = build()
    of_torch = any(isinstance(part, nn.MultiheadAttention) for part in model.modules())
    check(model, inputs, "functorch" if of_torch else "layerwise")


@pytest.mark.parametrize(
    "name",
    [
        "tied sequence",
        "rms norm",
        "layer norm",
        "group norm",
        "instance norm",
        "attention of Opacus",
        "tied head",
    ],
)
def test_layers_under_autocast(name):
    """Against autograd under autocast, one example at a time: slack covers what bfloat16 rounds otherwise in a batch."""
    torch.manual_seed(3)
    build, inputs = MODELS[name]
    model, targets = build(), torch.arange(SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        norm_pass = NormPass(model, loss_fn, inputs, targets, backend="layerwise")
        losses = [loss_fn(model(inputs[i : i + 1]), targets[i : i + 1]).sum() for i in range(SIZE)]
    trained = list(model.parameters())
    gradients = [torch.autograd.grad(loss, trained) for loss in losses]
    expected = np.array(
        [sum(float(g.double().square().sum()) for g in each) ** 0.5 for each in gradients]
    )
    norms = norm_pass(inputs, targets)[0].numpy()
    assert np.all(norms >= expected)
    np.testing.assert_allclose(norms / (1 + norm_pass.slack), expected, rtol=2e-2)


class WeightGradients(TorchDispatchMode):
    """Notes what a backward pass computes of weights (3, ...), summed over the batch."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (
            function is torch.ops.aten.convolution_backward.default
            and args[-1][1]
            and args[-2] == 1
        ):
            self.seen.add("convolution")
        if function is torch.ops.aten.mm.default and args[0].shape == (3, SIZE):
            self.seen.add("linear")
        return function(*args, **(kwargs or {}))


def test_no_sum_of_weight_gradients_is_computed():
    """What training's backward pass takes besides the gradients of inputs, and norms do not need."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    inputs, targets = torch.randn(SIZE, 2, 6, 6), torch.arange(SIZE)
    with WeightGradients() as plain:
        loss_fn(model(inputs), targets).sum().backward()
    assert plain.seen == {"convolution", "linear"}
    backend = layerwise.LayerwiseNorms(ModelInTraining(model, loss_fn))
    with WeightGradients() as ours:
        norms, _ = backend(Batch(inputs, targets))
    assert ours.seen == set()
    assert torch.all(norms > 0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs):
        return inputs * self.scale, self.scale


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), Scaled())

    def forward(self, inputs):
        return self.layers(inputs)[0]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Attention(kdim=4), "MultiheadAttention does not map a tensor to a tensor"),
        (Pair, "Scaled does not map a tensor to a tensor"),
    ],
)
def test_what_does_not_fit_is_left_to_others_and_said(build, said):
    torch.manual_seed(5)
    model, targets = build(), torch.arange(SIZE)
    inputs = torch.randn(SIZE, 3, 8 if isinstance(model, Attention) else 4)
    with NormPass(model, loss_fn, inputs, targets) as norm_pass:
        assert norm_pass.backend != "layerwise"
        assert said in norm_pass.fallback
        np.testing.assert_allclose(
            norm_pass(inputs, targets)[0].numpy(), reference(model, inputs), rtol=2e-4
        )
    with pytest.raises(InputError, match=said):
        per_example_gradient_norms(model, loss_fn, inputs, targets, backend="layerwise")


def test_frozen_layers_cost_and_count_nothing():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    check(model, torch.randn(SIZE, 4))
    model[0].requires_grad_(False)
    check(model, torch.randn(SIZE, 4))


def test_an_input_changed_in_place_is_found():
    model = nn.Linear(4, 4)
    inputs = torch.randn(SIZE, 4)

    def changing_loss(outputs, targets):
        inputs.mul_(0.0)
        return outputs.sum(1)

    backend = layerwise.LayerwiseNorms(ModelInTraining(model, changing_loss))
    with pytest.raises(RuntimeError, match="changed in place after its forward pass"):
        backend(Batch(inputs, torch.arange(SIZE)))


def test_a_layer_over_a_folded_batch_is_left_to_others():
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 2), nn.Unflatten(0, (-1, 3)))
    inputs = torch.randn(SIZE, 3, 4)
    norms = per_example_gradient_norms(model, loss_fn, inputs, torch.arange(SIZE))
    np.testing.assert_allclose(norms.numpy(), reference(model, inputs), rtol=2e-4)
    with pytest.raises(InputError, match="is not the batch"):
        per_example_gradient_norms(model, loss_fn, inputs, torch.arange(SIZE), backend="layerwise")


class Positions(nn.Module):
    """Learned positions that all examples share, and a head tied to the tokens, as in GPT-2."""

    def __init__(self, add_row):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(12, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.add_row = add_row

    def forward(self, inputs):
        positions = torch.arange(inputs.shape[1])
        positions = positions[None] if self.add_row else positions
        values = torch.tanh(self.tokens(inputs) + self.positions(positions))
        return self.head(values.cumsum(1)).flatten(1)


@pytest.mark.parametrize("add_row", [False, True])
@pytest.mark.parametrize("length", [1, 3, SIZE - 1, SIZE, SIZE + 1, SIZE + 2, 11])
def test_positions_that_all_examples_share_are_left_to_others(length, add_row):
    torch.manual_seed(length)
    check(Positions(add_row), torch.randint(0, 7, (SIZE, length)), backend="auto")
