"""From Rényi divergences to epsilon: conversion, and the search for the best order. Sensitive.

Every order gives a valid bound, so the search can only be loose, never wrong. The bound is nearly
unimodal in the order (K = (order - 1) * rdp is convex in it), but it can have a cliff, beyond which
the divergence jumps by decades between neighbouring whole orders. The search therefore keeps, for
each example, a bracket of three orders whose middle is best, and narrows it until no more is to be
gained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.divergence_tables import Divergences, LazyTable, WholeTable
from indpriv.accountant.histogram.counts import Counts

CONVERSIONS = ("canonne2020", "mironov2017")


# Orders are 1 + exp(_LOWEST + position * _STEP); the search starts at every _COARSE-th position.
_LOWEST, _HIGHEST = math.log(1e-4), math.log(1e5)
_STEP = 1e-4
_COARSE = 4096
_POSITIONS = np.arange(0, round((_HIGHEST - _LOWEST) / _STEP) + _COARSE, _COARSE)
_STRIDES = (128, 32, 8, 8)  # of successive parabolas: coarse first, so that examples share orders
_NARROWING = 16  # a round places orders this much closer to each other than the bracket is wide
_ROUNDS = 12
_GAIN = 3e-6  # of epsilon; the search stops where less is to be gained
_FINEST = {
    2_048: 1,
    4_096: 32,
    65_536: 64,
    math.inf: 256,
}  # closest positions, by number of cells: each order costs all cells
_FINEST_IF_SLOW = 32  # where each divergence is computed for itself
_FIRST_IF_SLOW, _AT_A_TIME = (
    2.0,
    4,
)  # there, orders are tried upwards from here, then downwards, so many at a time


def epsilon_offsets(orders: FloatArray, delta: float, conversion: str) -> FloatArray:
    """(n_orders,) what a conversion adds to the RDP of each order, for a bound (epsilon, delta).

    "mironov2017": arXiv 1702.07476v3, Proposition 3. "canonne2020": arXiv 2004.00010v3, Proposition
    12, tighter.
    """
    _checks.check_choice("conversion", conversion, CONVERSIONS)
    if conversion == "mironov2017":
        return np.asarray(-math.log(delta) / (orders - 1))
    return np.asarray(np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1))


def default_orders() -> FloatArray:
    """The grid that the search starts from: from 1.0001 to 10^5 and a little beyond."""
    return _order_at(_POSITIONS)


def _order_at(position: IntArray) -> FloatArray:
    return np.asarray(1.0 + np.exp(_LOWEST + position * _STEP))


@dataclass(frozen=True)
class RdpEpsilons:
    """epsilon, best_order, order_at_boundary: each (n_examples,)."""

    epsilon: FloatArray
    best_order: FloatArray
    order_at_boundary: NDArray[np.bool_]


@dataclass
class _Brackets:
    """Brackets of some examples: positions and bounds (n, 3), ascending, the middle one best."""

    example: IntArray
    position: IntArray
    bound: FloatArray

    def select(self, chosen: NDArray[np.bool_]) -> _Brackets:
        """Some of the brackets."""
        return _Brackets(self.example[chosen], self.position[chosen], self.bound[chosen])

    def _parabola(self) -> tuple[FloatArray, FloatArray]:
        """Slope and half the curvature, at the middle, of the parabola through the three bounds."""
        low, middle, high = self.position.T
        left, right = self.bound[:, 0] - self.bound[:, 1], self.bound[:, 2] - self.bound[:, 1]
        a, b = (middle - low).astype(np.float64), (high - middle).astype(np.float64)
        width = np.maximum(a + b, 1.0)
        return (right * a / b - left * b / a) / width, np.maximum(
            (left / a + right / b) / width, 1e-300
        )

    def vertex(self, stride: int) -> tuple[IntArray, FloatArray]:
        """A multiple of stride near the parabola's vertex (not the middle), and its value there."""
        slope, curvature = self._parabola()
        low, middle, high = self.position.T
        place = np.round((middle - 0.5 * slope / curvature) / stride).astype(np.int64) * stride
        place = np.where(
            place == middle, middle + np.where(high - middle > middle - low, stride, -stride), place
        )
        place = np.clip(place, low + 1, high - 1)
        away = place - middle
        return place, self.bound[:, 1] + away * (slope + away * curvature)

    def promising(self, finest: int) -> NDArray[np.bool_]:
        """Those whose neighbours, extended in a straight line, promise a gain above _GAIN."""
        steps = np.diff(self.position, axis=1)
        left, right = self.bound[:, 0] - self.bound[:, 1], self.bound[:, 2] - self.bound[:, 1]
        promise = np.maximum(left / steps[:, 0] * steps[:, 1], right / steps[:, 1] * steps[:, 0])
        return np.asarray((promise > _GAIN * self.bound[:, 1]) & (steps.sum(axis=1) > 2 * finest))

    def proposals(self, finest: int) -> IntArray:
        """(n, 4) positions to try: near the parabola's vertex, and the middle of the wider side."""
        low, middle, high = self.position.T
        slope, curvature = self._parabola()
        stride = np.maximum(2 ** np.floor(np.log2((high - low) / _NARROWING)), finest).astype(
            np.int64
        )
        vertex = np.round((middle - 0.5 * slope / curvature) / stride).astype(np.int64) * stride
        wider = np.where(high - middle >= middle - low, middle + high, low + middle) // 2
        halfway = np.round(wider / stride).astype(np.int64) * stride
        tried = np.stack([vertex - stride, vertex, vertex + stride, halfway], axis=1)
        return np.asarray(np.clip(tried, (low + 1)[:, None], (high - 1)[:, None]))

    def narrowed(self, position: IntArray, bound: FloatArray) -> _Brackets:
        """The brackets about the best of the old and the tried positions."""
        position, bound = np.hstack([self.position, position]), np.hstack([self.bound, bound])
        each = np.arange(len(position))
        best = np.argmin(bound, axis=1)
        centre = position[each, best][:, None]
        below = np.argmax(np.where(position < centre, position, -1), axis=1)
        above = np.argmin(np.where(position > centre, position, np.iinfo(np.int64).max), axis=1)
        chosen = np.stack([below, best, above], axis=1)
        return _Brackets(
            self.example,
            np.take_along_axis(position, chosen, axis=1),
            np.take_along_axis(bound, chosen, axis=1),
        )


