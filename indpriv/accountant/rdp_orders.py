"""From Rényi divergences to epsilon: the best order of each example, and conversion. Sensitive."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.method import CONVERSIONS, Method
from indpriv.accountant.order_search import default_orders, refine
from indpriv.accountant.steps import Counts
from indpriv.epsilon_table import FALSE_POSITIVE_RATE

# Closest positions of the search, by number of cells: each order costs all cells.
_FINEST = {2_048: 1, 4_096: 32, 65_536: 64, math.inf: 256}
# If divergences are slow to compute, orders are tried upwards from the first one, then downwards.
_FINEST_IF_SLOW, _FIRST_IF_SLOW, _AT_A_TIME = 32, 2.0, 4
_CACHED_VALUES = 1 << 24  # divergences kept for further blocks: 128 MB
_FILLING = threading.Lock()  # of all accountants, so that one can be sent to another process


def epsilon_offsets(orders: FloatArray, delta: float, conversion: str) -> FloatArray:
    """(n_orders,) what a conversion adds to the RDP of each order to bound epsilon at delta.

    "mironov2017": arXiv 1702.07476v3, Proposition 3. "canonne2020": arXiv 2004.00010v3, Proposition
    12, tighter.
    """
    _checks.check_choice("conversion", conversion, CONVERSIONS)
    if conversion == "mironov2017":
        return np.asarray(-math.log(delta) / (orders - 1))
    return np.asarray(np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1))


def true_positive_limit(rdp: FloatArray, orders: FloatArray) -> FloatArray:
    """(n_examples,) largest true-positive rate of a membership test at FALSE_POSITIVE_RATE.

    A divergence rho at order alpha leaves a test with false-positive rate k a true-positive rate of
    at most (k e^rho)^((alpha - 1) / alpha): arXiv 1702.07476v3, Proposition 10. Every order holds.

    Args:
        rdp: (n_examples, n_orders) of a run with the example from one without; may be infinite.
        orders: (n_orders,) above 1.

    >>> orders = np.array([2.0, 4.0, 8.0])
    >>> true_positive_limit(0.5 * 0.66**2 * orders[None], orders).round(3)  # Gaussian, mu = 0.66
    array([0.061])
    """
    log_rates = (np.log(FALSE_POSITIVE_RATE) + rdp) * (1 - 1 / orders)
    limit = np.exp(np.minimum(log_rates.min(axis=1), 0.0))
    return np.where(rdp.any(axis=1), np.maximum(limit, FALSE_POSITIVE_RATE), FALSE_POSITIVE_RATE)


@dataclass(frozen=True)
class RdpEpsilons:
    """epsilon, best_order, order_at_boundary, true_positive_limit: each (n_examples,)."""

    epsilon: FloatArray
    best_order: FloatArray
    order_at_boundary: NDArray[np.bool_]
    true_positive_limit: FloatArray


class Divergences(Protocol):
    """What RDP needs to know of the cells of a Histogram, or of mechanisms."""

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n_cells) Rényi divergence of one count of each cell."""
        ...


@runtime_checkable
class SlowDivergences(Protocol):
    """Cells whose divergences are slow to compute: only those that are needed are computed."""

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        ...

    def divergences_at(self, cells: IntArray, orders: FloatArray) -> FloatArray:
        """(n,) Rényi divergence of one count of cells[i] at orders[i]."""
        ...


