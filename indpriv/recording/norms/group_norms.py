"""GroupNorm and InstanceNorm with per-example gradients of their scales and shifts. Sensitive.

PyTorch's backward pass of a group norm computes a sum per example and channel for the gradients of
the inputs anyway, and then adds up the examples of a batch. Given all channels of all examples as
the channels of one example, it returns every summand at no extra cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LAYERS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def fits(layer: nn.Module, inputs: Tensor) -> bool:
    """Whether `group_norm` can replace the layer: on a CPU, full precision, contiguous inputs."""
    return (
        inputs.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and inputs.dtype == layer.weight.dtype
        and inputs.dtype in (torch.float32, torch.float64)
        and inputs.ndim > (1 if isinstance(layer, nn.GroupNorm) else 2)
        and inputs.is_contiguous()
    )


def group_norm(layer: Any, inputs: Tensor, add: Callable[[Tensor, Tensor], None]) -> Tensor:
    """The output, for inputs (batch, channels, ...), of a layer that `fits`.

    The backward pass calls `add` with gradients of weight and bias, both (batch, channels).
    """
    start = torch.zeros((), requires_grad=True)  # in a first layer the graph starts here
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
