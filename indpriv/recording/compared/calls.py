"""Forward passes of training: the loader's batch that went in, what came out and came back.

Sensitive.
"""

import copy
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from indpriv._types import IntArray
from indpriv.recording.checkpoints.safe_files import fingerprint_of
from indpriv.recording.compared.findings import Findings
from indpriv.recording.norms import batches
from indpriv.recording.norms.batches import LossFn, map_tensors, same_values, tensors_of
from indpriv.recording.random_states import (
    fixed_state,
    has_drawn,
    kept_random_state,
    own_part,
    random_state,
    set_random_state,
)
from indpriv.recording.training_data import Examples

_FEW = 4  # of the rows of a batch that are others than before
_PART = 32  # items of the data set that are read again together
_READING = 1.0  # seconds that reading all of them may take; of others some, the same each time
_BITS = {1: torch.uint8, 2: torch.int16}  # by size of an entry, else int32
_AT_ONCE = 1 << 16  # entries that are weighed at once
_SECRET = secrets.randbits(128)
_DEPTH = 4  # of samplers around the one that draws: BatchMemoryManager's, those of trainers
# Relative to the largest entry; larger differences than rounding makes on any loop that was tried.
_TOLERANCES = {torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_TOLERANCE = 5e-5  # of float32 and others


@dataclass
class Delivered:
    """One batch of the loader."""

    batch: Any  # as the loader gave it
    ids: IntArray  # (n,) of its rows, as drawn
    examples: Examples
    # Ids of the batch that it is a part of, if the loop split it, and its first row there.
    whole: tuple[IntArray, int] | None = None

    def __post_init__(self) -> None:
        # Not versions, which do not move where numpy or .data writes.
        self.sums = list(map(_of_rows, tensors_of(self.batch)))

    @cached_property
    def unpacked(self) -> tuple[Any, Any]:
        """(inputs, targets), on the model's device."""
        return self.examples.on_device(self.examples.unpacked(self.batch))

    @property
    def is_changed(self) -> bool:
        """Whether the loop wrote into it."""
        return not _equal(self.sums, list(map(_of_rows, tensors_of(self.batch))))

    def read_again(self) -> list[Tensor]:
        """The tensors of the same rows, from the data set."""
        ids, start = self.whole or (self.ids, 0)
        return tensors_of(
            batches.rows_of(self.examples.collated(ids), start, start + len(self.ids))
        )

    def part(self, start: int, size: int) -> "Delivered":
        """Some of its rows."""
        stop = start + size
        part = batches.rows_of(self.batch, start, stop), self.ids[start:stop]
        return Delivered(*part, self.examples, (self.ids, start))

    def places(self, fed: list[Tensor]) -> list[set[int]]:
        """Which of its own each tensor that the model was given may be; [] if not all are its."""
        mine = tensors_of(self.unpacked[0])
        found = [{k for k, own in enumerate(mine) if same_values(one, own)} for one in fed]
        return found if all(found) and not self.is_changed else []


class Deliveries:
    """Batches of the loader that no step has used yet, and comparisons of what they hold."""

    def __init__(
        self, sampler: Any, examples: Examples, findings: Findings, stored: str | None
    ) -> None:
        self._sampler, self._examples, self._findings = sampler, examples, findings
        self._waiting: list[Delivered] = []
        self._used, self._split = -1, 0  # the last of them that was used; rows of it, if in parts
        order = np.random.default_rng(0).permutation(len(examples))  # the same in each session
        self._parts = np.array_split(order, -(-len(order) // _PART))
        self._items = list[str]()  # hashes of those parts that were read when training began
        self._state = fixed_state()  # at which each part is read
        self._own_draws = False  # items draw from generators that the data set has in reach
        self.stored = stored  # how many, and a hash of them all: of the log, or of the beginning
        # By number of a tensor of batches: of each example, its sum when it was loaded last, and
        # its entries, 0 if it was not.
        self._known: dict[int, IntArray] = {}
        self.random_rows = False  # items of the data set were seen to be random

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep every batch that is read in the block by ids of the sampler, in order."""
        plain_index, plain_next = _BaseDataLoaderIter._next_index, _BaseDataLoaderIter.__next__

        def next_index(iterator: Any) -> Any:
            draws = iterator._sampler_iter
            own = iterator._index_sampler is self._sampler and not iterator._num_workers
            if own and getattr(draws, "__name__", "") == "__iter__":  # made before the block
                iterator._sampler_iter = getattr(self._sampler, "reported", iter)(draws)
            ids, index = _ids_of(iterator), plain_index(iterator)
            if ids is not None and _draws(iterator._index_sampler, self._sampler, _DEPTH):
                ids.append(index)
            return index

        def deliver(iterator: Any) -> Any:
            batch = plain_next(iterator)
            if (ids := _ids_of(iterator)) and batch is not None:
                drawn = np.array(ids.popleft(), dtype=np.int64)
                self._waiting.append(Delivered(batch, drawn, self._examples))
            return batch

        with patch.multiple(_BaseDataLoaderIter, _next_index=next_index, __next__=deliver):
            yield

    def match(
        self, fed: list[Tensor], expected: Callable[[int], IntArray | None]
    ) -> tuple[Delivered | None, list[set[int]]]:
        """The batch that the model was given, if the loader's, and its `places`.

        expected: positions of the next rows to train on, given their number.
        """
        for number, one in enumerate(self._waiting):
            if places := one.places(fed):
                self._used = max(self._used, number)
                return one, places
        size = len(fed[0]) if fed and fed[0].ndim else 0
        if not self._waiting and (positions := expected(size)) is not None and size:
            # A loop that reads the data set itself.
            made = Delivered(self._examples.collated(positions), positions, self._examples)
            return (made, places) if (places := made.places(fed)) else (None, [])
        for number, one in enumerate(self._waiting):
            if len(one.ids) == size:
                self._used = max(self._used, number)
                return one, []
            part = one.part(self._split, size)  # of a loop that splits batches itself
            if len(one.ids) > self._split + size - 1 and (places := part.places(fed)):
                self._used, self._split = max(self._used, number), self._split + size
                return part, places
        return None, []

    def skip(self, ids: IntArray) -> None:
        """A step used these rows, and nothing of it is compared."""
        used = (k for k, one in enumerate(self._waiting) if np.array_equal(one.ids, ids))
        self._used = max(self._used, next(used, -1))

    def compare_rows(self, batch: Delivered) -> None:
        """Rows as loaded beside the data set's own items."""
        loaded = tensors_of(batch.batch)
        if batch.is_changed:
            return self._findings.add("rows", "written")
        state, first = random_state(), batch.read_again()
        if _equal(loaded, first):
            return self._findings.add("rows")
        set_random_state(state)
        if not _equal(first, batch.read_again()):
            self._findings.add("rows", "keeps_items")
        elif has_drawn(state):
            self.random_rows = True
            self._findings.add("rows", "random")
        else:
            self._findings.add("rows", "other_rows")

    def compare_known(self, batch: Delivered) -> None:
        """Rows as loaded, beside what they were when they were loaded before."""
        changed = np.zeros(len(batch.ids), dtype=bool)
        for number, tensor in enumerate(tensors_of(batch.batch)):
            sums = batch.sums[number]
            if not sums.ndim or len(sums) != len(changed):
                continue
            size = np.full(len(sums), math.prod(tensor.shape[1:]))  # padded texts vary
            now = np.stack([sums.cpu().numpy(), size])
            empty = np.zeros((2, len(self._examples)), dtype=np.int64)
            known = self._known.setdefault(number, empty)
            before = known[:, batch.ids]
            changed |= (before[1] == now[1]) & (before[0] != now[0])
            known[:, batch.ids] = now
        if self.random_rows or not changed.any():
            return
        state = random_state()
        self._examples.collated(batch.ids[changed][:_FEW])
        if has_drawn(state):
            self.random_rows = True
        else:
            self._findings.add("fed", "items")

    def compare_items(self, *, every: bool) -> None:
        """Items of the data set, or some, beside those of the beginning; first, of the log's."""
        with kept_random_state():
            if self._parts and not self._items:
                return self._read_items()
            some = list(enumerate(self._items))
            some = some if every or not some else [secrets.choice(some)]
            if any(self._hash(number) != before for number, before in some):
                self._findings.add("fed", "items")

    def _read_items(self) -> None:
        self.random_rows = any(self._examples.random_parts)
        many, _, before = (self.stored or "").partition(" ")
        start, count = time.perf_counter(), int(many or len(self._parts))
        for number in range(count):
            if many or time.perf_counter() - start < _READING:
                self._items.append(self._hash(number))
        if self._items[0] != self._hash(0):  # random, by a generator that nobody knows
            self._parts, self._items, self.stored = [], [], None
            return
        held = blake2b("".join(self._items).encode()).hexdigest()
        if before not in ("", held):
            self._findings.add("fed", "items")
        # What it draws from them is known in one session only.
        self.stored = None if self._own_draws else f"{len(self._items)} {held}"

    def _hash(self, number: int) -> str:
        set_random_state(self._state)
        items = self._examples.unpacked(self._examples.collated(self._parts[number]))
        self._own_draws |= has_drawn(own_part(self._state))
        return fingerprint_of({str(k): t for k, t in enumerate(tensors_of(items))})

    def end_step(self) -> None:
        """Forget what was used, and what was read before it."""
        del self._waiting[: self._used + 1]
        self._used, self._split = -1, 0


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_values, one, other))


def _of_rows(tensor: Tensor) -> Tensor:
    """A number for each row, quick to compute."""
    return weighed(tensor.detach().to_dense()) if tensor.ndim else tensor.detach().clone()


def weighed(rows: Tensor, kind: str = "rows") -> Tensor:
    """(n,) sums, modulo 2**64, of the bits of rows (n, ...), each by a secret weight of its place.

    In sums of values one infinite, undefined or huge number would hide the others.
    """
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    rows = (rows.flatten(1) if rows.ndim > 1 else rows[:, None]).contiguous()
    rows = rows.view(_BITS.get(rows.element_size(), torch.int32))
    weights = _weights(rows.shape[1], rows.device, kind)
    parts = rows.split(max(1, _AT_ONCE // max(1, rows.shape[1])))
    return torch.cat([(part * weights).sum(1, dtype=torch.int64) for part in parts])


@lru_cache(256)  # what is made again is the same
def _weights(size: int, device: torch.device, kind: str) -> Tensor:
    random = np.random.default_rng((_SECRET, *kind.encode()))
    return torch.from_numpy(random.integers(-(1 << 63), (1 << 63) - 1, size)).to(device)


def _draws(sampler: Any, drawing: Any, depth: int) -> bool:
    """Whether a loader's sampler is the one that draws, or stands around it."""
    if sampler is drawing or sampler is None or not depth:
        return sampler is drawing
    inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
    return any(_draws(one, drawing, depth - 1) for one in inner)


def _ids_of(iterator: Any) -> Any:
    """Ids that it was given in this epoch and has not delivered; None if it is an evaluation."""
    kept = vars(iterator).get("_indpriv_ids")
    if kept is None or kept[0] is not iterator._sampler_iter:
        ids = deque[Any]() if torch.is_grad_enabled() else None
        kept = vars(iterator)["_indpriv_ids"] = (iterator._sampler_iter, ids)
    return kept[1]


@dataclass
class Call:
    """One forward pass with gradients."""

    arguments: Any  # (args, kwargs) as fed; kept only where the pass will be repeated
    delivered: Any  # the loader's batch that was fed (`Delivered`); None if it was not found
    # Of each tensor that was fed, which of that batch it may be; none if the loop changed it.
    places: Sequence[set[int]] = ()
    outputs: Any = None  # detached
    live: frozenset[int] = frozenset()  # numbers of the tensors of outputs that have a gradient
    versions: list[int] = field(default_factory=list)
    # By these numbers, of the first backward pass, and of the second one of ghost mode.
    gradients: dict[int, Tensor] = field(default_factory=dict)
    second: dict[int, Tensor] = field(default_factory=dict)
    inside: dict[int, Tensor] = field(default_factory=dict)  # before a loss of the model's own
    # A copy of the module as it was before; like the rest, only where it will be repeated.
    twin: Any = None
    random_state: Any = None
    precision: Any = None
    in_float32: bool = False  # the loss takes outputs so, that are in half precision

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
    def is_written(self) -> bool:
        """Whether the loop changed the outputs in place, but for a loss of the model's own."""
        now = [(tensor._version, tensor.ndim) for tensor in tensors_of(self.outputs)]
        return any(n and v != was for (v, n), was in zip(now, self.versions, strict=True))

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.delivered.ids)

    @property
    def targets(self) -> Any:
        """Targets of the rows, on the model's device."""
        return self.delivered.unpacked[1]

    @property
    def has_rows(self) -> bool:
        """Whether every tensor of inputs and targets has a row for each example."""
        fed = tensors_of((self.arguments, self.targets))
        return all(not t.ndim or len(t) == self.size for t in fed)

    @property
    def in_float64(self) -> "Call":
        """The same pass, as it would be."""
        fed, twin = batches.as_real(self.arguments), self.new_twin().double()
        return replace(self, arguments=fed, twin=twin, precision=nullcontext)

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

    @torch.no_grad()
    def outputs_again(self, arguments: Any = None, twin: nn.Module | None = None) -> list[Tensor]:
        """The tensors of what `again` gives."""
        return tensors_of(self.again(arguments, twin))


def _add(gradients: dict[int, Tensor], number: int, grad: Tensor) -> None:
    grad = grad.detach()
    gradients[number] = grad if number not in gradients else gradients[number] + grad


@dataclass
class LossComparison:
    """Gradients at the outputs of training, compared with those of loss_fn, step by step."""

    loss_fn: LossFn
    factors: tuple[float, float] | None = None  # least and largest factor between the two

    def case(
        self, call: Call, size: int, is_mean: bool, clip: Tensor | None
    ) -> tuple[str, dict[str, float]]:
        """How they differ, and values of its text; "" if by one factor for the whole run only.

        clip: (size,) factors by which ghost mode weights its second backward.
        """
        outputs = tensors_of(call.outputs)
        _, wanted = output_gradients(self.loss_fn, call.outputs, call.targets, call.in_float32)
        # A loss of the model's own, which Trainer scales in place.
        inside = not call.gradients or any(outputs[k].ndim == 0 for k in call.gradients)
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
                return "unused", {}
            tolerance = _TOLERANCES.get(actual.dtype, _TOLERANCE)
            factor = _factor(actual, expected, tolerance)
            if (error := relative(actual, factor * expected)) > tolerance:
                each = [_factor(a, e, 0.0) for a, e in zip(actual, expected, strict=True)]
                rows = torch.stack([k * e for k, e in zip(each, expected, strict=True)])
                if expected.ndim > 2 and relative(actual, rows) <= tolerance:  # of tokens
                    return "tokens", {"least": min(each), "most": max(each)}
                if actual.dtype in batches.HALF and not call.in_float32:
                    call.in_float32 = True  # as under autocast, or of outputs.float()
                    return self.case(call, size, is_mean, clip)
                return "differ", {"error": error}
            if bool(expected.any()):
                least, most = self.factors or (factor, factor)
                self.factors = least, most = min(least, factor), max(most, factor)
                if most - least > 4 * tolerance * abs(most):
                    return "factor", {"least": least, "most": most}
            if clip is not None and number in call.second:
                weights = clip.view(-1, *[1] * (expected.ndim - 1)).to(expected) * factor
                error = relative(call.second[number], weights * expected)
                if error > 2 * tolerance:
                    return "second", {"error": error}
        return "", {}


def output_gradients(
    loss_fn: LossFn, outputs: Any, targets: Any, in_float32: bool = False
) -> tuple[Tensor, dict[int, Tensor]]:
    """Losses, and gradients of their sum at these outputs, by number of the tensor."""
    leaves = [
        tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors_of(outputs)
    ]
    following = iter(leaves)
    alike = map_tensors(outputs, lambda _: next(following))
    with torch.enable_grad():
        losses = loss_fn(batches.as_real(alike, torch.float32) if in_float32 else alike, targets)
        floats = [k for k, leaf in enumerate(leaves) if leaf.requires_grad]
        given = torch.autograd.grad(losses.sum(), [leaves[k] for k in floats], allow_unused=True)
    found = {k: grad for k, grad in zip(floats, given, strict=True) if grad is not None}
    return losses.detach(), found


def relative(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest entry of the other; absolute if that is 0."""
    if one.shape != other.shape:
        return math.inf
    if torch.strided not in (one.layout, other.layout):
        return max(map(relative, batches.parts_of(one), batches.parts_of(other)))
    if not one.numel():
        return 0.0
    one, other = one.detach().double(), other.detach().double()
    difference, scale = float((one - other).abs().max()), float(other.abs().max())
    if math.isnan(difference):  # infinite or NaN on both sides alike
        return 0.0 if same_values(one, other) else math.inf
    return difference / scale if scale else difference


def _factor(actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """By which the one is the other, by least squares; 1 where rounding explains the difference."""
    a, e = actual.double(), expected.double()
    squares = float(e.square().sum())
    factor = float((a * e).sum()) / squares if squares else 1.0
    within = abs(factor - 1) <= tolerance
    return 1.0 if within or not math.isfinite(factor) or factor <= 0 else factor
