"""Epsilon of many Gaussian mechanisms at once.

epsilon(mu), the epsilon at a fixed delta of a Gaussian mechanism with sensitivity / noise = mu
(Balle and Wang 2018, arXiv:1805.06530v2, Theorem 8), is convex. With b = epsilon / mu + mu / 2
and h(b) = density / tail of the normal law at b, delta(epsilon, mu) gives d epsilon / d mu = h(b),
since the densities at epsilon / mu - mu / 2 and at b differ by the factor exp(epsilon). h
increases, and so does b: its derivative times mu is h(b) - b + mu, which is positive because
h(b) > b. So between two nodes a chord is never below epsilon, and a tangent never above it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.pld.closed_form import CLOSED_FORM_ERROR, gaussian_delta, invert_delta

_MOST_EXACT = 8192  # values of mu that are inverted one by one; more are read off a table
_MOST_SORTED = 1 << 18  # values: among fewer, equal ones are looked for
_CELL_BITS = 43  # of 52 that follow the first one of mu: 512 cells between powers of 2
_CELLS_TOGETHER = 128  # of a table: parts of a run, whose mu are much the same, share it
_AT_ONCE = 1 << 15  # values of mu: what is made of them stays in cache


def gaussian_epsilons(mu: FloatArray, delta: float) -> tuple[FloatArray, FloatArray]:
    """Bounds of epsilon(delta) of Gaussian mechanisms.

    Args:
        mu: (n,) sensitivity over noise, at least 0 and finite.
        delta: in (0, 1).

    Returns:
        lower, upper: (n,). They differ by about 1e-11 of epsilon for up to 8192 values of mu, and
        by about 1e-6 for more.
    """
    if len(mu) >= _MOST_SORTED:
        return _interpolated(mu, delta)
    distinct, place = np.unique(mu, return_inverse=True)
    if len(distinct) > _MOST_EXACT:
        return _interpolated(mu, delta)
    lower, upper = _inverted(distinct, delta)
    return lower[place], upper[place]


def _inverted(mu: FloatArray, delta: float) -> tuple[FloatArray, FloatArray]:
    """(n,) bounds, by solving for each."""
    lower, upper = np.zeros((2, len(mu)))
    some = np.flatnonzero(mu > delta)  # the delta at epsilon 0 of a smaller mu is below 0.4 mu

    def delta_of(epsilon: FloatArray, index: IntArray) -> FloatArray:
        return gaussian_delta(epsilon, mu[some[index]])

    for out, side, error in ((upper, 1, -CLOSED_FORM_ERROR), (lower, 0, CLOSED_FORM_ERROR)):
        target = np.full(len(some), delta * (1 + error))
        out[some] = invert_delta(delta_of, target)[side]
    return lower, upper


@lru_cache(maxsize=8)
def _table(first: int, end: int, delta: float) -> tuple[FloatArray, ...]:
    """Nodes from the cell `first` to before `end` * _CELLS_TOGETHER, and what holds there.

    Returns:
        nodes, lower, upper and slope: at each; rise of the upper bound between neighbours.
    """
    cells = np.arange(first, end * _CELLS_TOGETHER, dtype=np.int64)
    nodes = (cells << _CELL_BITS).view(np.float64)
    low, high = _inverted(nodes, delta)
    b = low / nodes + nodes / 2
    slope = np.exp(-np.square(b) / 2 - log_ndtr(-b)) / np.sqrt(2 * np.pi)
    slope[low == 0] = 0.0
    return nodes, low, high, slope, np.diff(high) / np.diff(nodes)


def _interpolated(mu: FloatArray, delta: float) -> tuple[FloatArray, FloatArray]:
    """(n,) bounds, by chords and tangents between nodes."""
    largest = max(float(mu.max()), delta)  # epsilon is 0 below delta
    smallest = max(float(mu.min(where=mu > 0, initial=largest)), delta)
    ends = np.array([smallest, largest])
    first, last = (ends.view(np.int64) >> _CELL_BITS).tolist()
    first = first // _CELLS_TOGETHER * _CELLS_TOGETHER
    nodes, low, high, slope, rise = _table(first, -(-(last + 2) // _CELLS_TOGETHER), delta)
    lower, upper = np.empty((2, len(mu)))
    for start in range(0, len(mu), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        safe = np.maximum(mu[part], smallest)
        cell = (safe.view(np.int64) >> _CELL_BITS) - first
        above = safe - nodes[cell]
        chord = (high[cell] + above * rise[cell]) * (1 + 1e-13)
        tangent = (low[cell] + above * slope[cell]) * (1 - 1e-9)
        upper[part] = np.where(mu[part] > 0, chord, 0.0)
        lower[part] = np.minimum(tangent, upper[part])
    return lower, upper
