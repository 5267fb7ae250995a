"""Backends that compute per-example gradient norms of one batch: ours, Opacus's, torch.func. Sensitive."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from indpriv.recording.norms.batches import Batch, LossFn, check_losses, map_tensors
from indpriv.recording.norms.layer_choice import Choose
from indpriv.recording.norms.layerwise import LayerwiseNorms


class Backend(Protocol):
    """Computes norms on one shadow model, whose parameters are current."""

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch, both (batch,)."""

    def close(self) -> None:
        """Take all hooks off the shadow model."""


class _OpacusBackend(ABC):
    """A backend that wraps the shadow model as Opacus does for training."""

    def __init__(
        self,
        shadow: nn.Module,
        loss_fn: LossFn,
        wrapper: type[AbstractGradSampleModule],
        **options: Any,
    ) -> None:
        self._loss_fn = loss_fn
        self._wrapped = wrapper(shadow, loss_reduction="sum", **options)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings():  # of Opacus's own hooks on a first layer
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            losses = check_losses(
                self._loss_fn(self._wrapped(batch.inputs), batch.targets), batch.targets
            )
            losses.sum().backward()
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        for parameter in self._wrapped.parameters():
            if parameter.requires_grad:
                squares += self._squares(parameter, len(losses))
        self._wrapped.zero_grad(set_to_none=True)
        return squares.sqrt(), losses.detach()

    @abstractmethod
    def _squares(self, parameter: Any, size: int) -> Tensor | float:
        """(size,) squared norms of one parameter's gradients."""

    def close(self) -> None:
        self._wrapped.to_standard_module()


class _Hooks(_OpacusBackend):
    """Opacus's hooks keep every per-example gradient."""

    def _squares(self, parameter: Any, size: int) -> Tensor | float:
        if parameter.grad_sample is None:
            return 0.0
        squares: Tensor = parameter.grad_sample.reshape(size, -1).double().square().sum(1)
        return squares


class _Ghost(_OpacusBackend):
    """Opacus's ghost norms keep no gradients and sum squares in the model's own precision."""

    def _squares(self, parameter: Any, size: int) -> Tensor | float:
        squares: Tensor = parameter._norm_sample.double().square()
        return squares


class _Functorch:
    """torch.func: vmap over the gradient of one example's loss; fits almost every model."""

    def __init__(self, shadow: nn.Module, loss_fn: LossFn) -> None:
        self._shadow = shadow
        frozen = {name: p for name, p in shadow.named_parameters() if not p.requires_grad}
        fixed = {**frozen, **dict(shadow.named_buffers())}

        def loss_of_one(parameters: dict[str, Tensor], example: Any, target: Any) -> Tensor:
            inputs, targets = (map_tensors(x, lambda t: t.unsqueeze(0)) for x in (example, target))
            losses = loss_fn(functional_call(shadow, (parameters, fixed), (inputs,)), targets)
            return check_losses(losses, targets)[0]

        self._gradients = vmap(
            grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different"
        )

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        named = self._shadow.named_parameters()
        trainable = {name: p.detach() for name, p in named if p.requires_grad}
        gradients, losses = self._gradients(trainable, batch.inputs, batch.targets)
        squares = sum(
            g.reshape(len(losses), -1).double().square().sum(1) for g in gradients.values()
        )
        return squares.sqrt(), losses.detach()

    def close(self) -> None:
        """Nothing was attached."""


BACKENDS: dict[str, Callable[[nn.Module, LossFn, Choose], Backend]] = {
    "layerwise": LayerwiseNorms,
    "ghost": lambda shadow, loss_fn, _: _Ghost(
        shadow, loss_fn, GradSampleModuleFastGradientClipping
    ),
    "hooks": lambda shadow, loss_fn, _: _Hooks(shadow, loss_fn, GradSampleModule),
    "functorch": lambda shadow, loss_fn, _: _Functorch(shadow, loss_fn),
}
"""Constructors by name, in the order in which they are tried.

The last argument chooses between equivalent variants of a layer; only "layerwise" has such variants.
"""

KEEP_GRADIENTS = ("hooks", "functorch")  # backends that hold every example's gradient in memory


def training_backend(
    model: AbstractGradSampleModule, shadow: nn.Module, loss_fn: LossFn
) -> Backend:
    """The backend whose norms Opacus clips by in training `model`, on a shadow model of it."""
    if isinstance(model, GradSampleModuleExpandedWeights):
        return _Hooks(shadow, loss_fn, GradSampleModuleExpandedWeights)
    options = {
        "batch_first": model.batch_first,
        "force_functorch": model.force_functorch,
        "strict": False,
    }
    if isinstance(model, GradSampleModuleFastGradientClipping):
        options["use_ghost_clipping"] = model.use_ghost_clipping
        return _Ghost(shadow, loss_fn, GradSampleModuleFastGradientClipping, **options)
    return _Hooks(shadow, loss_fn, GradSampleModule, **options)
