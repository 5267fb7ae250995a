"""Batches of inputs and targets, and the losses of their examples. Sensitive."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from indpriv._checks import check_choice
from indpriv._facts import refused
from indpriv.errors import InputError

LossFn = Callable[[Any, Any], Tensor]
HALF = (torch.float16, torch.bfloat16)
# What models, losses and functions that a user wrote raise.
FAULTS: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, LookupError)
FAULTS += (NameError, RuntimeError, TypeError, ValueError)


class Keywords(dict[str, Any]):
    """A batch that a model takes by keyword, as Hugging Face's do."""


class Positional(tuple[Any, ...]):
    """Several arguments that a model takes one after another."""


torch.utils._pytree.register_pytree_node(
    Keywords,
    lambda batch: (list(batch.values()), list(batch)),
    lambda values, names: Keywords(zip(names, values, strict=True)),
)
torch.utils._pytree.register_pytree_node(
    Positional, lambda inputs: (list(inputs), None), lambda values, _: Positional(values)
)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The outputs of a model."""
    if isinstance(inputs, Keywords):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, Positional) else model(inputs)


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

    def rows(self, start: int, stop: int) -> "Batch":
        """Examples start to stop - 1."""
        return Batch(*rows_of((self.inputs, self.targets), start, stop))

    def repeated(self, size: int) -> "Batch":
        """The first `size` examples; if there are fewer, they are repeated from the first."""
        return self.picked(torch.arange(size) % len(self))

    def picked(self, positions: Tensor) -> "Batch":
        """Examples at some positions."""
        both = self.inputs, self.targets
        return Batch(*map_tensors(both, lambda tensor: tensor[positions.to(tensor.device)]))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in nested containers, with dataclasses and any dict."""

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
        if isinstance(leaf, dict):  # of a class that torch does not know
            changed = copy.copy(leaf)
            changed.update({name: map_tensors(part, function) for name, part in leaf.items()})
            return changed
        return leaf

    return torch.utils._pytree.tree_map(of_leaf, value)


def as_real(value: Any, kind: torch.dtype = torch.float64) -> Any:
    """The same containers with real numbers of this type."""
    return map_tensors(value, lambda t: t.to(kind) if t.is_floating_point() else t)


def rows_of(value: Any, start: int, stop: int) -> Any:
    """The same containers with rows start to stop - 1 of every tensor that has rows."""
    return map_tensors(value, lambda tensor: tensor[start:stop] if tensor.ndim else tensor)


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in nested containers, in order."""
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensor itself; of a sparse one, places and values."""
    if tensor.layout is torch.strided:
        return [tensor]
    found = tensor.detach().to_sparse_coo().coalesce()
    return [found.indices(), found.values()]


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN included."""
    if one is other:
        return True
    if one.shape != other.shape:
        return False
    if torch.strided not in (one.layout, other.layout):
        return all(map(same_values, parts_of(one), parts_of(other)))
    other = other.to(one.device, one.dtype)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def first_tensor(value: Any) -> Tensor:
    """The first tensor in nested containers; its length is the batch size."""
    if found := tensors_of(value):
        return found[0]
    raise refused("refusal.norms", "no_tensor", kind=type(value).__name__)


def unpacked(batch: Any, unpack: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    """(inputs, targets) of a batch of the loader; InputError if they are no rows of tensors."""
    what, made = "the data set yields", batch
    if unpack is not None:
        try:
            what, made = "unpack returned", unpack(batch)
        except FAULTS as error:
            message = f"unpack failed on {described(batch)}: {type(error).__name__}: {error}"
            raise InputError(message) from error
    elif isinstance(batch, Mapping):
        made = Keywords(batch), Keywords(batch)
    if not (isinstance(made, list | tuple) and len(made) == 2):
        values = {"what": what, "found": described(made), "remedy": _how_to_unpack(batch)}
        raise refused("refusal.norms", "no_pair", **values)
    inputs, targets = made
    if unpack is not None and isinstance(inputs, Mapping | tuple):
        inputs = Keywords(inputs) if isinstance(inputs, Mapping) else Positional(inputs)
    tensors, leaves = tensors_of(made), torch.utils._pytree.tree_leaves(made)
    plain = [isinstance(x, Tensor | bool | int | float | None) or is_dataclass(x) for x in leaves]
    if not all(plain) or len({x.shape[:1] for x in tensors}) != 1 or not tensors[0].ndim:
        raise refused("refusal.norms", "no_rows", what=what, found=described(made))
    return inputs, targets


def _how_to_unpack(batch: Any) -> str:
    """What to return for such a batch."""
    if isinstance(batch, list | tuple) and len(batch) > 2:
        *first, last = (f"batch[{number}]" for number in range(len(batch)))
        return f"(({', '.join(first)}), {last}), or (batch[0], batch[1]) without the rest"
    if isinstance(batch, Tensor | list | tuple):
        return "(batch, batch)" if isinstance(batch, Tensor) else "(batch[0], batch[0])"
    names = list(getattr(batch, "__dict__", ())) or ["inputs", "targets"]
    return f"(batch.{names[0]}, batch.{names[-1]})"


def described(value: Any) -> str:
    """Types and shapes in nested containers, as messages call them."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {described(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(described, value[:4]))}{', ...' if len(value) > 4 else ''})"
    return type(value).__name__


