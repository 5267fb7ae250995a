"""Counts of steps by example and cell, and totals over the steps of an example. Sensitive.

There are two kinds, because either alone is slow: the account of a rounded log takes 4.7 times as
long with sparse counts, that of a log with 2,000 settings 9 times as long with dense ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from indpriv._arrays import FloatArray, IntArray

_AT_ONCE = 1 << 15  # numbers that are gathered together: 256 KB, which stay in cache


def _parts(n: int, width: int) -> Iterator[slice]:
    """Consecutive parts of n rows of some width."""
    step = max(1, _AT_ONCE // max(width, 1))
    return (slice(start, start + step) for start in range(0, n, step))


class Counts(Protocol):
    """In how many steps each example met each cell; tables have shape (n_rows, n_cells)."""

    def totals(self, table: FloatArray) -> FloatArray:
        """(n_examples, n_rows) sums over steps of each row of a table."""
        ...

    def totals_at(self, examples: IntArray, table: FloatArray, rows: IntArray) -> FloatArray:
        """(len(examples),) sums over steps of one row of a table for each of these examples."""
        ...

    def used_cells(self, examples: IntArray) -> NDArray[np.bool_]:
        """(n_cells,) in which any of these examples has steps."""
        ...

    def __len__(self) -> int:
        """Number of examples."""
        ...


@dataclass(frozen=True)
class DenseCounts:
    """One number for each example and cell; value has shape (n_examples, n_cells)."""

    value: FloatArray

    def totals(self, table: FloatArray) -> FloatArray:
        """See Counts."""
        return np.asarray(self.value @ table.T)

    def totals_at(self, examples: IntArray, table: FloatArray, rows: IntArray) -> FloatArray:
        """See Counts."""
        totals = np.empty(len(examples))
        for part in _parts(len(examples), self.value.shape[1]):
            counts, values = self.value.take(examples[part], axis=0), table.take(rows[part], axis=0)
            np.einsum("ij,ij->i", counts, values, out=totals[part])
        return totals

    def used_cells(self, examples: IntArray) -> NDArray[np.bool_]:
        """See Counts."""
        return np.asarray(self.value[examples].any(axis=0))

    def __len__(self) -> int:
        return len(self.value)


@dataclass(frozen=True)
class SparseCounts:
    """The same number of entries for each example; an example may meet a cell several times.

    Attributes:
        cell: (n_examples, n_entries) cells. weight: (n_examples, n_entries) steps.
        certain: (n_cells,) steps that every example spends in a cell besides.
    """

    cell: NDArray[np.int32]
    weight: FloatArray
    certain: FloatArray

    def matrix(self) -> csr_array:
        """(n_examples, n_cells) counts, without the certain ones."""
        n_examples, n_entries = self.cell.shape
        starts = np.arange(0, n_examples * n_entries + 1, max(n_entries, 1))[: n_examples + 1]
        starts = starts if n_entries else np.zeros(n_examples + 1, np.int64)
        parts = (self.weight.ravel(), self.cell.ravel(), starts)
        return csr_array(parts, shape=(n_examples, len(self.certain)))

    def totals(self, table: FloatArray) -> FloatArray:
        """See Counts."""
        return np.asarray(self.matrix() @ np.ascontiguousarray(table.T) + self.certain @ table.T)

    def totals_at(self, examples: IntArray, table: FloatArray, rows: IntArray) -> FloatArray:
        """See Counts."""
        common, place = np.unique(rows, return_inverse=True)
        totals = np.asarray((table[common] @ self.certain)[place])
        for part in _parts(len(examples), self.cell.shape[1]):
            cells = self.cell.take(examples[part], axis=0) + rows[part, None] * table.shape[1]
            totals[part] += np.einsum(
                "ij,ij->i", self.weight.take(examples[part], axis=0), table.take(cells)
            )
        return totals

    def used_cells(self, examples: IntArray) -> NDArray[np.bool_]:
        """See Counts."""
        used = np.asarray(self.certain != 0)
        used[self.cell[examples][self.weight[examples] != 0]] = True
        return used

    def __len__(self) -> int:
        return len(self.cell)


def collected(
    entries: Iterator[tuple[IntArray, FloatArray]], n: int, n_entries: int, certain: FloatArray
) -> Counts:
    """Counts of n examples: dense ones where cells are fewer than entries.

    Args:
        entries: parts of the (n_entries, n) cells and steps.
        n: number of examples.
        n_entries: of each example.
        certain: (n_cells,) steps that every example spends in a cell besides.
    """
    if n_entries > len(certain):
        counts = np.tile(certain, (n, 1))
        offsets = np.arange(n) * len(certain)
        for cell, weight in entries:
            flat = np.bincount(
                (cell + offsets).ravel(), weights=weight.ravel(), minlength=counts.size
            )
            counts += flat.reshape(counts.shape)
        return DenseCounts(counts)
    cells, weights = np.empty((n, n_entries), np.int32), np.empty((n, n_entries))
    place = 0
    for cell, weight in entries:
        cells[:, place : place + len(cell)], weights[:, place : place + len(cell)] = (
            cell.T,
            weight.T,
        )
        place += len(cell)
    return SparseCounts(cells, weights, certain)


def bytes_of(n_entries: int, n_cells: int) -> int:
    """Memory that `collected` takes for one example."""
    return 8 * n_cells if n_entries > n_cells else 32 * n_entries
