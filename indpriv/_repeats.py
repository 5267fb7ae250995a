"""Which of many rows share a value, in memory that does not grow with them. Sensitive."""

from __future__ import annotations

import errno
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import pandas as pd

from indpriv._types import IntArray, NDArray
from indpriv.errors import InputError

Reader = Callable[[int, int], NDArray[np.generic]]  # of the ids from start to stop

_AT_ONCE = 1 << 20  # rows of a file
_MOST_FILES = 256
_BYTES_OF_ROW = 16  # its number and its position
_INT64 = 2.0**63  # that whole numbers lie below


class Repeats:
    """Finds rows that share a 64-bit number.

    Numbers and positions of many rows lie in temporary files, each with the numbers of one
    remainder, so that all rows with a number are in one of them. Use it as a context.
    """

    def __init__(self, n: int) -> None:
        """n: about how many rows will come."""
        n_files = min(_MOST_FILES, max(1, -(-n // _AT_ONCE)))
        self._open, self._n, self._expected = ExitStack(), 0, n
        with self._room():
            self._files: list[IO[bytes]] = [
                self._open.enter_context(io.BytesIO() if n_files == 1 else TemporaryFile())  # noqa: SIM115
                for _ in range(n_files)
            ]

    def __enter__(self) -> Repeats:
        return self

    def __exit__(self, *error: object) -> None:
        with self._room():  # closing writes what is left
            self._open.close()

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Raise one InputError if the block finds no room for temporary files; others go on."""
        n = max(self._n, self._expected)
        remedy = (
            f"To find repeated rows, {n:,} hashes take up to {-(-n * _BYTES_OF_ROW // 2**20):,} "
            "MiB there; free it, or set TMPDIR to a folder with room"
        )
        try:
            folder = tempfile.gettempdir()
        except FileNotFoundError as error:
            raise InputError(f"no folder for temporary files can be written. {remedy}") from error
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise InputError(
                f"{folder}, the folder of temporary files, is full. {remedy}"
            ) from error

    def add(self, numbers: NDArray[np.uint64]) -> None:
        """The numbers (n,) of the next rows."""
        n = len(numbers)
        pairs = np.stack([numbers, np.arange(self._n, self._n + n, dtype=np.uint64)], axis=1)
        self._n += n
        file = numbers % np.uint64(len(self._files))
        order = np.argsort(file, kind="stable")
        ends = np.cumsum(np.bincount(file.astype(np.int64), minlength=len(self._files)))
        with self._room():
            for one, rows in zip(self._files, np.split(pairs[order], ends[:-1]), strict=True):
                one.write(rows.tobytes())

    def positions(self, most: int | None = None) -> IntArray:
        """Increasing positions of the rows of whole groups, of at most about this many rows."""
        found, n = [np.zeros(0, np.int64)], 0
        for numbers, positions in self._sorted():
            same = np.concatenate([[False], numbers[1:] == numbers[:-1], [False]])
            members = np.flatnonzero(same[1:] | same[:-1])  # of a group: its rows follow each other
            first = np.where(same[members], 0, np.arange(len(members)))
            before = n + np.maximum.accumulate(first)  # rows of the groups before it
            found.append(positions[members if most is None else members[before < most]])
            n += len(found[-1])
        return np.sort(np.concatenate(found))

    def distinct(self) -> int:
        """Number of distinct numbers."""
        return sum(len(np.unique(numbers)) for numbers, _ in self._sorted())

    def _sorted(self) -> Iterator[tuple[NDArray[np.uint64], IntArray]]:
        """The numbers of each file in order, and their positions."""
        for file in self._files:
            with self._room():  # what is left is written first
                file.seek(0)
            pairs = np.frombuffer(file.read(), np.uint64).reshape(-1, 2)
            order = np.argsort(pairs[:, 0], kind="stable")
            yield pairs[order, 0], pairs[order, 1].astype(np.int64)


def numbers_of(values: NDArray[np.generic] | pd.Series[Any]) -> NDArray[np.uint64]:
    """(n,) a number that equal values share, and hardly any others.

    Whole numbers share theirs with equal floats: a range of rows with a missing value has floats.
    """
    column = pd.Series(values)
    numbers = np.array(pd.util.hash_pandas_object(column, index=False), np.uint64)
    if column.dtype.kind == "f":
        floats = column.to_numpy(np.float64, na_value=np.nan)
        whole = (floats == np.floor(floats)) & (np.abs(floats) < _INT64)
        numbers[whole] = numbers_of(floats[whole].astype(np.int64))
    return numbers


def repeated(ids: Reader, ranges: Sequence[tuple[int, int]]) -> IntArray:
    """Increasing positions of rows whose number occurs in another row; ranges cover all in order.

    Whole numbers in order, as ids often are, are only looked at.
    """
    if _increasing(ids, ranges):
        return np.zeros(0, np.int64)
    with Repeats(ranges[-1][1] if ranges else 0) as found:
        for start, stop in ranges:
            found.add(numbers_of(ids(start, stop)))
        return found.positions()


def _increasing(ids: Reader, ranges: Sequence[tuple[int, int]]) -> bool:
    last: NDArray[Any] | None = None
    for start, stop in ranges:
        part: NDArray[Any] = ids(start, stop)
        part = part if last is None else np.append(last, part)
        if part.dtype.kind not in "iu" or not bool((part[1:] > part[:-1]).all()):
            return False
        last = part[-1:]
    return True
