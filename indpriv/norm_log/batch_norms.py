"""Batch norms: norms of the sampled examples only, which DP-SGD computes anyway. Sensitive.

A step has one entry for each example in its batch. Each file of a log holds many steps, ordered by
position and then by step, in small row groups: a reader of some examples, of however many, reads
little else. An entry takes about two bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from indpriv import _files
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.levels import Levels, dtype_of
from indpriv.norm_log.records import PART_SIZE, RecordFile, check_codes
from indpriv.norm_log.step_settings import StepSettings
from indpriv.norm_log.validation import check_norms

Int32Array = NDArray[np.int32]
_ROW_GROUP = 1 << 14  # entries


@dataclass(frozen=True)
class BatchNormEntries:
    """Entries of a block of examples, ordered by position and then by step.

    Attributes:
        position: (n_entries,) of the example, counted from the start of the block.
        step: (n_entries,) at which it was sampled.
        norm: (n_entries,) codes, or float64 norms if rounding is 0, as in full records.
    """

    position: Int32Array
    step: Int32Array
    norm: NDArray[np.generic]

    def __len__(self) -> int:
        return len(self.step)

    def select(self, chosen: NDArray[Any] | slice) -> BatchNormEntries:
        """Some of the entries, by mask, index or slice."""
        return BatchNormEntries(self.position[chosen], self.step[chosen], self.norm[chosen])

    def ordered(self) -> BatchNormEntries:
        """The same by position and then by step."""
        return self.select(np.lexsort((self.step, self.position)))

    @classmethod
    def joined(cls, parts: Sequence[BatchNormEntries], dtype: Any) -> BatchNormEntries:
        """Entries of parts with ascending steps, by position; their norms are of this type."""
        position, step = (
            np.concatenate([np.zeros(0, np.int32), *(getattr(part, name) for part in parts)])
            for name in ("position", "step")
        )
        norm = np.concatenate([np.zeros(0, dtype), *(part.norm for part in parts)])
        # numpy sorts 16-bit numbers by radix.
        small = position.astype(np.uint16) if position.max(initial=0) < 1 << 16 else position
        return cls(position, step, norm).select(np.argsort(small, kind="stable"))

    def block(self, start: int, stop: int) -> BatchNormEntries:
        """Entries of the examples at positions start to stop, which are then counted from start."""
        bounds = np.array([start, stop], self.position.dtype)  # another type would copy positions
        first, last = np.searchsorted(self.position, bounds)
        entries = self.select(slice(int(first), int(last)))
        if start == 0:
            return entries
        return BatchNormEntries(entries.position - np.int32(start), entries.step, entries.norm)

    def take(self, positions: NDArray[np.int64], n_examples: int) -> BatchNormEntries:
        """Entries of the examples at some of the n_examples positions, renumbered."""
        starts = np.searchsorted(self.position, np.arange(n_examples + 1))
        lengths = np.diff(starts)[positions]
        ends = np.cumsum(lengths)
        index = np.arange(ends[-1] if len(ends) else 0) + np.repeat(
            starts[positions] - (ends - lengths), lengths
        )
        chosen = self.select(index)
        return BatchNormEntries(
            np.repeat(np.arange(len(positions), dtype=np.int32), lengths), chosen.step, chosen.norm
        )


@dataclass(frozen=True)
class ArrayBatchNorms:
    """Batch norms in memory.

    steps: (n_steps,) ascending, those whose whole batch is recorded, even if it is empty.
    """

    steps: NDArray[np.int64]
    entries: BatchNormEntries

    def read(self, start: int, stop: int) -> BatchNormEntries:
        """Entries of the examples at positions start to stop."""
        return self.entries.block(start, stop)


def in_memory(
    batch_norms: Sequence[ArrayLike],
    ids: NDArray[np.generic],
    settings: StepSettings,
    levels: Levels | None,
) -> ArrayBatchNorms:
    """Batch norms of every step from arrays of (steps, positions, norms).

    Raises:
        InputError: lengths differ, a value is out of range, or entries repeat.
    """
    if len(batch_norms) != 3:
        raise InputError(
            f"batch_norms has {len(batch_norms)} parts; pass three: (steps, positions, norms)"
        )
    steps, positions, norms = (np.asarray(part) for part in batch_norms)
    if not (steps.ndim == 1 and steps.shape == positions.shape == norms.shape):
        raise InputError(
            f"batch_norms has shapes {steps.shape}, {positions.shape} and {norms.shape}; pass "
            "steps, positions and norms of one shape (n_entries,)"
        )
    total_steps = len(settings)
    for name, values, limit in (("steps", steps, total_steps), ("positions", positions, len(ids))):
        if values.size and not (
            values.dtype.kind in "iu" and 0 <= values.min() <= values.max() < limit
        ):
            raise InputError(f"batch_norms: {name} must be whole numbers from 0 to {limit - 1}")
    steps, positions = steps.astype(np.int64), positions.astype(np.int64)
    if len(np.unique(positions * total_steps + steps)) < len(steps):
        raise InputError(
            "batch_norms: an example has several norms at one step; pass one entry per example and "
            "step"
        )
    norms = norms.astype(np.float64)
    check_norms(norms, ids[positions])
    kept = norms if levels is None else levels.encode(norms, settings.max_grad_norm[steps])
    entries = BatchNormEntries(positions.astype(np.int32), steps.astype(np.int32), kept)
    return ArrayBatchNorms(np.arange(total_steps), entries.ordered())


def file_bytes(entries: BatchNormEntries, first: int) -> bytes:
    """Content of a file with these entries, given in any order, of steps from `first`."""
    ordered = entries.ordered()
    offset = ordered.step - first
    few = offset.max(initial=0) <= np.iinfo(np.uint8).max
    steps = offset.astype(np.uint8 if few else np.int32)
    table = pa.table({"position": ordered.position, "step": steps, "norm": ordered.norm})
    delta = ("position",) if few else ("position", "step")
    return _files.parquet_bytes(table, delta_encoded=delta, row_group_size=_ROW_GROUP)


@dataclass(frozen=True)
class BatchNormFile:
    """One file, of steps `first` to `first + count - 1`; later entries in it are void."""

    file: RecordFile
    first: int
    count: int


@dataclass(frozen=True)
class FileBatchNorms:
    """Batch norms in files with ascending steps; reads only the row groups that a block needs."""

    steps: NDArray[np.int64]
    parts: tuple[BatchNormFile, ...]
    levels: Levels | None

    def read(self, start: int, stop: int) -> BatchNormEntries:
        """Entries of the examples at positions start to stop."""
        parts = [self._read(part, start, stop) for part in self.parts]
        return BatchNormEntries.joined(parts, dtype_of(self.levels))

    def participations(self, steps: range, n_examples: int) -> Iterator[NDArray[np.int64]]:
        """Number of entries of each example at these steps, in parts of consecutive examples."""
        parts = [
            part
            for part in self.parts
            if part.first < steps.stop and steps.start < part.first + part.count
        ]
        for start in range(0, n_examples, PART_SIZE):
            end = min(start + PART_SIZE, n_examples)
            counts = np.zeros(end - start, np.int64)
            for part in parts:
                entries = self._read(part, start, end)
                inside = (entries.step >= steps.start) & (entries.step < steps.stop)
                counts += np.bincount(entries.position[inside], minlength=len(counts))
            yield counts

    def _read(self, part: BatchNormFile, start: int, stop: int) -> BatchNormEntries:
        path = part.file.path
        with _files.opened_parquet(path, part.file.sha256) as parquet:
            table = parquet.read_row_groups(_groups(parquet, start, stop), use_threads=False)
            position, step, norm = (
                table.column(name).to_numpy() for name in ("position", "step", "norm")
            )
        dtype = np.dtype(dtype_of(self.levels))
        if position.dtype != np.int32 or step.dtype.kind not in "iu" or norm.dtype != dtype:
            raise EvidenceError(
                f"{path} holds positions, steps and norms of {position.dtype}, {step.dtype} and "
                f"{norm.dtype} instead of int32, whole numbers and {dtype}; restore it from a copy"
            )
        if not np.all(position[1:] >= position[:-1]) or (len(step) and step.min() < 0):
            raise EvidenceError(f"{path} has entries out of order; restore it from a copy")
        entries = BatchNormEntries(position, step, norm).block(start, stop)
        check_codes(path, entries.norm, self.levels)
        if len(entries) and int(entries.step.max()) >= part.count:
            entries = entries.select(entries.step < part.count)
        return BatchNormEntries(
            entries.position, entries.step.astype(np.int32) + np.int32(part.first), entries.norm
        )


BatchNorms = ArrayBatchNorms | FileBatchNorms


def _groups(parquet: Any, start: int, stop: int) -> list[int]:
    """Row groups of a file ordered by position that hold some of these positions."""
    chosen = []
    for group in range(parquet.metadata.num_row_groups):
        bounds = parquet.metadata.row_group(group).column(0).statistics
        if bounds is None or (bounds.min < stop and bounds.max >= start):
            chosen.append(group)
    return chosen
