"""Gradients of each example's own scales and shifts against autograd, one example at a time."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from indpriv.recording.norms import layer_rules

SIZE = 4
LAYERS = {
    "GroupNorm": lambda channels: nn.GroupNorm(2, channels, eps=1e-3),
    "InstanceNorm1d": lambda channels: nn.InstanceNorm1d(channels, affine=True),
    "InstanceNorm2d": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "InstanceNorm3d": lambda channels: nn.InstanceNorm3d(channels, affine=True),
}


def check(layer, inputs, gradient, rtol):
    """Outputs, gradients of inputs and of parameters: as they are in float64, one by one."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    found = []
    inputs = inputs.requires_grad_()
    outputs = layer_rules.group_norm(
        layer, inputs, lambda weights, biases: found.extend([weights, biases])
    )
    outputs.backward(gradient)
    exact = copy.deepcopy(layer).double()
    each = [inputs.grad, *found]
    scale = [side.abs().max() for side in each]
    for i in range(SIZE):
        batch = inputs[i : i + 1].detach().double().requires_grad_()
        expected = exact(batch)
        torch.testing.assert_close(outputs[i : i + 1].double(), expected, rtol=rtol, atol=rtol)
        truth = torch.autograd.grad(
            expected, [batch, *exact.parameters()], gradient[i : i + 1].double()
        )
        for mine, theirs, largest in zip(each, truth, scale, strict=True):
            torch.testing.assert_close(
                mine[i].double(), theirs.reshape_as(mine[i]), rtol=rtol, atol=rtol * float(largest)
            )


@pytest.mark.parametrize("name", LAYERS)
@given(channels=st.sampled_from([2, 6]), sides=st.lists(st.integers(3, 7), min_size=3, max_size=3))
@settings(max_examples=10, deadline=None)
def test_each_example_has_its_own_gradients(name, channels, sides):
    torch.manual_seed(0)
    sides = sides[: 2 if name == "GroupNorm" else int(name[-2])]
    shape = (SIZE, channels, *sides)
    check(LAYERS[name](channels), torch.randn(shape) + 1, torch.randn(shape), 1e-4)


def test_channels_without_positions():
    check(nn.GroupNorm(2, 6), torch.randn(SIZE, 6), torch.randn(SIZE, 6), 1e-4)


def test_a_mean_far_from_zero_costs_few_digits():
    check(nn.GroupNorm(2, 6), torch.randn(SIZE, 6, 9, 9) + 100, torch.randn(SIZE, 6, 9, 9), 1e-4)


def test_the_graph_starts_where_only_the_layer_is_trained():
    layer, found = nn.GroupNorm(1, 2).requires_grad_(False), []
    outputs = layer_rules.group_norm(
        layer, torch.randn(SIZE, 2, 3), lambda weights, biases: found.append(biases)
    )
    nn.functional.relu(outputs, inplace=True).sum().backward()
    assert found[0].shape == (SIZE, 2)


def test_inputs_changed_in_place_are_found():
    layer = nn.GroupNorm(1, 2)
    inputs = torch.randn(SIZE, 2, 3)
    outputs = layer_rules.group_norm(layer, inputs, lambda weights, biases: None)
    inputs.mul_(0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_half_precision_other_orders_and_autocast_are_left_to_others():
    layer, images = nn.GroupNorm(1, 4), torch.randn(SIZE, 4, 3, 3)
    assert layer_rules.group_norm_fits(layer, images)
    assert not layer_rules.group_norm_fits(layer, images.bfloat16())
    assert not layer_rules.group_norm_fits(
        layer, images.contiguous(memory_format=torch.channels_last)
    )
    assert not layer_rules.group_norm_fits(nn.InstanceNorm1d(4, affine=True), torch.randn(4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer_rules.group_norm_fits(layer, images)
