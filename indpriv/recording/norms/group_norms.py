"""GroupNorm and InstanceNorm whose backward pass gives each example the gradients of its own scales and shifts. Sensitive.

PyTorch's backward pass of a group norm sums, channel by channel, what it needs for the inputs anyway, and then adds up the
examples of a batch. Of one example whose channels are those of all examples it gives every summand, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LAYERS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def fits(layer: nn.Module, inputs: Tensor) -> bool:
    """Whether `group_norm` can take the layer's place: on a CPU, in full precision, images row by row in memory."""
    return (
        inputs.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and inputs.dtype == layer.weight.dtype
        and inputs.dtype in (torch.float32, torch.float64)
        and inputs.ndim > (1 if isinstance(layer, nn.GroupNorm) else 2)
        and inputs.is_contiguous()
    )


def group_norm(layer: Any, inputs: Tensor, add: Callable[[Tensor, Tensor], None]) -> Tensor:
    """What the layer makes of inputs (batch, channels, ...).

    Args:
        layer: a GroupNorm or InstanceNorm without running statistics that `fits`.
        inputs: what it is given.
        add: called in the backward pass with the gradients of weight and bias, both (batch, channels).
    """
    start = torch.zeros((), requires_grad=True)  # the first layer: the graph begins here
    output: Tensor = _GroupNorm.apply(inputs, layer, add, start)
    return output


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, layer: Any, add: Callable[[Tensor, Tensor], None], _: Tensor
    ) -> Tensor:
        size, channels = inputs.shape[:2]
        groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else channels
        positions = inputs[0, 0].numel()
        ctx.layer, ctx.add, ctx.sizes = layer, add, (size, channels, positions, groups)
        output, mean, rstd = torch.native_group_norm(
            inputs, layer.weight, layer.bias, size, channels, positions, groups, layer.eps
        )
        ctx.save_for_backward(inputs, mean, rstd)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        inputs, mean, rstd = ctx.saved_tensors
        size, channels, positions, groups = ctx.sizes
        to_inputs, weights, biases = torch.ops.aten.native_group_norm_backward(
            gradient.contiguous(),
            inputs,
            mean,
            rstd,
            ctx.layer.weight.repeat(size),
            1,
            size * channels,
            positions,
            size * groups,
            [ctx.needs_input_grad[0], True, True],
        )
        ctx.add(weights.view(size, channels), biases.view(size, channels))
        return (to_inputs if ctx.needs_input_grad[0] else None), None, None, None
