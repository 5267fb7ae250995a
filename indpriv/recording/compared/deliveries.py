"""What the attached loader gave, for which ids, which of it training used, and whether it is right.

Sensitive.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter

from indpriv._arrays import IntArray
from indpriv._facts import text
from indpriv.recording.compared.findings import REFUTED, UNKNOWN, Findings
from indpriv.recording.norms.batches import map_tensors, same_values, tensors_of
from indpriv.recording.random_states import kept_random_state, random_state, set_random_state
from indpriv.recording.training_data import Examples

_OFTEN = 12  # times that rows are read again to see whether they are random
_ROWS = 32  # of the data set, secret ones, that are read again
_DEPTH = 4  # of samplers around the one that draws: BatchMemoryManager's, those of trainers


@dataclass
class Delivered:
    """One batch of the loader.

    Attributes:
        batch: as the loader gave it.
        ids: (n,) of its rows, as drawn.
        whole: ids of the batch that it is a part of, if the loop split it, and its first row there.
    """

    batch: Any
    ids: IntArray
    examples: Examples
    whole: tuple[IntArray, int] | None = None

    def __post_init__(self) -> None:
        held = tensors_of(self.batch)
        # The former do not move where numpy or .data writes.
        self._versions, self._sums = [t._version for t in held], list(map(_of_rows, held))

    @cached_property
    def unpacked(self) -> tuple[Any, Any]:
        """(inputs, targets), on the model's device."""
        return self.examples.on_device(self.examples.unpacked(self.batch))

    @property
    def is_changed(self) -> bool:
        """Whether the loop wrote into it."""
        held = tensors_of(self.batch)
        sums = zip(self._sums, map(_of_rows, held), strict=True)
        same = self._versions == [t._version for t in held]
        return not (same and all(same_values(was, now) for was, now in sums))

    def read_again(self) -> Any:
        """The same rows, from the data set."""
        ids, start = self.whole or (self.ids, 0)
        return _rows(collated(self.examples, ids), start, len(self.ids))

    def part(self, start: int, size: int) -> Delivered:
        """Some of its rows."""
        ids = self.ids[start : start + size]
        return Delivered(_rows(self.batch, start, size), ids, self.examples, (self.ids, start))

    def holds(self, fed: list[Tensor]) -> bool:
        """Whether all tensors that the model was given are of this batch, values unchanged."""
        mine = tensors_of(self.unpacked[0])
        return not self.is_changed and all(any(same_values(one, t) for t in mine) for one in fed)


