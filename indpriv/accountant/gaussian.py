"""Privacy curves of Gaussian mechanisms: delta, and epsilon and mu at a delta.

mu is the sensitivity over the noise's standard deviation. delta(epsilon, mu), the hockey-stick
divergence of N(mu, 1) from N(0, 1), has a closed form, and epsilon(mu) is convex: a chord is never
below it, a tangent never above it, by [9.8] of docs/explanation/proofs.md.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize.elementwise import find_root
from scipy.special import erfcx, erfinv, log_ndtr, ndtr

from indpriv._types import FloatArray

GAUSSIAN_ERROR = 1e-11  # relative, of delta; a wide margin over rounding
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(8)
_LARGEST_MU = 1e12
_MOST_EXACT = 8192  # values of mu that are inverted one by one; more are read off a table
_CELL_BITS = 11  # that follow the first one of mu: 2048 cells between powers of 2
_AT_ONCE = 1 << 15  # values of mu: what is made of them stays in cache


def gaussian_delta(epsilon: FloatArray, mu: FloatArray | float) -> FloatArray:
    """Delta of Gaussian mechanisms at any real epsilon, within GAUSSIAN_ERROR.

    Args:
        epsilon: any shape.
        mu: at least 0; broadcast against epsilon.
    """
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, np.float64), np.asarray(mu, np.float64))
    size, some = np.abs(epsilon), np.where(mu > 0, mu, 1.0)
    near, far = np.clip(size / some - some / 2, -1e8, 1e8), size / some + some / 2
    # delta is the normal tail at `near` less exp(size) times that at `far`; with the ratio m of
    # tail to density, that is density(near) * (m(near) - m(far)).
    density = np.exp(-np.square(near) / 2) / np.sqrt(2 * np.pi)
    inside = np.maximum(near, -1.0)
    difference = _tail_ratio(inside) - _tail_ratio(far)
    integral = np.zeros_like(density)  # of minus the derivative of m, where differences cancel
    for node, weight in zip(_GAUSS_NODES, _GAUSS_WEIGHTS, strict=True):
        point = inside + some / 2 * (1 + node)
        integral += weight * (1 - point * _tail_ratio(point))
    difference = np.where(some < 0.5, some / 2 * np.maximum(integral, 0.0), difference)
    direct = ndtr(-near) - density * _tail_ratio(far)  # m(near) overflows far below 0
    delta = np.where(mu > 0, np.where(near < -1.0, direct, density * difference), 0.0)
    # This pair is symmetric: delta(-x) = 1 - exp(-x) + exp(-x) delta(x).
    below = np.minimum(epsilon, 0.0)
    return np.asarray(np.clip(np.exp(below) * delta - np.expm1(below), 0.0, 1.0))


def _tail_ratio(x: FloatArray) -> FloatArray:
    return np.asarray(np.sqrt(np.pi / 2) * erfcx(x / np.sqrt(2.0)))


def gaussian_mu(epsilon: FloatArray, delta: FloatArray) -> FloatArray:
    """(n,) mu of Gaussian mechanisms with these deltas (n,), from above; 0 where delta is 0."""
    target = np.clip(delta * (1 + GAUSSIAN_ERROR), 1e-300, 1 - 1e-15)
    inverse, _ = _crossing(
        lambda inverse, epsilon: gaussian_delta(epsilon, 1 / inverse),
        epsilon,
        target,
        low=1 / _LARGEST_MU,
    )
    return np.where(delta > 0, 1 / inverse, 0.0)


def gaussian_epsilons(mu: FloatArray, delta: float) -> tuple[FloatArray, FloatArray]:
    """Bounds of epsilon(delta) of Gaussian mechanisms.

    Args:
        mu: (n,) at least 0 and finite.
        delta: in (0, 1).

    Returns:
        lower, upper: (n,). For up to 8192 values of mu they differ by about 1e-11 of epsilon. For
        more, both are within 1e-6 of epsilon, or of mu where epsilon is smaller.
    """
    if len(mu) <= _MOST_EXACT:
        return _inverted(mu, delta)
    least = _largest_free(delta)
    largest = max(least, float(mu.max()))
    smallest = max(least, float(mu.min(where=mu > 0, initial=largest)))
    first, last = (np.array([smallest, largest]).view(np.int64) >> 52).tolist()
    tables = [_octave(octave, delta) for octave in range(first, last + 1)]
    left, low, high, slope, rise = np.concatenate(tables, axis=1)
    lower, upper = np.empty((2, len(mu)))
    for start in range(0, len(mu), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        some = np.maximum(mu[part], smallest)
        cell = (some.view(np.int64) >> 52 - _CELL_BITS) - (first << _CELL_BITS)
        above = some - left[cell]
        chord = (high[cell] + above * rise[cell]) * (1 + 1e-13)
        tangent = (low[cell] + above * slope[cell]) * (1 - 1e-9)
        upper[part] = np.where(mu[part] > 0, chord, 0.0)
        lower[part] = np.clip(tangent, 0.0, upper[part])
    return lower, upper


def _largest_free(delta: float) -> float:
    """A mu, as large as possible, whose epsilon is 0: its delta at epsilon 0 is at most delta."""
    return float(2 * np.sqrt(2) * erfinv(delta) * (1 - 1e-12))


@lru_cache(maxsize=256)
def _octave(exponent: int, delta: float) -> FloatArray:
    """(5, n_cells) of the cells of mu with these first 12 bits.

    Left end, bounds of epsilon there, slopes of its tangent there and of the chord.
    """
    cells = np.arange((1 << _CELL_BITS) + 1) + (exponent << _CELL_BITS)
    nodes = (cells << 52 - _CELL_BITS).view(np.float64)
    low, high = _inverted(nodes, delta)
    nodes = np.maximum(nodes, _largest_free(delta))
    b = low / nodes + nodes / 2
    slope = np.exp(-np.square(b) / 2 - log_ndtr(-b)) / np.sqrt(2 * np.pi)
    low -= 1e-11 * nodes * slope  # epsilon may begin to rise right after a node
    rise = np.diff(high) / np.maximum(np.diff(nodes), 1e-300)
    return np.stack([nodes[:-1], low[:-1], high[:-1], slope[:-1], rise])


def _inverted(mu: FloatArray, delta: float) -> tuple[FloatArray, FloatArray]:
    """(n,) bounds, by solving for each."""
    lower, upper = np.zeros((2, len(mu)))
    some = mu > delta  # the delta at epsilon 0 of a smaller mu is below 0.4 mu
    if not some.any():
        return lower, upper
    for out, side, error in ((upper, 1, -GAUSSIAN_ERROR), (lower, 0, GAUSSIAN_ERROR)):
        target = np.full(int(some.sum()), delta * (1 + error))
        out[some] = _crossing(gaussian_delta, mu[some], target)[side]
    return lower, upper


def _crossing(
    delta_of: Callable[[FloatArray, FloatArray], FloatArray],
    given: FloatArray,
    target: FloatArray,
    low: float = 0.0,
) -> tuple[FloatArray, FloatArray]:
    """(n,) ends, within 1e-13 of each other, between which delta_of(x, given) meets the target.

    delta_of falls in x: it is above the target at the lower end, and not at the upper end. Both
    are `low` where it is not above the target there.
    """
    end = np.ones_like(target)
    while np.any(above := delta_of(end, given) > target):
        end = np.where(above, 2 * end, end)

    def excess(x: FloatArray, given: FloatArray, target: FloatArray, /, **_: Any) -> FloatArray:
        tiny = np.finfo(np.float64).tiny  # replaces a delta of 0
        ratio = np.log(np.maximum(delta_of(x, given), tiny) / target)
        return np.where(ratio > 0, ratio, np.minimum(ratio, -tiny))

    found = find_root(
        excess,
        (np.full_like(target, low), end),
        args=(given, target),
        tolerances={"xatol": 0.0, "xrtol": 1e-13, "fatol": 0.0, "frtol": 0.0},
    )
    (lower, upper), (at_lower, at_upper) = found.bracket, found.f_bracket
    return np.where(at_upper > 0, upper, lower), np.where(at_lower <= 0, lower, upper)