class RdpAccountant:
    """Turns counts over fixed cells into epsilons.

    Keeps the divergences it has computed; threads may share it.
    """

    def __init__(
        self,
        source: Divergences | LazyTable,
        *,
        delta: float,
        conversion: str,
        orders: FloatArray | None = None,
    ) -> None:
        """Compute the divergences that every block needs.

        Args:
            source: the cells, or a table that asks for each divergence by itself, where those take
                long.
            delta: of the bound.
            conversion: see `epsilon_offsets`.
            orders: exactly these; None for the default grid and the search around its best orders.
        """
        self._delta, self._conversion, self._search = delta, conversion, orders is None
        self._orders = default_orders() if orders is None else np.unique(orders)
        self._offsets = epsilon_offsets(self._orders, delta, conversion)
        if isinstance(source, LazyTable):
            self._coarse, self._finest = None, _FINEST_IF_SLOW
            self._table: LazyTable | WholeTable = source
        else:
            self._coarse = source.divergences(self._orders)
            n_cells = self._coarse.shape[1]
            self._table = WholeTable(source, n_cells)
            self._finest = next(step for limit, step in _FINEST.items() if n_cells <= limit)

    def epsilons(self, counts: Counts) -> RdpEpsilons:
        """Epsilon of each example."""
        rdp = self._tried_in_turn(counts) if self._coarse is None else counts.totals(self._coarse)
        bounds = rdp + self._offsets
        best = np.argmin(bounds, axis=1)
        epsilon, order = bounds[np.arange(len(best)), best], self._orders[best]
        boundary = (best == 0) | (best == len(self._orders) - 1)
        if self._search:
            self._refine(counts, bounds, best, epsilon, order)
        epsilon[(epsilon < 0) | ~rdp.any(axis=1)] = 0.0
        return RdpEpsilons(epsilon, order, boundary & (epsilon > 0))

    def _tried_in_turn(self, counts: Counts) -> FloatArray:
        """(n_examples, n_orders) RDP; infinite where it cannot give the best bound.

        RDP grows with the order.
        """
        n_orders, least_beyond = len(self._orders), np.minimum.accumulate(self._offsets[::-1])[::-1]
        rdp = np.full((len(counts), n_orders), np.inf)
        best = np.full(len(counts), np.inf)
        start = min(int(np.searchsorted(self._orders, _FIRST_IF_SLOW)), n_orders - 1)

        def attempt(examples: IntArray, columns: IntArray) -> None:
            """Fill in some columns (len(examples), m)."""
            if not len(examples):
                return
            table, rows = self._table.at(self._orders[columns], counts, examples)
            found = [counts.totals_at(examples, table, rows[:, k]) for k in range(columns.shape[1])]
            rdp[examples[:, None], columns] = np.stack(found, axis=1)
            bounds = rdp[examples[:, None], columns] + self._offsets[columns]
            best[examples] = np.minimum(best[examples], bounds.min(axis=1))

        for first in range(start, n_orders, _AT_A_TIME):
            least = (
                rdp[:, first - 1] + least_beyond[first] if first > start else np.zeros(len(counts))
            )
            examples = np.flatnonzero(least < best)
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

    def _refine(
        self,
        counts: Counts,
        bounds: FloatArray,
        best: IntArray,
        epsilon: FloatArray,
        order: FloatArray,
    ) -> None:
        """Lower epsilon in place by orders between the best one's neighbours."""
        inside = np.flatnonzero((best > 0) & (best < bounds.shape[1] - 1) & (epsilon > 0))
        around = best[inside, None] + np.array([-1, 0, 1])
        brackets = _Brackets(
            inside, _POSITIONS[around], np.take_along_axis(bounds[inside], around, axis=1)
        )
        for stride in (
            _STRIDES
        ):  # where the bound is as smooth as a parabola foretells, a few vertices are enough
            if not len(brackets.example):
                return
            vertex, foretold = brackets.vertex(max(stride, self._finest))
            brackets, value = self._tried(counts, brackets, vertex[:, None], epsilon, order)
            brackets = brackets.select(np.abs(value[:, 0] - foretold) > _GAIN * foretold)
        for _ in range(_ROUNDS):  # elsewhere, on a cliff above all, the bracket itself must narrow
            brackets = brackets.select(
                brackets.promising(self._finest) & (brackets.bound[:, 1] > 0)
            )
            if not len(brackets.example):
                return
            brackets, _ = self._tried(
                counts, brackets, brackets.proposals(self._finest), epsilon, order
            )

    def _tried(
        self,
        counts: Counts,
        brackets: _Brackets,
        positions: IntArray,
        epsilon: FloatArray,
        order: FloatArray,
    ) -> tuple[_Brackets, FloatArray]:
        """Narrowed brackets, and the bounds at some positions (n, k) of each; notes the best."""
        orders = _order_at(positions)
        table, rows = self._table.at(orders, counts, brackets.example)
        found = [
            counts.totals_at(brackets.example, table, rows[:, k]) for k in range(positions.shape[1])
        ]
        offsets = epsilon_offsets(orders, self._delta, self._conversion)
        bounds = np.stack(found, axis=1) + offsets
        brackets = brackets.narrowed(positions, bounds)
        epsilon[brackets.example] = brackets.bound[:, 1]
        order[brackets.example] = _order_at(brackets.position[:, 1])
        return brackets, bounds
