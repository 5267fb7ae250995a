"""Backends for per-example gradient norms of a batch: ours, Opacus's, torch.func. Sensitive."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from opacus.grad_sample import (
    AbstractGradSampleModule,
    GradSampleModule,
    GradSampleModuleExpandedWeights,
    GradSampleModuleFastGradientClipping,
)
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from indpriv.recording.norms.batches import Batch, LossFn, check_losses, map_tensors
from indpriv.recording.norms.layer_choice import Choose
from indpriv.recording.norms.layerwise import LayerwiseNorms

Backend = Callable[[Batch], tuple[Tensor, Tensor]]
"""(norms float64, losses) of a batch, both (batch,), at the parameters of one shadow model."""


def _opacus(
    wrapper: type[AbstractGradSampleModule],
    shadow: nn.Module,
    loss_fn: LossFn,
    limits: Sequence[float] = (),
    **options: Any,
) -> Backend:
    """The shadow model wrapped as Opacus does for training.

    In ghost mode Opacus keeps norms, in the model's own precision; otherwise every gradient.
    """
    wrapped = wrapper(shadow, loss_reduction="sum", **options)
    ghost = isinstance(wrapped, GradSampleModuleFastGradientClipping)

    def squares_of(parameter: Any, size: int) -> Tensor | float:
        if ghost:
            squares: Tensor = parameter._norm_sample.double().square()
            return squares
        if parameter.grad_sample is None:
            return 0.0
        squares = parameter.grad_sample.reshape(size, -1).double().square().sum(1)
        return squares

    def norms(batch: Batch) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings():  # of Opacus's own hooks on a first layer
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            losses = check_losses(loss_fn(wrapped(batch.inputs), batch.targets), batch.targets)
            losses.sum().backward()
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        for parameter, limit in zip(trained, limits or repeat(math.inf), strict=False):
            part = torch.as_tensor(squares_of(parameter, len(losses)))
            squares += part.clamp(max=limit**2)
        wrapped.zero_grad(set_to_none=True)
        return squares.sqrt(), losses.detach()

    return norms


def _functorch(shadow: nn.Module, loss_fn: LossFn, limits: Sequence[float] = ()) -> Backend:
    """torch.func: vmap over the gradient of one example's loss; fits almost every model."""
    frozen = {name: p for name, p in shadow.named_parameters() if not p.requires_grad}
    fixed = {**frozen, **dict(shadow.named_buffers())}

    def loss_of_one(parameters: dict[str, Tensor], example: Any, target: Any) -> Tensor:
        inputs, targets = (map_tensors(x, lambda t: t.unsqueeze(0)) for x in (example, target))
        losses = loss_fn(functional_call(shadow, (parameters, fixed), (inputs,)), targets)
        return check_losses(losses, targets)[0]

    compute = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different")

    def norms(batch: Batch) -> tuple[Tensor, Tensor]:
        named = shadow.named_parameters()
        trainable = {name: p.detach() for name, p in named if p.requires_grad}
        gradients, losses = compute(trainable, batch.inputs, batch.targets)
        flat = [g.reshape(len(losses), -1).double() for g in gradients.values()]
        each = zip(flat, limits or repeat(math.inf), strict=False)
        squares = [g.square().sum(1).clamp(max=limit**2) for g, limit in each]
        return torch.stack(squares).sum(0).sqrt(), losses.detach()

    return norms


BACKENDS: dict[str, Callable[[nn.Module, LossFn, Choose, Sequence[float]], Backend]] = {
    "layerwise": LayerwiseNorms,
    "ghost": lambda shadow, loss_fn, _, limits: _opacus(
        GradSampleModuleFastGradientClipping, shadow, loss_fn, limits
    ),
    "hooks": lambda shadow, loss_fn, _, limits: _opacus(GradSampleModule, shadow, loss_fn, limits),
    "functorch": lambda shadow, loss_fn, _, limits: _functorch(shadow, loss_fn, limits),
}
"""What makes a backend from a shadow model, by name, in the order in which they are tried.

The third argument chooses between equivalent variants of a layer; only "layerwise" has variants.
The last one is `ModelInTraining.limits`, which a backend reads anew in each call.
"""

KEEP_GRADIENTS = ("hooks", "functorch")  # backends that hold every example's gradient in memory


def training_backend(
    model: AbstractGradSampleModule, shadow: nn.Module, loss_fn: LossFn
) -> Backend:
    """The backend whose norms Opacus clips by in training `model`, on a shadow model of it."""
    if isinstance(model, GradSampleModuleExpandedWeights):
        return _opacus(GradSampleModuleExpandedWeights, shadow, loss_fn)
    options = {
        "batch_first": model.batch_first,
        "force_functorch": model.force_functorch,
        "strict": False,
    }
    if isinstance(model, GradSampleModuleFastGradientClipping):
        options["use_ghost_clipping"] = model.use_ghost_clipping
        return _opacus(GradSampleModuleFastGradientClipping, shadow, loss_fn, **options)
    return _opacus(GradSampleModule, shadow, loss_fn, **options)
