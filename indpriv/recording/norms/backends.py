"""Backends that take per-example gradient norms of one batch: ours, Opacus's modes, torch.func. Sensitive."""

from __future__ import annotations

import warnings
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

from indpriv.errors import InputError
from indpriv.recording.norms.layerwise import LayerwiseNorms, Routes

LossFn = Callable[[Any, Any], Tensor]


def check_losses(losses: Tensor, targets: Any) -> Tensor:
    """Return losses (batch,), or raise InputError: a reduced loss has no per-example gradient."""
    expected = len(first_tensor(targets))
    if losses.ndim != 1 or len(losses) != expected:
        raise InputError(
            f"loss_fn returned shape {tuple(losses.shape)} for {expected} examples; it must return one loss per example, "
            'e.g. nn.CrossEntropyLoss(reduction="none")'
        )
    return losses


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A batch with a function applied to each tensor in it."""
    return torch.utils._pytree.tree_map_only(Tensor, function, value)


def first_tensor(value: Any) -> Tensor:
    """The first tensor of a batch, whose length is the batch's."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            return leaf
    raise InputError(
        f"a batch of type {type(value).__name__} holds no tensor; the data set must give (inputs, targets)"
    )


class Backend(Protocol):
    """Norms and losses of one batch, both (batch,); the twin's parameters are current."""

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch."""

    def close(self) -> None:
        """Let go of the twin."""


def _backward(wrapped: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Tensor:
    """Losses (batch,) of a model that Opacus wrapped, after their backward pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Full backward hook is firing"
        )  # of Opacus's hooks on a first layer
        losses = check_losses(loss_fn(wrapped(inputs), targets), targets)
        losses.sum().backward()
    return losses


class _Hooks:
    """Opacus's hooks keep every per-example gradient; squares are summed in float64."""

    def __init__(
        self,
        twin: nn.Module,
        loss_fn: LossFn,
        wrapper: type[AbstractGradSampleModule] = GradSampleModule,
        **options: Any,
    ) -> None:
        self._loss_fn = loss_fn
        self._wrapped = wrapper(twin, loss_reduction="sum", **options)

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        losses = _backward(self._wrapped, self._loss_fn, inputs, targets)
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        for parameter in self._wrapped.parameters():
            if parameter.requires_grad and parameter.grad_sample is not None:
                squares += parameter.grad_sample.reshape(len(losses), -1).double().square().sum(1)
        self._wrapped.zero_grad(set_to_none=True)
        return squares.sqrt(), losses.detach()

    def close(self) -> None:
        self._wrapped.to_standard_module()


class _Ghost:
    """Opacus's ghost norms: no per-example gradient is kept; squares are summed in the model's own precision."""

    def __init__(self, twin: nn.Module, loss_fn: LossFn, **options: Any) -> None:
        self._loss_fn = loss_fn
        self._wrapped = GradSampleModuleFastGradientClipping(twin, loss_reduction="sum", **options)

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        losses = _backward(self._wrapped, self._loss_fn, inputs, targets)
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        for parameter in self._wrapped.trainable_parameters:
            squares += parameter._norm_sample.double().square()
        self._wrapped.zero_grad(set_to_none=True)
        return squares.sqrt(), losses.detach()

    def close(self) -> None:
        self._wrapped.to_standard_module()


class _Functorch:
    """torch.func: vmap over the gradient of one example's loss; fits almost every model, keeps per-example gradients."""

    def __init__(self, twin: nn.Module, loss_fn: LossFn) -> None:
        self._twin = twin
        fixed = {name: p for name, p in twin.named_parameters() if not p.requires_grad} | dict(
            twin.named_buffers()
        )

        def loss_of_one(parameters: dict[str, Tensor], example: Any, target: Any) -> Tensor:
            batch, targets = (map_tensors(x, lambda t: t.unsqueeze(0)) for x in (example, target))
            losses = loss_fn(functional_call(twin, (parameters, fixed), (batch,)), targets)
            return check_losses(losses, targets)[0]

        self._gradients = vmap(
            grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different"
        )

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        trainable = {
            name: p.detach() for name, p in self._twin.named_parameters() if p.requires_grad
        }
        gradients, losses = self._gradients(trainable, inputs, targets)
        squares = sum(
            g.reshape(len(losses), -1).double().square().sum(1) for g in gradients.values()
        )
        return squares.sqrt(), losses.detach()

    def close(self) -> None:
        """Nothing was attached."""


class Layerwise:
    """Our own: layer by layer in the cheaper exact form, no weight gradients (see `layerwise`)."""

    def __init__(self, twin: nn.Module, loss_fn: LossFn, routes: Routes | None = None) -> None:
        self._twin, self._loss_fn = twin, loss_fn
        self._routes: Routes = {} if routes is None else routes
        self._layers = LayerwiseNorms(twin, self._routes)

    def beside(self, twin: nn.Module, loss_fn: LossFn) -> Layerwise:
        """The same for another thread, with a twin of its own; what is found fastest in one is used in both."""
        return Layerwise(twin, loss_fn, self._routes)

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch."""

        def losses() -> Tensor:
            return check_losses(self._loss_fn(self._twin(inputs), targets), targets)

        squares, values = self._layers(losses, len(first_tensor(targets)))
        return squares.sqrt(), values

    def close(self) -> None:
        """Take the hooks off the twin."""
        self._layers.close()


BACKENDS: dict[str, Callable[[nn.Module, LossFn], Backend]] = {
    "layerwise": Layerwise,
    "ghost": _Ghost,
    "hooks": _Hooks,
    "functorch": _Functorch,
}


def training_backend(model: AbstractGradSampleModule, twin: nn.Module, loss_fn: LossFn) -> Backend:
    """The norms that Opacus clips by when it trains a model, for a twin of it."""
    if isinstance(model, GradSampleModuleExpandedWeights):
        return _Hooks(twin, loss_fn, GradSampleModuleExpandedWeights)
    options = {
        "batch_first": model.batch_first,
        "force_functorch": model.force_functorch,
        "strict": False,
    }
    if isinstance(model, GradSampleModuleFastGradientClipping):
        return _Ghost(twin, loss_fn, use_ghost_clipping=model.use_ghost_clipping, **options)
    return _Hooks(twin, loss_fn, **options)
