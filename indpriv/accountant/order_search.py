"""The search for the Rényi order that gives each example the smallest epsilon. Sensitive.

Every order gives a valid bound, so the search can only be loose, never wrong. The bound is nearly
unimodal in the order (K = (order - 1) * rdp is convex in it), but it can have a cliff, beyond which
the divergence jumps by orders of magnitude between neighbouring whole orders. The search therefore
keeps, for each example, a bracket of three orders whose middle is best, and narrows it until the
remaining gain is negligible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray

# Orders are 1 + exp(_LOWEST + position * _STEP); the search starts at every _COARSE-th position.
_LOWEST, _HIGHEST = math.log(1e-4), math.log(1e5)
_STEP = 1e-4
_COARSE = 4096
_POSITIONS = np.arange(0, round((_HIGHEST - _LOWEST) / _STEP) + _COARSE, _COARSE)
_STRIDES = (128, 32, 8, 8)  # of successive parabolas: coarse first, so that examples share orders
_NARROWING = 16  # the width of a bracket over the distance of the orders that a round tries
_ROUNDS = 12
_GAIN = 3e-6  # of epsilon; the search stops when the possible gain is smaller

# Takes examples and their orders (len(examples), k); gives the bounds of epsilon there.
BoundsAt = Callable[[IntArray, FloatArray], FloatArray]


def default_orders() -> FloatArray:
    """The grid that the search starts from: from 1.0001 to 10^5 and a little beyond."""
    return _order_at(_POSITIONS)


def _order_at(position: IntArray) -> FloatArray:
    return np.asarray(1.0 + np.exp(_LOWEST + position * _STEP))


@dataclass
class Brackets:
    """Three positions, ascending, and the bounds there (n, 3); the middle one is best."""

    example: IntArray
    position: IntArray
    bound: FloatArray

    def select(self, chosen: NDArray[np.bool_]) -> Brackets:
        """Some of the brackets."""
        return Brackets(self.example[chosen], self.position[chosen], self.bound[chosen])

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
        """A multiple of stride near the parabola's vertex, but not the middle; its value there."""
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
        """(n,) whether lines through the outer points leave room for a gain above _GAIN."""
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

    def narrowed(self, position: IntArray, bound: FloatArray) -> Brackets:
        """New brackets around the best of the old and the tried positions."""
        position, bound = np.hstack([self.position, position]), np.hstack([self.bound, bound])
        each = np.arange(len(position))
        best = np.argmin(bound, axis=1)
        centre = position[each, best][:, None]
        below = np.argmax(np.where(position < centre, position, -1), axis=1)
        above = np.argmin(np.where(position > centre, position, np.iinfo(np.int64).max), axis=1)
        chosen = np.stack([below, best, above], axis=1)
        return Brackets(
            self.example,
            np.take_along_axis(position, chosen, axis=1),
            np.take_along_axis(bound, chosen, axis=1),
        )

    def tried(self, positions: IntArray, bounds_at: BoundsAt) -> tuple[Brackets, FloatArray]:
        """The brackets after trying (n, k) positions, and the bounds there."""
        bounds = bounds_at(self.example, _order_at(positions))
        return self.narrowed(positions, bounds), bounds


def refine(
    epsilon: FloatArray,
    order: FloatArray,
    bounds: FloatArray,
    bounds_at: BoundsAt,
    *,
    finest: int,
) -> None:
    """Lower epsilon, in place, by orders between the neighbours of each example's best one.

    Args:
        epsilon: (n_examples,) the smallest of the bounds.
        order: (n_examples,) at which it was found; changed together with epsilon.
        bounds: (n_examples, n_orders) at the default orders.
        bounds_at: gives bounds at further orders.
        finest: the smallest distance between positions.
    """
    best = np.argmin(bounds, axis=1)
    inside = np.flatnonzero((best > 0) & (best < bounds.shape[1] - 1) & (epsilon > 0))
    around = best[inside, None] + np.array([-1, 0, 1])
    brackets = Brackets(inside, _POSITIONS[around], bounds[inside[:, None], around])

    def note(brackets: Brackets) -> None:
        epsilon[brackets.example] = brackets.bound[:, 1]
        order[brackets.example] = _order_at(brackets.position[:, 1])

    for stride in _STRIDES:  # a few vertices are enough where the bound is as smooth as a parabola
        if not len(brackets.example):
            return
        vertex, predicted = brackets.vertex(max(stride, finest))
        brackets, found = brackets.tried(vertex[:, None], bounds_at)
        note(brackets)
        brackets = brackets.select(np.abs(found[:, 0] - predicted) > _GAIN * predicted)
    for _ in range(_ROUNDS):  # elsewhere, mostly on a cliff, the bracket itself must narrow
        brackets = brackets.select(brackets.promising(finest) & (brackets.bound[:, 1] > 0))
        if not len(brackets.example):
            return
        brackets, _ = brackets.tried(brackets.proposals(finest), bounds_at)
        note(brackets)
