"""What a log keeps of norms: codes of their levels, full records, and batch norms. Sensitive.

Norms are rounded to integer codes, in units of a fraction of the clipping norm. A code at most
`top` means a norm of at most `code * rounding * max_grad_norm`; the top level is max_grad_norm
itself. A code above `top` means a clipped norm. Its size is kept on a logarithmic scale, for
choosing max_grad_norm; accounting only uses that it is clipped.

A full record of more than LARGEST_FILE examples is several files, each with the next PART_SIZE
examples.

Batch norms are those of the sampled examples only, which DP-SGD computes anyway: a step has one
entry for each example in its batch. Each file of a log holds many steps, ordered by position and
then by step, in small row groups: a reader of some examples, of however many, reads little else. An
entry takes about two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from indpriv import _files
from indpriv._arrays import IntArray
from indpriv._checks import check_choice, check_rounding
from indpriv._columns import Rows
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.fields import StepSettings, check_norms

MODES = ("up", "nearest")
_OVERFLOW_PER_OCTAVE = 8
_MAX_OVERFLOW = 16 * _OVERFLOW_PER_OCTAVE  # sizes of clipped norms up to 2^16 times max_grad_norm

Codes = NDArray[np.unsignedinteger]
PART_SIZE = _files.ROW_GROUP_SIZE
LARGEST_FILE = 4 * PART_SIZE  # examples
Int32Array = NDArray[np.int32]
_ROW_GROUP = 1 << 14  # entries


@dataclass(frozen=True)
class Levels:
    """The levels of a rounding: fractions 0, r, 2r, ..., 1 of max_grad_norm (1 is always one).

    Args:
        rounding: r, a fraction of max_grad_norm in [1e-4, 1].
        rounding_mode: "up" never under-reports; "nearest" reproduces the paper's rounding and can.

    >>> Levels(0.5, "up").fractions
    array([0. , 0.5, 1. ])
    """

    rounding: float
    rounding_mode: str

    def __post_init__(self) -> None:
        if check_rounding(self.rounding) == 0:
            raise InputError("rounding=0 has no levels; keep the norms themselves")
        check_choice("rounding_mode", self.rounding_mode, MODES)

    @property
    def top(self) -> int:
        """The code of max_grad_norm itself."""
        return math.ceil(1 / self.rounding - 1e-9)

    @property
    def max_code(self) -> int:
        """The largest code, which stands for every clipped norm beyond the scale."""
        return min(self.top + _MAX_OVERFLOW, int(np.iinfo(self.dtype).max))

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """One byte per norm if the levels and at least an octave of clipped sizes fit, else two."""
        return np.uint8 if self.top + _OVERFLOW_PER_OCTAVE <= np.iinfo(np.uint8).max else np.uint16

    @cached_property
    def fractions(self) -> NDArray[np.float64]:
        """(top + 1,) relative norms of the levels, as fractions of max_grad_norm."""
        fractions: NDArray[np.float64] = np.minimum(np.arange(self.top + 1) * self.rounding, 1.0)
        fractions[-1] = 1.0
        return fractions

    def encode(
        self, norms: NDArray[np.floating], max_grad_norm: float | NDArray[np.floating]
    ) -> Codes:
        """Round norms to codes.

        Args:
            norms: gradient norms before clipping, of any shape, at least 0, without NaN; infinity
                counts as clipped.
            max_grad_norm: the clipping norm of all, or of each.

        Returns:
            codes of the same shape. With mode "up" the level of a code is never below its norm.
        """
        relative = np.asarray(norms, dtype=np.float64) / max_grad_norm
        inside = np.minimum(relative, 1.0)
        if self.rounding_mode == "up":
            # The division may have underflowed.
            inside = np.where((inside == 0) & (norms > 0), np.nextafter(0.0, 1.0), inside)
            codes = np.minimum(np.ceil(inside / self.rounding), self.top).astype(np.int64)
            # In floats 0.07 / 0.01 is above 7.
            codes -= (codes > 0) & (self.fractions[np.maximum(codes - 1, 0)] >= inside)
            codes += self.fractions[codes] < inside
        else:
            codes = np.minimum(np.floor(inside / self.rounding + 0.5), self.top).astype(np.int64)
        clipped = relative > 1.0
        if clipped.any():
            octaves = np.ceil(_OVERFLOW_PER_OCTAVE * np.log2(relative[clipped]))
            above = np.clip(octaves, 1, self.max_code - self.top)
            codes[clipped] = self.top + above.astype(np.int64)
        return codes.astype(self.dtype)

    def relative(self, codes: Codes) -> NDArray[np.float64]:
        """Contributions min(norm, C) / C of codes, where C is the max_grad_norm of their record."""
        return self.fractions[np.minimum(codes, self.top)]

    def norms(self, codes: Codes, max_grad_norm: float) -> NDArray[np.float64]:
        """Norms that codes stand for; of clipped ones, the upper edge of their bin."""
        octaves = np.maximum(codes.astype(np.int64) - self.top, 0) / _OVERFLOW_PER_OCTAVE
        return self.relative(codes) * np.exp2(octaves) * max_grad_norm


def levels_of(rounding: float, rounding_mode: str) -> Levels | None:
    """The levels of a checked rounding; None if it is 0, which keeps norms in full."""
    check_choice("rounding_mode", rounding_mode, MODES)
    return Levels(rounding, rounding_mode) if check_rounding(rounding) else None


def dtype_of(levels: Levels | None) -> Any:
    """The type of codes; that of norms where they are kept in full."""
    return np.float64 if levels is None else levels.dtype


# --- full records


@dataclass(frozen=True)
class StoredIds:
    """A column of a Parquet file as an array whose rows are read when they are asked for."""

    rows: Rows
    column: str

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """That of the values."""
        return self._read(0, 1).dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any, /) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._read(start, max(start, stop))[::step]
        index = np.asarray(key)
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise IndexError(f"a mask of shape {index.shape} for {len(self)} ids")
            index = np.flatnonzero(index)
        index = np.where(index < 0, index + len(self), index).astype(np.int64)
        if ((index < 0) | (index >= len(self))).any():
            raise IndexError(f"a position out of range for {len(self)} ids")
        found: NDArray[Any] = np.empty(index.shape, self.dtype)
        for start, stop in self.rows.ranges():
            here = (index >= start) & (index < stop)
            if here.any():
                found[here] = self._read(start, stop)[index[here] - start]
        return found[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        values: NDArray[Any] = self.rows.read(start, stop, [self.column])[self.column].to_numpy()
        return values


class Records(Protocol):
    """Rows of a log."""

    def read(self, rows: IntArray, start: int, stop: int) -> NDArray[np.generic]:
        """(len(rows), stop - start) codes, or float64 norms if rounding is 0."""
        ...


@dataclass(frozen=True)
class ArrayRecords:
    """Rows (n_rows, n_examples) in memory."""

    rows: NDArray[np.generic]

    def read(self, rows: IntArray, start: int, stop: int) -> NDArray[np.generic]:
        """See Records."""
        block = self.rows[:, start:stop]
        return block if len(rows) == len(self.rows) else block[rows]


class RecordFile(NamedTuple):
    """A file of a log; sha256: what its hash must be when it is read, or None."""

    path: Path
    sha256: str | None = None


@dataclass(frozen=True)
class FileRecords:
    """Rows in Parquet files; reads only the row groups that a block of examples needs.

    Attributes:
        rows: files and column of each row: one file, or those of each of the next PART_SIZE
            examples. None is an unreadable file, whose examples count at max_grad_norm.
        levels: of the log; None if rounding is 0.
    """

    rows: Sequence[tuple[Sequence[RecordFile | None], str]]
    levels: Levels | None

    def read(self, rows: IntArray, start: int, stop: int) -> NDArray[np.generic]:
        """See Records."""
        block: NDArray[Any] = np.empty((len(rows), stop - start), dtype_of(self.levels))
        for out, row in enumerate(rows):
            files, column = self.rows[row]
            size = PART_SIZE if len(files) > 1 else max(stop, 1)
            for number in range(start // size, -(-stop // size)):
                first, end = max(start, number * size), min(stop, (number + 1) * size)
                found = block[out, first - start : end - start]
                self._read(files[number], column, first - number * size, found)
        return block

    def _read(
        self, file: RecordFile | None, column: str, start: int, out: NDArray[np.generic]
    ) -> None:
        """Fill `out` with the values of a file from the row `start` on."""
        if file is None:
            out[:] = np.inf if self.levels is None else self.levels.max_code
            return
        size, stop = _files.ROW_GROUP_SIZE, start + len(out)
        with _files.opened_parquet(file.path, file.sha256) as opened:
            groups = list(range(start // size, -(-stop // size)))
            table = opened.read_row_groups(groups, columns=[column], use_threads=False)
        offset = start - groups[0] * size
        values: Any = table.column(column).to_numpy()[offset : offset + len(out)]
        if values.shape != out.shape or values.dtype != out.dtype:
            raise EvidenceError(
                f"{file.path} holds {values.shape} values of {values.dtype} instead of "
                f"{out.shape} of {out.dtype}; restore it from a copy"
            )
        check_codes(file.path, values, self.levels)
        out[:] = values


def check_codes(path: Path, values: NDArray[Any], levels: Levels | None) -> None:
    """Raise EvidenceError if a file holds a value that is no code of its levels, or no norm."""
    largest = np.inf if levels is None else levels.max_code
    if not (inside := (values >= 0) & (values <= largest)).all():  # nor is a NaN
        raise EvidenceError(
            f"{path}: code {values[~inside][0]} is above the top code {largest} of its "
            "rounding, or below 0"
        )


# --- batch norms


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
    def joined(cls, parts: Sequence[BatchNormEntries], levels: Levels | None) -> BatchNormEntries:
        """Entries of parts with ascending steps, by position; levels: of all."""
        position, step = (
            np.concatenate([np.zeros(0, np.int32), *(getattr(part, name) for part in parts)])
            for name in ("position", "step")
        )
        norm = np.concatenate([np.zeros(0, dtype_of(levels)), *(part.norm for part in parts)])
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
class FileBatchNorms:
    """Batch norms in files with ascending steps; reads only the row groups that a block needs.

    Attributes:
        steps: as of `ArrayBatchNorms`.
        parts: each file, its first step and the number of steps; later entries in it are void.
        levels: of the log; None if rounding is 0.
    """

    steps: NDArray[np.int64]
    parts: Sequence[tuple[RecordFile, int, int]]
    levels: Levels | None

    def read(self, start: int, stop: int) -> BatchNormEntries:
        """Entries of the examples at positions start to stop."""
        parts = [self._read(*part, start, stop) for part in self.parts]
        return BatchNormEntries.joined(parts, self.levels)

    def participations(self, steps: range, n_examples: int) -> Iterator[NDArray[np.int64]]:
        """Number of entries of each example at these steps, in parts of consecutive examples."""
        for start in range(0, n_examples, PART_SIZE):
            end = min(start + PART_SIZE, n_examples)
            counts = np.zeros(end - start, np.int64)
            for file, first, count in self.parts:
                if first < steps.stop and steps.start < first + count:
                    entries = self._read(file, first, count, start, end)
                    inside = (entries.step >= steps.start) & (entries.step < steps.stop)
                    counts += np.bincount(entries.position[inside], minlength=len(counts))
            yield counts

    def _read(
        self, file: RecordFile, first: int, count: int, start: int, stop: int
    ) -> BatchNormEntries:
        with _files.opened_parquet(file.path, file.sha256) as parquet:
            table = parquet.read_row_groups(_groups(parquet, start, stop), use_threads=False)
            position, step, norm = (
                table.column(name).to_numpy() for name in ("position", "step", "norm")
            )
        dtype = np.dtype(dtype_of(self.levels))
        if position.dtype != np.int32 or step.dtype.kind not in "iu" or norm.dtype != dtype:
            raise EvidenceError(
                f"{file.path} holds positions, steps and norms of {position.dtype}, {step.dtype} "
                f"and {norm.dtype} instead of int32, whole numbers and {dtype}; restore it from a "
                "copy"
            )
        if not np.all(position[1:] >= position[:-1]) or (len(step) and step.min() < 0):
            raise EvidenceError(f"{file.path} has entries out of order; restore it from a copy")
        entries = BatchNormEntries(position, step, norm).block(start, stop)
        check_codes(file.path, entries.norm, self.levels)
        if len(entries) and int(entries.step.max()) >= count:
            entries = entries.select(entries.step < count)
        return replace(entries, step=entries.step.astype(np.int32) + np.int32(first))


BatchNorms = ArrayBatchNorms | FileBatchNorms


def _groups(parquet: Any, start: int, stop: int) -> list[int]:
    """Row groups of a file ordered by position that hold some of these positions."""
    groups = range(parquet.metadata.num_row_groups)
    found = ((group, parquet.metadata.row_group(group).column(0).statistics) for group in groups)
    return [
        group
        for group, bounds in found
        if bounds is None or (bounds.min < stop and bounds.max >= start)
    ]
