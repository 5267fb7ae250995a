"""Backends for per-example gradient norms of a batch: ours, Opacus's, torch.func. Sensitive."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
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

from indpriv.recording.norms.batches import Batch, LossFn, call, check_losses, map_tensors
from indpriv.recording.norms.layer_choice import Choose
from indpriv.recording.norms.layerwise import LayerwiseNorms
from indpriv.recording.norms.shadow_model import EachTensor

Backend = Callable[[Batch], tuple[Tensor, Tensor]]
"""(norms float64, losses) of a batch, both (batch,), at the parameters of one shadow model."""


def _limit(each: EachTensor | None, index: int) -> float:
    """Largest squared norm that clipping leaves of a tensor of parameters."""
    return each.limits[index] ** 2 if each is not None and each.limits else math.inf


def _squares(gradients: Tensor, each: EachTensor | None, index: int) -> Tensor:
    """(batch,) squared norms of the gradients of one tensor of parameters, as they are clipped."""
    if each is not None and each.transforms:
        centre, factor = each.transforms[index]
        gradients = (gradients - centre) * factor
    flat = gradients.reshape(len(gradients), -1).double()
    return flat.square().sum(1).clamp(max=_limit(each, index))


def _opacus(
    wrapper: type[AbstractGradSampleModule],
    shadow: nn.Module,
    loss_fn: LossFn,
    each: EachTensor | None = None,
    **options: Any,
) -> Backend:
    """The shadow model wrapped as Opacus does for training.

    In ghost mode Opacus keeps norms, in the model's own precision; otherwise every gradient.
    """
    wrapped = wrapper(shadow, loss_reduction="sum", **options)
    ghost = isinstance(wrapped, GradSampleModuleFastGradientClipping)

    def squares_of(parameter: Any, index: int, size: int) -> Tensor:
        if ghost:
            squares: Tensor = (
                parameter._norm_sample.double().square().clamp(max=_limit(each, index))
            )
            return squares
        gradients = parameter.grad_sample
        if gradients is None:
            gradients = parameter.new_zeros((size, *parameter.shape))
        return _squares(gradients, each, index)

    def norms(batch: Batch) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings():  # of Opacus's own hooks on a first layer
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            outputs = call(wrapped, batch.inputs)
            losses = check_losses(loss_fn(outputs, batch.targets), batch.targets)
            losses.sum().backward()
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        for index, parameter in enumerate(trained):
            squares += squares_of(parameter, index, len(losses))
        wrapped.zero_grad(set_to_none=True)
        return squares.sqrt(), losses.detach()

    return norms


def _functorch(shadow: nn.Module, loss_fn: LossFn, each: EachTensor) -> Backend:
    """torch.func: vmap over the gradient of one example's loss; fits almost every model."""
    frozen = {name: p for name, p in shadow.named_parameters() if not p.requires_grad}
    fixed = {**frozen, **dict(shadow.named_buffers())}

    def loss_of_one(parameters: dict[str, Tensor], example: Any, target: Any) -> Tensor:
        inputs, targets = (map_tensors(x, lambda t: t.unsqueeze(0)) for x in (example, target))

        def model(*args: Any, **kwargs: Any) -> Any:
            return functional_call(shadow, (parameters, fixed), args, kwargs)

        return check_losses(loss_fn(call(model, inputs), targets), targets)[0]

    compute = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different")

    def norms(batch: Batch) -> tuple[Tensor, Tensor]:
        named = shadow.named_parameters()
        trainable = {name: p.detach() for name, p in named if p.requires_grad}
        gradients, losses = compute(trainable, batch.inputs, batch.targets)
        squares = [_squares(g, each, index) for index, g in enumerate(gradients.values())]
        return torch.stack(squares).sum(0).sqrt(), losses.detach()

    return norms


BACKENDS: dict[str, Callable[[nn.Module, LossFn, Choose, EachTensor], Backend]] = {
    "layerwise": LayerwiseNorms,
    "ghost": lambda shadow, loss_fn, _, each: _opacus(
        GradSampleModuleFastGradientClipping, shadow, loss_fn, each
    ),
    "hooks": lambda shadow, loss_fn, _, each: _opacus(GradSampleModule, shadow, loss_fn, each),
    "functorch": lambda shadow, loss_fn, _, each: _functorch(shadow, loss_fn, each),
}
"""What makes a backend from a shadow model, by name, in the order in which they are tried.

The third argument chooses between equivalent variants of a layer; only "layerwise" has variants.
The last one is `ModelInTraining.each`, which a backend reads anew in each call.
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