def check_losses(losses: Tensor, targets: Any) -> Tensor:
    """Return losses (batch,), or raise InputError: a reduced loss has no per-example gradient."""
    expected = len(first_tensor(targets))
    if not isinstance(losses, Tensor) or losses.shape != (expected,):
        raise refused("refusal.norms", "loss", found=described(losses), expected=expected)
    return losses


def precise_losses(loss_fn: LossFn, outputs: Any, targets: Any) -> Tensor:
    """Losses (batch,) of these outputs in float64, where loss_fn takes outputs of that type.

    The cross-entropy of a sure prediction is 0 in float32 from a difference of logits of 17 on;
    in float64 from 37 on. Attacks rank examples by such losses.
    """
    try:
        losses = loss_fn(as_real(outputs), targets)
    except (RuntimeError, TypeError):  # weights of another type, a device without float64
        losses = loss_fn(outputs, targets)
    return check_losses(losses, targets).double()


@dataclass
class CausalLMLoss:
    """Loss (batch,) of each sequence: cross-entropy of each token given the ones before it.

    The loss that Hugging Face's models return is the mean over all tokens of a batch. Where
    sequences have different numbers of labels, the gradient of one of them then depends on the
    others, so that no per-example gradient exists: train on the mean of this loss instead.

    Attributes:
        over_tokens: of a sequence: "mean" gives a long text the weight of a short one; "sum" gives
            each token the same weight, and long texts large gradients.
        ignore_index: the label of tokens that do not count, such as padding.

    Raises:
        InputError: another choice; when called, no logits or no labels.

    >>> import torch
    >>> labels = torch.tensor([[1, 2, 0], [1, -100, -100]])
    >>> CausalLMLoss()({"logits": torch.zeros(2, 3, 4)}, {"labels": labels})
    tensor([1.3863, 0.0000])
    """

    over_tokens: str = "mean"
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_choice("over_tokens", self.over_tokens, ("mean", "sum"))

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        """Losses (batch,) from logits (batch, length, vocabulary) and labels (batch, length)."""
        try:
            logits, labels = outputs["logits"], batch["labels"]
        except (KeyError, TypeError, IndexError) as error:
            raise refused("refusal.arguments", "causal_lm") from error
        losses = F.cross_entropy(
            logits[:, :-1].transpose(1, 2),
            labels[:, 1:],
            reduction="none",
            ignore_index=self.ignore_index,
        ).sum(1)
        if self.over_tokens == "sum":
            return losses
        return losses / (labels[:, 1:] != self.ignore_index).sum(1).clamp(min=1)


def fresh(loss_fn: LossFn) -> LossFn:
    """A copy, so that what a loss object remembers stays as training left it."""
    try:
        return copy.deepcopy(loss_fn)
    except Exception:  # noqa: BLE001  # whatever a class, or pickle, raises for what has no copy
        return loss_fn


def with_targets(loss_fn: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    """The loss as a function of (outputs, targets), also where it takes outputs alone."""
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError:
        return partial(_of_outputs, loss_fn)
    except ValueError:  # a built-in function has no signature
        pass
    return loss_fn


def _of_outputs(loss_fn: Callable[[Any], Tensor], outputs: Any, _: Any) -> Tensor:
    return loss_fn(outputs)


def described_loss(loss_fn: Any) -> str:
    """What the header of a log says of a loss, e.g. CausalLMLoss(over_tokens='mean', ...)."""
    given = loss_fn.args[0] if getattr(loss_fn, "func", None) is _of_outputs else loss_fn
    return str(getattr(given, "__qualname__", given))
