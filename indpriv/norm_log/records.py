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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from indpriv import _checks, _facts, _files
from indpriv._types import ArrayLike, FloatArray, IntArray, NDArray
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.fields import StepSettings, check_norms, widened

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
    """The levels of a rounding r: fractions 0, r, 2r, ..., 1 of max_grad_norm (1 is always one).

    r is in [1e-4, 1]; 0 has no levels: norms are their own codes, in mode "none". Mode "up" never
    under-reports; "nearest" is the paper's, and can.
    """

    rounding: float
    rounding_mode: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", float(_checks.check_rounding(self.rounding)))
        if self.rounding or self.rounding_mode != "none":
            _checks.check_choice("rounding_mode", self.rounding_mode, MODES)
        if not self.rounding:
            object.__setattr__(self, "rounding_mode", "none")

    @property
    def top(self) -> int:
        """The code of max_grad_norm itself."""
        return math.ceil(1 / self.rounding - 1e-9)

    @property
    def max_code(self) -> Any:
        """The largest code, which stands for every clipped norm beyond the scale."""
        if not self.rounding:
            return np.inf
        return min(self.top + _MAX_OVERFLOW, int(np.iinfo(self.dtype).max))

    @property
    def dtype(self) -> Any:
        """One byte per norm if the levels and at least an octave of clipped sizes fit, else two."""
        if not self.rounding:
            return np.float64
        return np.uint8 if self.top + _OVERFLOW_PER_OCTAVE <= np.iinfo(np.uint8).max else np.uint16

    @cached_property
    def fractions(self) -> FloatArray:
        """(top + 1,) relative norms of the levels, as fractions of max_grad_norm."""
        fractions: FloatArray = np.minimum(np.arange(self.top + 1) * self.rounding, 1.0)
        fractions[-1] = 1.0
        return fractions

    def encode(
        self, norms: NDArray[np.floating], max_grad_norm: float | NDArray[np.floating]
    ) -> NDArray[Any]:
        """Codes of norms, before clipping and without NaN; max_grad_norm: of all, or of each."""
        # Infinity counts as clipped. In mode "up" the level of a code is not below its norm.
        if not self.rounding:
            return np.asarray(norms, dtype=np.float64)
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

    def relative(self, codes: Codes) -> FloatArray:
        """Contributions min(norm, C) / C of codes, where C is the max_grad_norm of their record."""
        return self.fractions[np.minimum(codes, self.top)]

    def norms(self, codes: Codes, max_grad_norm: float) -> FloatArray:
        """Norms that codes stand for; of clipped ones, the upper edge of their bin."""
        octaves = np.maximum(codes.astype(np.int64) - self.top, 0) / _OVERFLOW_PER_OCTAVE
        return self.relative(codes) * np.exp2(octaves) * max_grad_norm


FULL_PRECISION = Levels(0.0, "up")


# --- full records


class RecordFile(NamedTuple):
    """A file of a log; sha256: what its hash must be when it is read, or None."""

    path: Path
    sha256: str | None = None


# Files and column of a record: one file, or those of each of the next PART_SIZE examples. None is
# an unreadable file, whose examples count at max_grad_norm.
StoredRecord = tuple[Sequence[RecordFile | None], str]


@dataclass(frozen=True)
class Records:
    """Full records, in memory or in files, of which a block of examples at a time is read."""

    rows: IntArray  # (n_records,) those that the source is asked for, with start and stop
    source: Callable[[IntArray, int, int], NDArray[np.generic]]

    @classmethod
    def of(cls, norms: NDArray[np.generic]) -> "Records":
        """Records (n_records, n_examples) in memory."""
        return cls(np.arange(len(norms)), partial(_read_rows, norms))

    @classmethod
    def stored(cls, records: Sequence[StoredRecord], levels: Levels) -> "Records":
        """Records in Parquet files; reads only the row groups that a block of examples needs."""
        return cls(np.arange(len(records)), partial(_read_files, records, levels))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> "Records":
        """Some of the records, by mask, indices or slice."""
        return replace(self, rows=self.rows[index])

    def read(self, start: int, stop: int) -> NDArray[np.generic]:
        """(n_records, stop - start) codes, or norms if rounding is 0."""
        return self.source(self.rows, start, stop)


