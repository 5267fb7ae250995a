"""Records: where the rows of a log live, in memory or in Parquet files. Sensitive.

A record of more than LARGEST_FILE examples is several files, each with the next PART_SIZE examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from indpriv import _files
from indpriv._arrays import IntArray
from indpriv.errors import EvidenceError
from indpriv.norm_log.levels import Levels, dtype_of

PART_SIZE = _files.ROW_GROUP_SIZE
LARGEST_FILE = 4 * PART_SIZE  # examples


@dataclass(frozen=True)
class StoredIds:
    """A column of a Parquet file as an array whose rows are read when they are asked for."""

    rows: _files.ParquetRows
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


@dataclass(frozen=True)
class RecordFile:
    """A file of a log; sha256: what its hash must be when it is read, or None."""

    path: Path
    sha256: str | None = None


@dataclass(frozen=True)
class FileRecord:
    """One row of a log: a column of one file, or of those of each of the next PART_SIZE examples.

    None is an unreadable file, whose examples count at max_grad_norm.
    """

    files: tuple[RecordFile | None, ...]
    column: str


@dataclass(frozen=True)
class FileRecords:
    """Rows in Parquet files; reads only the row groups that a block of examples needs.

    levels: of the log; None if rounding is 0.
    """

    rows: list[FileRecord]
    levels: Levels | None

    def read(self, rows: IntArray, start: int, stop: int) -> NDArray[np.generic]:
        """See Records."""
        block: NDArray[Any] = np.empty((len(rows), stop - start), dtype_of(self.levels))
        for out, row in enumerate(rows):
            files, column = self.rows[row].files, self.rows[row].column
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
            f"{path}: code {values[~inside][0]} is above the top code {largest} of its rounding, or "
            "below 0"
        )
