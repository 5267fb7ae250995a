"""Every variant of every layer against autograd in float64, one example at a time."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from indpriv.recording.norms import layerwise as layer_rules

SIZE = 4
EPS = torch.finfo(torch.float32).eps


def check(layer, inputs, variants=()):
    """Weight, bias and both, as chosen and in these variants, are exact; so are the gradients themselves."""
    gradient = torch.randn_like(layer(inputs))
    truth = {name: [] for name, _ in layer.named_parameters()}
    exact = copy.deepcopy(layer).double()
    for i in range(SIZE):
        batch = inputs[i : i + 1]
        batch = batch.double() if batch.is_floating_point() else batch
        gradients = torch.autograd.grad(
            exact(batch), list(exact.parameters()), gradient[i : i + 1].double()
        )
        for name, value in zip(truth, gradients, strict=True):
            truth[name].append(value.to_dense() if value.is_sparse else value)
    with torch.no_grad():
        for name, values in truth.items():
            found = layer_rules.gradient_of(layer, name, inputs, gradient)
            torch.testing.assert_close(found.double(), torch.stack(values), rtol=1e-4, atol=1e-4)
        for names in [{name} for name in truth] + [set(truth)]:
            expected = sum(torch.stack(truth[name]).square().flatten(1).sum(1) for name in names)
            given = layer, frozenset(names), inputs, gradient
            for variant in {*(variants if "weight" in names else ()), layer_rules.rule_of(*given)}:
                found = variant(*given)
                assert found.dtype == torch.float64
                rtol = 1e-5 + 8 * EPS * gradient[0].numel()
                tolerance = rtol * expected + 100 * EPS * expected.max()
                added = rounding_of_pairs(variant, layer, names, inputs, gradient)
                assert torch.all((found - expected).abs() <= tolerance + added)


def rounding_of_pairs(variant, layer, names, inputs, gradient):
    """What a ghost variant of a convolution adds, twice: 4 EPS Σ |a_t·a_u + bias| |g_t·g_u|.

    It is what rounding could take from that sum, and large beside it where positions cancel.
    """
    if variant not in (layer_rules._conv_ghost, layer_rules._conv_pixels):
        return 0.0
    patches, gradients = layer_rules._patches(layer, inputs.double(), gradient.double())
    products = (patches @ patches.mT + ("bias" in names)) * (gradients @ gradients.mT)
    return 8 * EPS * products.abs().sum((1, 2)).reshape(len(inputs), -1).sum(1)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@given(
    options=st.fixed_dictionaries(
        {
            "in_channels": st.sampled_from([2, 4]),
            "out_channels": st.sampled_from([2, 6]),
            "kernel_size": st.integers(1, 3),
            "stride": st.integers(1, 3),
            "padding": st.integers(0, 2) | st.sampled_from(["same", "valid"]),
            "dilation": st.integers(1, 2),
            "groups": st.integers(1, 2),
            "bias": st.booleans(),
            "padding_mode": st.sampled_from(["zeros", "reflect", "circular", "replicate"]),
        }
    ),
    channels_last=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_convolutions(kind, options, channels_last):
    if options["padding"] == "same":
        options = {**options, "stride": 1}
    torch.manual_seed(0)
    side = {nn.Conv1d: (9,), nn.Conv2d: (9, 7), nn.Conv3d: (5, 6, 5)}[kind]
    inputs = torch.randn(SIZE, options["in_channels"], *side)
    if channels_last and kind is nn.Conv2d:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    layer = kind(**options)
    few = (
        layer(inputs)[0, 0].numel() <= 64
    )  # of more, what the ghost variants add for rounding would show
    check(layer, inputs, (layer_rules._conv_pixels, layer_rules._conv_ghost) if few else ())


@given(
    positions=st.lists(st.integers(1, 6), max_size=2),
    d_in=st.integers(1, 20),
    d_out=st.integers(1, 20),
    bias=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_linear(positions, d_in, d_out, bias):
    torch.manual_seed(1)
    inputs = torch.randn(SIZE, *positions, d_in)
    check(
        nn.Linear(d_in, d_out, bias=bias),
        inputs,
        (layer_rules._direct, layer_rules._linear_ghost),
    )


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    options=st.sampled_from([{}, {"padding_idx": 2}, {"sparse": True}]),
)
@settings(max_examples=20, deadline=None)
def test_embedding(tokens, options):
    torch.manual_seed(2)
    inputs = (torch.tensor(tokens) + torch.arange(SIZE).unsqueeze(1)) % 6
    check(nn.Embedding(6, 3, **options), inputs)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(4), (4,)),
        (nn.LayerNorm(4, bias=False), (3, 4)),
        (nn.LayerNorm([3, 4]), (2, 3, 4)),
        (nn.RMSNorm(4), (3, 4)),
        (nn.GroupNorm(2, 4), (4, 5, 3)),
        (nn.GroupNorm(2, 4), (4,)),
        (nn.InstanceNorm1d(4, affine=True), (4, 8)),
        (nn.InstanceNorm2d(4, affine=True), (4, 5, 3)),
        (nn.InstanceNorm3d(4, affine=True), (4, 2, 5, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_normalisation(layer, shape, offset):
    torch.manual_seed(3)
    check(layer, torch.randn(SIZE, *shape) + offset)


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, None])
@given(channels=st.sampled_from([2, 6]), sides=st.lists(st.integers(3, 7), min_size=3, max_size=3))
@settings(max_examples=10, deadline=None)
def test_group_norms(kind, channels, sides):
    torch.manual_seed(4)
    layer = nn.GroupNorm(2, channels, eps=1e-3)
    if kind is not None:
        layer, sides = kind(channels, affine=True), sides[: int(kind.__name__[-2])]
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    check(layer, torch.randn(SIZE, channels, *sides) + 1)


def test_cancelling_positions_are_never_under_reported():
    """The ghost variant subtracts large products here; the possible rounding error is added back."""
    layer = nn.Linear(64, 64, bias=False)
    inputs = torch.ones(SIZE, 2, 64)
    gradient = torch.ones(SIZE, 2, 64)
    gradient[:, 1] = -1 + 1e-4
    exact = (inputs.double().transpose(1, 2) @ gradient.double()).square().sum((1, 2))
    assert torch.all(
        layer_rules._linear_ghost(layer, frozenset({"weight"}), inputs, gradient) >= exact
    )


def test_the_rule_with_the_fewest_multiplications_is_taken():
    def rule(layer, *shape):
        inputs = torch.randn(1, *shape)
        names = frozenset(name for name, _ in layer.named_parameters())
        return layer_rules.rule_of(layer, names, inputs, layer(inputs)).__name__

    assert rule(nn.Linear(200, 200), 200) == "_linear_single"
    assert rule(nn.Linear(200, 200), 2, 200) == "_linear_ghost"
    assert rule(nn.Linear(2, 2), 50, 2) == "_direct"
    assert rule(nn.Conv2d(1, 2, 3), 1, 12, 12) == "_conv_patches"
    assert rule(nn.Conv2d(16, 16, 3, padding=1), 16, 32, 32) == "_direct"
    assert rule(nn.Conv2d(64, 64, 3, padding=1), 64, 8, 8) == "_conv_pixels"
    assert rule(nn.Conv2d(64, 64, 3, stride=2, padding=1), 64, 4, 4) == "_conv_ghost"
