"""Batches of inputs and targets, and the losses of their examples. Sensitive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from indpriv.errors import InputError

LossFn = Callable[[Any, Any], Tensor]


class Keywords(dict[str, Any]):
    """A batch that a model takes by keyword, as Hugging Face's do."""


torch.utils._pytree.register_pytree_node(
    Keywords,
    lambda batch: (list(batch.values()), list(batch)),
    lambda values, names: Keywords(zip(names, values, strict=True)),
)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The outputs of a model."""
    return model(**inputs) if isinstance(inputs, Keywords) else model(inputs)


@dataclass(frozen=True)
class Batch:
    """Inputs and targets, each a tensor or nested containers of tensors with the batch first."""

    inputs: Any
    targets: Any

    def __len__(self) -> int:
        return len(first_tensor(self.targets))

    @property
    def device(self) -> torch.device:
        """The device that the targets are on."""
        return first_tensor(self.targets).device

    def rows(self, start: int, stop: int) -> Batch:
        """Examples start to stop - 1."""
        return self._each(lambda tensor: tensor[start:stop])

    def repeated(self, size: int) -> Batch:
        """The first `size` examples; if there are fewer, they are repeated from the first."""
        return self._each(
            lambda tensor: tensor[torch.arange(size, device=tensor.device) % len(tensor)]
        )

    def _each(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(map_tensors(self.inputs, function), map_tensors(self.targets, function))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in nested containers, dataclasses included."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            made = copy.copy(leaf)
            for part in fields(leaf):
                if hasattr(leaf, part.name):
                    value = map_tensors(getattr(leaf, part.name), function)
                    object.__setattr__(made, part.name, value)
            return made
        return leaf

    return torch.utils._pytree.tree_map(of_leaf, value)


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in nested containers, in order."""
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN included."""
    if one is other:
        return True
    if one.shape != other.shape:
        return False
    other = other.to(one.device, one.dtype)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def first_tensor(value: Any) -> Tensor:
    """The first tensor in nested containers; its length is the batch size."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            return leaf
    raise InputError(
        f"a batch of type {type(value).__name__} contains no tensor; "
        "the data set must return (inputs, targets), or a dict"
    )


def check_losses(losses: Tensor, targets: Any) -> Tensor:
    """Return losses (batch,), or raise InputError: a reduced loss has no per-example gradient."""
    expected = len(first_tensor(targets))
    if losses.ndim != 1 or len(losses) != expected:
        raise InputError(
            f"loss_fn returned shape {tuple(losses.shape)} for {expected} examples; it must "
            'return one loss per example, e.g. nn.CrossEntropyLoss(reduction="none"), or '
            "indpriv.recording.CausalLMLoss() of a language model's outputs"
        )
    return losses


def precise_losses(loss_fn: LossFn, outputs: Any, targets: Any) -> Tensor:
    """Losses (batch,) of these outputs in float64, where loss_fn takes outputs of that type.

    The cross-entropy of a sure prediction is 0 in float32 from a difference of logits of 17 on;
    in float64 from 37 on. Attacks rank examples by such losses.
    """
    try:
        precise = map_tensors(outputs, lambda x: x.double() if x.is_floating_point() else x)
        losses = loss_fn(precise, targets)
    except (RuntimeError, TypeError):  # weights of another type, a device without float64
        losses = loss_fn(outputs, targets)
    return check_losses(losses, targets).double()
