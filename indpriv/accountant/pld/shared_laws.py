"""Tables of functions of the one-step laws of a run, which all its blocks and threads share.

A row of a table belongs to one law and does not depend on which other rows were asked for, nor on
any example: so results do not depend on the order in which threads need them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray

Arrays = tuple[NDArray[Any], ...]

_MOST_BYTES = 1 << 29  # of the tables of a run; those used longest ago are made again if needed
_MOST_RUNS = 4  # whose tables are kept: of one account, laws rounded up and down, and worst cases


class _Lock:
    """A lock among the threads of one process: a copy in another process is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[_Lock], tuple[()]]:
        return _Lock, ()


@dataclass
class _Table:
    """Rows that are made when they are first needed; arrays have shape (n_laws, ...)."""

    made: NDArray[np.bool_]
    arrays: Arrays = ()
    lock: _Lock = field(default_factory=_Lock)
    n_bytes: int = 0  # as counted among those of all tables


class SharedLaws:
    """The laws of the loss of one step that a run has, and tables of their functions.

    Attributes:
        shift: (n_laws,) relative_norm / noise_multiplier, above 0.
        sample_rate: (n_laws,) in (0, 1).
    """

    def __init__(self, shift: FloatArray, sample_rate: FloatArray) -> None:
        self.shift, self.sample_rate = shift, sample_rate
        self._tables: OrderedDict[Hashable, _Table] = OrderedDict()
        self._lock = _Lock()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self.shift)

    def rows(
        self, key: Hashable, needed: NDArray[np.bool_], make: Callable[[NDArray[np.intp]], Arrays]
    ) -> Arrays:
        """Tables of shape (n_laws, ...) of which the needed rows are filled in; others may be 0.

        Args:
            key: names the function and all that it depends on besides the law.
            needed: (n_laws,) laws whose rows are read.
            make: returns arrays (k, ...) for the laws at k positions.
        """
        with self._lock:
            table = self._tables.setdefault(key, _Table(np.zeros(len(self), dtype=bool)))
            self._tables.move_to_end(key)
        with table.lock:
            missing, new = np.flatnonzero(needed & ~table.made), not table.arrays
            if len(missing) or new:
                found = make(missing)
                if new:
                    shapes = [(len(self), *array.shape[1:]) for array in found]
                    table.arrays = tuple(
                        np.zeros(shape, array.dtype)
                        for shape, array in zip(shapes, found, strict=True)
                    )
                for array, rows in zip(table.arrays, found, strict=True):
                    array[missing] = rows
                table.made[missing] = True
        if new:
            self._count(key, table)
        return table.arrays

    def _count(self, key: Hashable, table: _Table) -> None:
        """Count the bytes of a new table, and forget the oldest ones where there are too many."""
        with self._lock:
            if self._tables.get(key) is table:
                table.n_bytes = sum(array.nbytes for array in table.arrays)
                self._n_bytes += table.n_bytes
            while self._n_bytes > _MOST_BYTES and len(self._tables) > 1:
                self._n_bytes -= self._tables.popitem(last=False)[1].n_bytes


def shared_laws(shift: FloatArray, sample_rate: FloatArray) -> SharedLaws:
    """The laws with these parameters: the same object for equal arrays, as long as it is in use."""
    shift, sample_rate = (np.ascontiguousarray(part, np.float64) for part in (shift, sample_rate))
    return _of_bytes(shift.tobytes(), sample_rate.tobytes())


@lru_cache(maxsize=_MOST_RUNS)
def _of_bytes(shift: bytes, sample_rate: bytes) -> SharedLaws:
    return SharedLaws(np.frombuffer(shift), np.frombuffer(sample_rate))
