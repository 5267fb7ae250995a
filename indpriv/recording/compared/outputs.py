"""A forward pass of training: what went in and came out, and the gradients that came back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from indpriv._facts import text
from indpriv.recording.compared.deliveries import Delivered
from indpriv.recording.norms.batches import LossFn, map_tensors, same_values, tensors_of
from indpriv.recording.norms.shadow_model import HALF
from indpriv.recording.random_states import set_random_state

# Relative to the largest entry; larger differences than rounding makes on any loop that was tried.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass
class Call:
    """One forward pass with gradients.

    Attributes:
        arguments: (args, kwargs) as fed; kept only where the pass will be repeated.
        delivered: the loader's batch that was fed; None if it was not found.
        intact: it was fed as the loader gave it.
        outputs: detached.
        live: numbers of those tensors of the outputs that have a gradient.
        gradients: number of a tensor of the outputs -> gradient; of ghost mode's first backward.
        second: the same of ghost mode's second backward.
        inside: gradients of the tensors before the loss that the model itself computes.
        twin: a copy of the module as it was before; like the rest, only where it will be repeated.
    """

    arguments: tuple[Any, Any] | None
    delivered: Delivered | None
    intact: bool
    outputs: Any = None
    live: frozenset[int] = frozenset()
    versions: list[int] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    second: dict[int, Tensor] = field(default_factory=dict)
    inside: dict[int, Tensor] = field(default_factory=dict)
    twin: Any = None
    random_state: Any = None
    precision: Any = None

    def came_out(self, outputs: Any, second_pass: Callable[[], bool]) -> Any:
        """Outputs as the loop gets them: aliases, whose gradients are those of the loss alone."""
        self.outputs = map_tensors(outputs, Tensor.detach)
        found = tensors_of(outputs)
        self.versions = [tensor._version for tensor in tensors_of(self.outputs)]
        self.live = frozenset(k for k, tensor in enumerate(found) if tensor.requires_grad)
        numbers = iter(range(len(found)))

        def alias(tensor: Tensor) -> Tensor:
            number = next(numbers)
            if number not in self.live or not tensor.is_floating_point():
                return tensor
            tensor.register_hook(lambda grad: _add(self.inside, number, grad))
            seen = tensor.view_as(tensor)
            seen.register_hook(
                lambda grad: _add(self.second if second_pass() else self.gradients, number, grad)
            )
            return seen

        return map_tensors(outputs, alias)

    @property
    def loaded(self) -> Delivered:
        """The loader's batch, where it was found."""
        if self.delivered is None:
            raise LookupError("no batch of the loader was fed")
        return self.delivered

    @property
    def has_rows(self) -> bool:
        """Whether every tensor of inputs and targets has a row for each example."""
        fed = tensors_of((self.arguments, self.targets))
        return all(not t.ndim or len(t) == self.size for t in fed)

    def new_twin(self) -> nn.Module:
        """A copy of the module as it was before this pass."""
        return copy.deepcopy(self.twin)

    def again(self, arguments: Any = None, twin: nn.Module | None = None) -> Any:
        """Outputs of a twin, by default a new one, at the random state of this pass."""
        args, kwargs = map_tensors(  # forward passes may write in place
            self.arguments if arguments is None else arguments, Tensor.clone
        )
        twin = self.new_twin() if twin is None else twin
        set_random_state(self.random_state)
        with self.precision():
            return twin(*args, **kwargs)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.loaded.ids)

    @property
    def targets(self) -> Any:
        """Targets of the rows, on the model's device."""
        return self.loaded.unpacked[1]

    @property
    def is_half(self) -> bool:
        """Whether outputs are of half precision."""
        return any(tensor.dtype in HALF for tensor in tensors_of(self.outputs))


def _add(gradients: dict[int, Tensor], number: int, grad: Tensor) -> None:
    grad = grad.detach()
    gradients[number] = grad if number not in gradients else gradients[number] + grad


@dataclass
class LossComparison:
    """Gradients at the outputs of training, compared with those of loss_fn, step by step."""

    loss_fn: LossFn
    factors: tuple[float, float] | None = None  # least and largest factor between the two

    def difference(self, call: Call, size: int, is_mean: bool, clip: Tensor | None) -> str:
        """What is not that of loss_fn; "" if nothing is, up to one factor for the whole run.

        clip: (size,) factors by which ghost mode weights its second backward.
        """
        outputs = tensors_of(call.outputs)
        _, wanted = output_gradients(self.loss_fn, call.outputs, call.targets)
        inside = any(outputs[k].ndim == 0 for k in call.gradients)
        found = call.inside if inside else call.gradients
        scale = float(size) if is_mean else 1.0
        for number in sorted(call.live):
            expected = wanted.get(number)
            if outputs[number].ndim == 0 or (expected is None and number not in found):
                continue
            actual = found.get(number, torch.zeros_like(outputs[number])) * scale
            if expected is None:
                if inside or not bool(actual.any()):
                    continue
                return text("check.loss", "unused")
            tolerance = TOLERANCES.get(actual.dtype, 5e-5)
            factor = _factor(actual, expected)
            error = relative(actual, factor * expected)
            if error > tolerance:
                return text("check.loss", "differ", error=error)
            if bool(expected.any()) and (moved := self._moved(factor, tolerance)):
                return moved
            if clip is not None and number in call.second:
                weights = clip.view(-1, *[1] * (expected.ndim - 1)).to(expected) * factor
                error = relative(call.second[number], weights * expected)
                if error > 2 * tolerance:
                    return text("check.loss", "second", error=error)
        return ""

    def _moved(self, factor: float, tolerance: float) -> str:
        least, most = self.factors or (factor, factor)
        self.factors = min(least, factor), max(most, factor)
        if self.factors[1] - self.factors[0] <= 4 * tolerance * abs(self.factors[1]):
            return ""
        return text("check.loss", "factor", least=self.factors[0], most=self.factors[1])


def output_gradients(
    loss_fn: LossFn, outputs: Any, targets: Any
) -> tuple[Tensor, dict[int, Tensor]]:
    """Losses, and gradients of their sum at these outputs, by number of the tensor."""
    leaves = [
        tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors_of(outputs)
    ]
    following = iter(leaves)
    alike = map_tensors(outputs, lambda _: next(following))
    with torch.enable_grad():
        losses = loss_fn(alike, targets)
        floats = [k for k, leaf in enumerate(leaves) if leaf.requires_grad]
        given = torch.autograd.grad(losses.sum(), [leaves[k] for k in floats], allow_unused=True)
    found = {k: grad for k, grad in zip(floats, given, strict=True) if grad is not None}
    return losses.detach(), found


def relative(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest entry of the other; absolute if that is 0."""
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    one, other = one.detach().double(), other.detach().double()
    difference, scale = float((one - other).abs().max()), float(other.abs().max())
    if math.isnan(difference):  # infinite or NaN on both sides alike
        return 0.0 if same_values(one, other) else math.inf
    return difference / scale if scale else difference


def _factor(actual: Tensor, expected: Tensor) -> float:
    """By which the one is the other, by least squares; 1 where rounding explains the difference."""
    a, e = actual.double(), expected.double()
    squares = float(e.square().sum())
    factor = float((a * e).sum()) / squares if squares else 1.0
    within = abs(factor - 1) <= TOLERANCES.get(actual.dtype, 5e-5)
    return 1.0 if within or not math.isfinite(factor) or factor <= 0 else factor