class RdpAccountant:
    """Turns counts over fixed cells into epsilons; computes each divergence once.

    Threads may share it.
    """

    def __init__(
        self, source: Divergences | SlowDivergences, method: Method, finest: int = 1
    ) -> None:
        """Compute the divergences that every block needs.

        Args:
            source: the cells.
            method: delta, conversion and orders; if no orders are given, the default
                grid is used and refined around its best orders.
            finest: distance of the orders of this refinement, at least.
        """
        self._source, self._method = source, method
        orders = method.rdp_orders
        self._search = orders is None
        self._orders = default_orders() if orders is None else np.unique(orders)
        self._offsets = epsilon_offsets(self._orders, method.delta, method.conversion)
        if isinstance(source, SlowDivergences):
            self._coarse, n_cells, self._finest = None, source.n_cells, _FINEST_IF_SLOW
        else:
            self._coarse = source.divergences(self._orders)
            n_cells = self._coarse.shape[1]
            usual = next(step for limit, step in _FINEST.items() if n_cells <= limit)
            self._finest = max(finest, usual)
        self._values, self._row_of = np.zeros((0, n_cells)), dict[float, int]()
        self._known = np.zeros((0, n_cells if self._coarse is None else 0), dtype=bool)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrays that came from another process may be read-only, and the table grows."""
        self.__dict__.update(state)
        self._values, self._known = self._values.copy(), self._known.copy()

    def epsilons(self, counts: Counts) -> RdpEpsilons:
        """Epsilon of each example."""
        rdp = self._tried_in_turn(counts) if self._coarse is None else counts.totals(self._coarse)
        bounds = rdp + self._offsets
        best = np.argmin(bounds, axis=1)
        epsilon, order = bounds[np.arange(len(best)), best], self._orders[best]
        boundary = (best == 0) | (best == len(self._orders) - 1)

        def bounds_at(examples: IntArray, orders: FloatArray) -> FloatArray:
            offsets = epsilon_offsets(orders, self._method.delta, self._method.conversion)
            return self.rdp(counts, examples, orders) + offsets

        if self._search:
            refine(epsilon, order, bounds, bounds_at, finest=self._finest)
        epsilon[(epsilon < 0) | ~rdp.any(axis=1)] = 0.0
        limit = true_positive_limit(rdp, self._orders)
        return RdpEpsilons(epsilon, order, boundary & (epsilon > 0), limit)

    def rdp(self, counts: Counts, examples: IntArray, orders: FloatArray) -> FloatArray:
        """(len(examples), k) divergence of the run of each example, at its orders of that shape."""
        table, rows = self._table_at(counts, examples, orders)
        columns = range(orders.shape[1])
        return np.stack([counts.totals_at(examples, table, rows[:, k]) for k in columns], axis=1)

    def _tried_in_turn(self, counts: Counts) -> FloatArray:
        """(n_examples, n_orders) RDP; infinite at orders that cannot give the best bound.

        RDP grows with the order, so that one order bounds all larger ones from below.
        """
        n_orders, least_beyond = len(self._orders), np.minimum.accumulate(self._offsets[::-1])[::-1]
        rdp = np.full((len(counts), n_orders), np.inf)
        best = np.full(len(counts), np.inf)
        start = min(int(np.searchsorted(self._orders, _FIRST_IF_SLOW)), n_orders - 1)

        def attempt(examples: IntArray, columns: IntArray) -> None:
            """Fill in some columns (len(examples), m)."""
            if not len(examples):
                return
            found = self.rdp(counts, examples, self._orders[columns])
            rdp[examples[:, None], columns] = found
            bounds = found + self._offsets[columns]
            best[examples] = np.minimum(best[examples], bounds.min(axis=1))

        for first in range(start, n_orders, _AT_A_TIME):
            smaller = rdp[:, first - 1] if first > start else np.full(len(counts), -np.inf)
            examples = np.flatnonzero(smaller + least_beyond[first] < best)
            columns = np.arange(first, min(first + _AT_A_TIME, n_orders))
            attempt(examples, np.tile(columns, (len(examples), 1)))
        for last in range(start, 0, -_AT_A_TIME):
            examples = np.flatnonzero(self._offsets[last - 1] < best)
            columns = np.arange(max(last - _AT_A_TIME, 0), last)
            attempt(examples, np.tile(columns, (len(examples), 1)))
        middle = np.argmin(rdp + self._offsets, axis=1)
        for side in (-1, 1):  # the search between orders looks at both neighbours of the best
            beside = np.clip(middle + side, 0, n_orders - 1)
            examples = np.flatnonzero(np.isinf(rdp[np.arange(len(beside)), beside]))
            attempt(examples, beside[examples, None])
        return rdp

    def _table_at(
        self, counts: Counts, examples: IntArray, orders: FloatArray
    ) -> tuple[FloatArray, IntArray]:
        """A table (n_rows, n_cells), and its row for each of the orders (len(examples), k).

        Entries of cells that the examples met hold divergences, and never change.
        """
        wanted, inverse = np.unique(orders, return_inverse=True)
        inverse = inverse.reshape(orders.shape)
        with _FILLING:
            rows, new = self._rows(wanted)
            if isinstance(self._source, SlowDivergences):
                used = [
                    counts.used_cells(examples[(inverse == index).any(axis=1)]) & ~self._known[row]
                    for index, row in enumerate(rows.tolist())
                ]
                index, cell = np.nonzero(np.stack(used))
                found = self._source.divergences_at(cell, wanted[index])
                self._values[rows[index], cell] = found
                self._known[rows[index], cell] = True
            elif new.any():
                self._values[rows[new]] = self._source.divergences(wanted[new])
            return self._values, rows[inverse]

    def _rows(self, wanted: FloatArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """The rows of these orders, and which of them are new and empty."""
        new = np.array([order not in self._row_of for order in wanted.tolist()])
        n_cells = self._values.shape[1]
        if (len(self._row_of) + new.sum()) * n_cells > _CACHED_VALUES:  # others may hold the table
            self._row_of, new = {}, np.ones(len(wanted), dtype=bool)
            self._values, self._known = np.zeros((0, n_cells)), self._known[:0]
        first, needed = len(self._row_of), len(self._row_of) + int(new.sum())
        if needed > len(self._values):
            more = ((0, 2 * needed - len(self._values)), (0, 0))
            self._values, self._known = np.pad(self._values, more), np.pad(self._known, more)
        self._row_of.update(zip(wanted[new].tolist(), range(first, needed), strict=True))
        return np.array([self._row_of[order] for order in wanted.tolist()]), new