class Deliveries:
    """Batches of the loader that no step has used yet, and comparisons of what they hold.

    Attributes:
        random_rows: items of the data set were seen to be random.
    """

    def __init__(self, sampler: Any, examples: Examples, findings: Findings) -> None:
        self._sampler, self._examples, self._findings = sampler, examples, findings
        self._waiting: list[Delivered] = []
        self._used, self._split = -1, 0  # the last of them that was used; rows of it, if in parts
        count = min(len(examples), _ROWS)
        chosen = np.random.default_rng(secrets.randbits(128)).choice(len(examples), count, False)
        self._items = chosen, random_state(), list[Tensor]()  # positions, state, how they were
        self._read_equal = False  # at some step, what the loader gave was read again
        self.random_rows = False

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
                self._waiting.append(
                    Delivered(batch, np.array(ids.popleft(), dtype=np.int64), self._examples)
                )
            return batch

        owner: Any = _BaseDataLoaderIter
        owner._next_index, owner.__next__ = next_index, deliver
        try:
            yield
        finally:
            owner._next_index, owner.__next__ = plain_index, plain_next

    def match(
        self, fed: list[Tensor], expected: Callable[[int], IntArray | None]
    ) -> tuple[Delivered | None, bool]:
        """The batch that the model was given, and whether it is as the loader gave it.

        expected: positions of the next rows to train on, given their number.
        """
        for number, one in enumerate(self._waiting):
            if one.holds(fed):
                self._used = max(self._used, number)
                return one, True
        size = len(fed[0]) if fed and fed[0].ndim else 0
        if not self._waiting and (positions := expected(size)) is not None and size:
            batch = collated(self._examples, positions)  # a loop that reads the data set itself
            made = Delivered(batch, positions, self._examples)
            return (made, True) if made.holds(fed) else (None, False)
        for number, one in enumerate(self._waiting):
            if len(one.ids) == size:
                self._used = max(self._used, number)
                return one, False
            part = one.part(self._split, size)  # of a loop that splits batches itself
            if len(one.ids) > self._split + size - 1 and part.holds(fed):
                self._used, self._split = max(self._used, number), self._split + size
                return part, True
        return None, False

    def skip(self, ids: IntArray) -> None:
        """A step used these rows, and nothing of it is compared."""
        for number, one in enumerate(self._waiting):
            if np.array_equal(one.ids, ids):
                self._used = max(self._used, number)
                return

    def compare_fed(self, ids: IntArray, positions: IntArray | None, intact: bool) -> None:
        """Rows of the batch that was fed, beside the next that were drawn."""
        if positions is None or not np.array_equal(ids, positions):
            self._findings.add("fed", REFUTED, text("check.fed", "other_rows"))
        elif len(np.unique(ids)) < len(ids):
            self._findings.add("fed", REFUTED, text("check.fed", "twice"))
        else:
            self._findings.compare("fed", intact, text("check.fed", "changed"), UNKNOWN)

    def compare_rows(self, batch: Delivered) -> None:
        """Rows as loaded beside the data set's own items."""
        loaded = tensors_of(batch.batch)
        if batch.is_changed:
            return self._findings.add("rows", UNKNOWN, text("check.rows", "written"))
        state, first = random_state(), tensors_of(batch.read_again())
        if _equal(loaded, first):
            self._read_equal = True
            apart = not _mixes(self._examples, batch.ids)
            return self._findings.compare("rows", apart, text("check.rows", "together"))
        set_random_state(state)
        again = (tensors_of(batch.read_again()) for _ in range(_OFTEN))
        if not _equal(first, next(again)):
            self._findings.add("rows", REFUTED, text("check.rows", "keeps_items"))
        elif self._read_equal or not all(_equal(first, other) for other in again):
            self.random_rows = True
            self._findings.add("rows", UNKNOWN, text("check.rows", "random"))
        else:
            self._findings.add("rows", REFUTED, text("check.rows", "other_rows"))

    def compare_items(self) -> None:
        """Some items of the data set, beside what they were when training began."""
        chosen, state, before = self._items
        with kept_random_state():
            set_random_state(state)
            now = tensors_of(self._examples.unpacked(collated(self._examples, chosen)))
            if not before:
                before += [tensor.clone() for tensor in now]
                few = (tensors_of(collated(self._examples, chosen[:2])) for _ in range(_OFTEN))
                first = next(few)
                self.random_rows = not all(_equal(first, other) for other in few)
        if not _equal(now, before):
            self._findings.add("fed", UNKNOWN, text("check.fed", "items"))

    def end_step(self) -> None:
        """Forget what was used, and what was read before it."""
        del self._waiting[: self._used + 1]
        self._used, self._split = -1, 0


def read(examples: Examples, positions: IntArray) -> Any:
    """These rows as the loader reads them: a list of items, or whatever the data set makes."""
    several = getattr(examples.dataset, "__getitems__", None)
    if several is not None:
        return several(positions.tolist())
    return [examples.dataset[int(position)] for position in positions]


def collated(examples: Examples, positions: IntArray) -> Any:
    """A batch of these rows, as the loader makes it."""
    return (examples.collate_fn or default_collate)(read(examples, positions))


def _mixes(examples: Examples, ids: IntArray) -> bool:
    """Whether the data set makes something else of a row when it is asked for several at once."""
    if not hasattr(examples.dataset, "__getitems__"):
        return False
    place = secrets.randbelow(len(ids))

    def among_others() -> list[Tensor]:
        items = read(examples, ids)
        is_list = isinstance(items, list) and len(items) == len(ids)
        return (
            tensors_of((examples.collate_fn or default_collate)([items[place]]))
            if is_list
            else alone()
        )

    def alone() -> list[Tensor]:
        return tensors_of(collated(examples, ids[[place]]))

    mine, theirs = alone(), among_others()
    return not _equal(mine, theirs) and all(  # or items are random
        _equal(mine, alone()) and _equal(theirs, among_others()) for _ in range(_OFTEN)
    )


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_values, one, other))


def _of_rows(tensor: Tensor) -> Tensor:
    """A number for each row, quick to compute."""
    return tensor.detach().flatten(1).sum(1) if tensor.ndim > 1 else tensor.detach().clone()


def _rows(batch: Any, start: int, size: int) -> Any:
    return map_tensors(batch, lambda t: t[start : start + size] if t.ndim else t)


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
