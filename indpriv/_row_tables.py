"""Tables whose rows are made when they are first needed, shared by threads and other processes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = tuple[NDArray[Any], ...]

_MOST_BYTES = 1 << 29  # of all tables together; those used longest ago are made again if needed


class ThreadLock:
    """A lock among the threads of one process: a copy in another process is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ThreadLock], tuple[()]]:
        return ThreadLock, ()


@dataclass
class _Table:
    """Arrays have shape (n_rows, ...); they may lie in memory that cannot be written."""

    made: NDArray[np.bool_]
    arrays: Arrays = ()
    lock: ThreadLock = field(default_factory=ThreadLock)
    n_bytes: int = 0  # as counted among those of all tables

    def fill(self, missing: NDArray[np.intp], found: Arrays) -> None:
        """Write rows, into copies where the table came from another process."""
        if not self.arrays:
            shapes = [(len(self.made), *rows.shape[1:]) for rows in found]
            self.arrays = tuple(
                np.zeros(shape, rows.dtype) for shape, rows in zip(shapes, found, strict=True)
            )
        if not all(array.flags.writeable for array in (self.made, *self.arrays)):
            self.made, self.arrays = self.made.copy(), tuple(map(np.copy, self.arrays))
        for array, rows in zip(self.arrays, found, strict=True):
            array[missing] = rows
        self.made[missing] = True

    def __getstate__(self) -> dict[str, Any]:
        """Rows that a thread fills while this is sent are not among those that are made."""
        with self.lock:
            return self.__dict__ | {"made": self.made.copy()}


class RowTables:
    """Tables of as many rows each, by key.

    Where they are sent to another process, they go along; what that process fills stays there.
    """

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._tables: OrderedDict[Hashable, _Table] = OrderedDict()
        self._lock = ThreadLock()
        self._n_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        """The tables there are now: threads may add more while they are sent."""
        with self._lock:
            return self.__dict__ | {"_tables": self._tables.copy()}

    def rows(
        self, key: Hashable, needed: NDArray[np.bool_], make: Callable[[NDArray[np.intp]], Arrays]
    ) -> Arrays:
        """Tables of shape (n_rows, ...) of which the needed rows are filled in; others may be 0.

        Args:
            key: names the function and all that it depends on besides the row.
            needed: (n_rows,) rows that are read.
            make: returns arrays (k, ...) for the rows at k positions.
        """
        with self._lock:
            table = self._tables.setdefault(key, _Table(np.zeros(self._n_rows, dtype=bool)))
            self._tables.move_to_end(key)
        with table.lock:
            missing, new = np.flatnonzero(needed & ~table.made), not table.arrays
            if len(missing) or new:
                table.fill(missing, make(missing))
            arrays = table.arrays
        if new:
            self._count(key, table)
        return arrays

    def add(self, others: RowTables) -> None:
        """Take the tables of keys that are not here yet."""
        for key, table in others._tables.items():
            with self._lock:
                added = self._tables.setdefault(key, table) is table
            if added:
                self._count(key, table)

    def _count(self, key: Hashable, table: _Table) -> None:
        """Count the bytes of a new table, and forget the oldest ones where there are too many."""
        with self._lock:
            if self._tables.get(key) is table:
                table.n_bytes = sum(array.nbytes for array in table.arrays)
                self._n_bytes += table.n_bytes
            while self._n_bytes > _MOST_BYTES and len(self._tables) > 1:
                self._n_bytes -= self._tables.popitem(last=False)[1].n_bytes
