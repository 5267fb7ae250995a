"""Divergences of cells at the orders that a search asks for, each computed once. Sensitive.

Threads may share a table: entries that `at` has handed out for its examples never change.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.counts import Counts

_CACHED_VALUES = 1 << 24  # divergences kept for further blocks: 128 MB


class Divergences(Protocol):
    """Cells as far as RDP sees them: Mechanisms or Cells."""

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n_cells) Rényi divergence of one count of each cell."""
        ...


class SlowDivergences(Protocol):
    """Cells whose divergences take long to compute: each is asked for by itself."""

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        ...

    def divergences_at(self, cells: IntArray, orders: FloatArray) -> FloatArray:
        """(n,) Rényi divergence of one count of cells[i] at orders[i]."""
        ...


class WholeTable:
    """Divergences of all cells at the orders that were asked for."""

    def __init__(self, source: Divergences, n_cells: int) -> None:
        self._source = source
        self._values = np.empty((0, n_cells))
        self._row_of: dict[float, int] = {}
        self._lock = threading.Lock()

    def at(
        self, orders: FloatArray, counts: Counts, examples: IntArray
    ) -> tuple[FloatArray, IntArray]:
        """A table (n_rows, n_cells), and its row for each of the orders (len(examples), m)."""
        wanted, inverse = np.unique(orders, return_inverse=True)
        with self._lock:
            missing = np.array([order for order in wanted.tolist() if order not in self._row_of])
            if (len(self._row_of) + len(missing)) * self._values.shape[1] > _CACHED_VALUES:
                missing = wanted
                self._row_of.clear()
                self._values = np.empty((0, self._values.shape[1]))
            if len(missing):
                found = self._source.divergences(missing)
                first = len(self._row_of)
                if first + len(found) > len(self._values):
                    larger = np.empty((2 * (first + len(found)), found.shape[1]))
                    larger[:first] = self._values[:first]
                    self._values = larger
                self._values[first : first + len(found)] = found
                self._row_of.update(
                    zip(missing.tolist(), range(first, first + len(found)), strict=True)
                )
            rows = np.array([self._row_of[order] for order in wanted.tolist()])
            return self._values, rows[inverse].reshape(orders.shape)


class LazyTable:
    """Divergences of the cells that the asking examples met; other entries mean nothing."""

    def __init__(self, source: SlowDivergences) -> None:
        self._source = source
        self._forget()
        self._lock = threading.Lock()

    def _forget(self) -> None:
        n_cells = self._source.n_cells
        self._values, self._known = np.zeros((0, n_cells)), np.zeros((0, n_cells), dtype=bool)
        self._row_of: dict[float, int] = {}

    def at(
        self, orders: FloatArray, counts: Counts, examples: IntArray
    ) -> tuple[FloatArray, IntArray]:
        """A table (n_rows, n_cells), and its row for each of the orders (len(examples), m)."""
        wanted, inverse = np.unique(orders, return_inverse=True)
        inverse = inverse.reshape(orders.shape)
        with self._lock:
            rows = self._rows(wanted)
            cells = []
            for index, row in enumerate(rows.tolist()):
                used = counts.used_cells(examples[(inverse == index).any(axis=1)])
                cells.append(np.flatnonzero(used & ~self._known[row]))
            row = np.repeat(rows, [len(found) for found in cells])
            cell = np.concatenate(cells)
            self._values[row, cell] = self._source.divergences_at(
                cell, np.repeat(wanted, [len(c) for c in cells])
            )
            self._known[row, cell] = True
            return self._values, rows[inverse]

    def _rows(self, wanted: FloatArray) -> IntArray:
        """The rows of these orders; new ones are empty."""
        new = [order for order in wanted.tolist() if order not in self._row_of]
        if (len(self._row_of) + len(new)) * self._source.n_cells > _CACHED_VALUES:
            self._forget()
            new = wanted.tolist()
        needed = len(self._row_of) + len(new)
        if needed > len(self._values):
            more = ((0, 2 * needed - len(self._values)), (0, 0))
            self._values, self._known = np.pad(self._values, more), np.pad(self._known, more)
        self._row_of.update(zip(new, range(len(self._row_of), needed), strict=True))
        return np.array([self._row_of[order] for order in wanted.tolist()])