def _read_rows(
    norms: NDArray[np.generic], rows: IntArray, start: int, stop: int
) -> NDArray[np.generic]:
    block = norms[:, start:stop]
    return block if len(rows) == len(norms) else block[rows]


def _read_files(
    records: Sequence[StoredRecord], levels: Levels, rows: IntArray, start: int, stop: int
) -> NDArray[np.generic]:
    block: NDArray[Any] = np.empty((len(rows), stop - start), levels.dtype)
    for out, row in enumerate(rows):
        files, column = records[row]
        size = PART_SIZE if len(files) > 1 else max(stop, 1)
        for number in range(start // size, -(-stop // size)):
            first, end = max(start, number * size), min(stop, (number + 1) * size)
            part, before = block[out, first - start : end - start], number * size
            if (file := files[number]) is None:
                part[:] = levels.max_code
            else:
                _read_file(file, column, first - before, end - before, part)
                check_codes(file.path, part, levels)
    return block


def _read_file(file: RecordFile, column: str, start: int, stop: int, out: NDArray[Any]) -> None:
    """Fill `out` with the values of a file from row start to row stop."""
    size = _files.ROW_GROUP_SIZE
    with _files.opened_parquet(file.path, file.sha256) as opened:
        groups = list(range(start // size, -(-stop // size)))
        table = opened.read_row_groups(groups, columns=[column], use_threads=False)
    values: Any = table.column(column).to_numpy()[start % size : start % size + len(out)]
    if values.shape != out.shape or values.dtype != out.dtype:
        raise _facts.damaged("refusal.records", "values", path=file.path, values=values, out=out)
    out[:] = values


def check_codes(path: Path, values: NDArray[Any], levels: Levels) -> None:
    """Raise EvidenceError if a file holds a value that is no code of its levels, or no norm."""
    if not (inside := (values >= 0) & (values <= levels.max_code)).all():  # nor is a NaN
        wrong = {"code": values[~inside][0], "largest": levels.max_code}
        raise _facts.damaged("refusal.records", "code", path=path, **wrong)


# --- batch norms


@dataclass(frozen=True)
class BatchNormEntries:
    """Entries of a block of examples, each (n_entries,), by position and then by step."""

    position: Int32Array  # of the example, from the start of the block
    step: Int32Array  # at which it was sampled
    norm: NDArray[np.generic]  # codes, or float64 norms if rounding is 0

    def __len__(self) -> int:
        return len(self.step)

    def select(self, chosen: NDArray[Any] | slice) -> "BatchNormEntries":
        """Some of the entries, by mask, index or slice."""
        return BatchNormEntries(self.position[chosen], self.step[chosen], self.norm[chosen])

    def ordered(self) -> "BatchNormEntries":
        """The same by position and then by step."""
        return self.select(np.lexsort((self.step, self.position)))

    @classmethod
    def joined(cls, parts: "Sequence[BatchNormEntries]") -> "BatchNormEntries":
        """Entries of one part or more with ascending steps, by position."""
        if len(parts) == 1:
            return parts[0]
        names = ("position", "step", "norm")
        every = cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
        position = every.position
        # numpy sorts 16-bit numbers by radix.
        small = position.astype(np.uint16) if position.max(initial=0) < 1 << 16 else position
        return every.select(np.argsort(small, kind="stable"))

    def block(self, start: int, stop: int) -> "BatchNormEntries":
        """Entries of the examples at positions start to stop, which are then counted from start."""
        bounds = np.array([start, stop], self.position.dtype)  # another type would copy positions
        first, last = np.searchsorted(self.position, bounds)
        entries = self.select(slice(int(first), int(last)))
        if start == 0:
            return entries
        return BatchNormEntries(entries.position - np.int32(start), entries.step, entries.norm)

    def take(self, positions: IntArray, n_examples: int) -> "BatchNormEntries":
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
class BatchNorms:
    """Batch norms in memory, or in files of which a block of examples at a time is read."""

    steps: IntArray  # ascending, those whose whole batch is recorded, even if it is empty
    parts: Sequence[Callable[[int, int], BatchNormEntries]]  # (start, stop) -> entries; in order

    def read(self, start: int, stop: int) -> BatchNormEntries:
        """Entries of the examples at positions start to stop."""
        return BatchNormEntries.joined([part(start, stop) for part in self.parts])

    def participations(self, steps: range, n_examples: int) -> Iterator[IntArray]:
        """Number of entries of each example at these steps, in parts of consecutive examples."""
        for start in range(0, n_examples, PART_SIZE):
            stop = min(start + PART_SIZE, n_examples)
            counts = np.zeros(stop - start, np.int64)
            for part in self.parts:  # one at a time, for memory
                entries = part(start, stop)
                inside = (entries.step >= steps.start) & (entries.step < steps.stop)
                counts += np.bincount(entries.position[inside], minlength=len(counts))
            yield counts


def in_memory(
    batch_norms: Sequence[ArrayLike],
    ids: NDArray[np.generic],
    settings: StepSettings,
    levels: Levels,
) -> tuple[BatchNorms, str]:
    """Batch norms of every step from arrays (steps, positions, norms), checked, and a caveat."""
    if len(batch_norms) != 3:
        raise _facts.refused("refusal.batch_norms", "parts", n=len(batch_norms))
    steps, positions, norms = (np.asarray(part) for part in batch_norms)
    if not (steps.ndim == 1 and steps.shape == positions.shape == norms.shape):
        raise _facts.refused(
            "refusal.batch_norms", "shapes", steps=steps, positions=positions, norms=norms
        )
    total_steps = len(settings)
    for name, values, limit in (("steps", steps, total_steps), ("positions", positions, len(ids))):
        if values.size and not (
            values.dtype.kind in "iu" and 0 <= values.min() <= values.max() < limit
        ):
            raise InputError(f"batch_norms: {name} must be whole numbers from 0 to {limit - 1}")
    steps, positions = steps.astype(np.int64), positions.astype(np.int64)
    if len(np.unique(positions * total_steps + steps)) < len(steps):
        raise _facts.refused("refusal.batch_norms", "twice")
    check_norms(norms, ids[positions])
    norms, narrow = widened(norms)
    kept = levels.encode(norms, settings.max_grad_norm[steps])
    entries = BatchNormEntries(positions.astype(np.int32), steps.astype(np.int32), kept)
    return BatchNorms(np.arange(total_steps), [entries.ordered().block]), narrow


def file_bytes(entries: BatchNormEntries, first: int) -> bytes:
    """Content of a file with these entries, given in any order, of steps from `first`."""
    ordered = entries.ordered()
    offset = ordered.step - first
    few = offset.max(initial=0) <= np.iinfo(np.uint8).max
    steps = offset.astype(np.uint8 if few else np.int32)
    table = pa.table({"position": ordered.position, "step": steps, "norm": ordered.norm})
    delta = ("position",) if few else ("position", "step")
    return _files.parquet_bytes(table, delta_encoded=delta, row_group_size=_ROW_GROUP)


def read_entries(
    file: RecordFile, first: int, count: int, levels: Levels, start: int, stop: int
) -> BatchNormEntries:
    """Entries of some examples in the file of `count` steps from first on; later ones are void."""
    with _files.opened_parquet(file.path, file.sha256) as parquet:
        table = parquet.read_row_groups(_groups(parquet, start, stop), use_threads=False)
        position, step, norm = (
            table.column(name).to_numpy() for name in ("position", "step", "norm")
        )
    dtype = np.dtype(levels.dtype)
    if position.dtype != np.int32 or step.dtype.kind not in "iu" or norm.dtype != dtype:
        found = {"position": position.dtype, "step": step.dtype, "norm": norm.dtype}
        raise _facts.damaged("refusal.records", "types", path=file.path, dtype=dtype, **found)
    if not np.all(position[1:] >= position[:-1]) or (len(step) and step.min() < 0):
        raise EvidenceError(f"{file.path} has entries out of order; restore it from a copy")
    entries = BatchNormEntries(position, step, norm).block(start, stop)
    check_codes(file.path, entries.norm, levels)
    if len(entries) and int(entries.step.max()) >= count:
        entries = entries.select(entries.step < count)
    return replace(entries, step=entries.step.astype(np.int32) + np.int32(first))


def _groups(parquet: Any, start: int, stop: int) -> list[int]:
    """Row groups of a file ordered by position that hold some of these positions."""
    groups = range(parquet.metadata.num_row_groups)
    found = ((group, parquet.metadata.row_group(group).column(0).statistics) for group in groups)
    return [
        group
        for group, bounds in found
        if bounds is None or (bounds.min < stop and bounds.max >= start)
    ]
