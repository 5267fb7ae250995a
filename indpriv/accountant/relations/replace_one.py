"""Rényi divergences where an example is replaced, with secret Poisson sampling.

Given which other examples are sampled, a step of an example with clipped gradient g that another
with gradient h replaces has the laws P = (1 - q) N(0, 1) + q N(g, 1) and Q = (1 - q) N(0, 1) + q
N(h, 1), in units of the noise, with |g| <= a and |h| <= b. Of all these pairs the one in one
dimension with g = a and h = -b is the worst, for every f-divergence: with x = exp(<z, g> - g^2 / 2)
and y likewise for h, it is E F(x, y) for z ~ N(0, 1) and F(x, y) = r f(p / r), p = 1 - q + q x,
r = 1 - q + q y, a convex function, homogeneous in (p, r), so that F_12 <= 0 <= F_11, F_22. By the
heat equation its derivative in <g, h> is E[x y F_12] <= 0: opposite directions are the worst. Along
them its derivative in a is E[a x^2 F_11 - b x y F_12] >= 0, and likewise in b. These laws compose
over steps (Zhu, Dong and Wang 2022, arXiv:2106.08567v4, Theorem 10).
"""

from __future__ import annotations

import numpy as np

from indpriv._arrays import FloatArray

_SLACK = 1e-9  # relative; sums of the two spacings agree within a tenth of this
_REACH = 10.0  # standard deviations beyond the outer peaks
_WIDEST = 250.0  # order * (a + b) beyond which the bound without sampling is used


def replaced_divergences(
    own: FloatArray, other: FloatArray, sample_rate: FloatArray, orders: FloatArray
) -> FloatArray:
    """Rényi divergences of one step, of P from Q; never too small. Swap a and b for Q from P.

    Args:
        own: (n,) a, the example's contribution over the noise.
        other: (n,) b, that of its replacement, which points the other way.
        sample_rate: (n,) in (0, 1].
        orders: (n_orders,) above 1.

    Returns:
        (n_orders, n) nats.
    """
    # By quasi-convexity, revealing whether the example was sampled can only raise the divergence.
    found = orders[:, None] * np.square(own + other) / 2
    for row in np.flatnonzero((sample_rate < 1) & (own + other > 0)):
        a, b, q = float(own[row]), float(other[row]), float(sample_rate[row])
        near = np.flatnonzero(orders * (a + b) <= _WIDEST)
        octave = np.ceil(np.log2(orders[near]))
        for each in np.unique(octave).tolist():
            chosen = near[octave == each]
            values = _divergences(a, b, q, orders[chosen], 2.0**each)
            found[chosen, row] = np.minimum(found[chosen, row], values)
    return found


def _divergences(a: float, b: float, q: float, orders: FloatArray, most: float) -> FloatArray:
    """(n_orders,) divergences of P from Q by the trapezoid rule, refined until each settles.

    most: an order that is at least as large as these. They share a grid, which depends on no order,
    and so does the result: it is the same whichever orders are computed together.
    """
    found, open_ = np.full(len(orders), np.inf), np.arange(len(orders))
    spacing = 0.25 / max(1.0, a, b)
    values = _log_moments(a, b, q, orders, most, spacing)
    while len(open_) and spacing > 1e-4:
        spacing /= 2
        finer = _log_moments(a, b, q, orders[open_], most, spacing)
        settled = np.abs(finer - values) <= 0.1 * _SLACK * np.abs(finer) + 1e-17
        found[open_[settled]] = finer[settled] * (1 + _SLACK) / (orders[open_[settled]] - 1)
        open_, values = open_[~settled], finer[~settled]
    return found


def _log_moments(
    a: float, b: float, q: float, orders: FloatArray, most: float, spacing: float
) -> FloatArray:
    """(n_orders,) log E_z [p^order r^(1 - order)], by sums over z ~ N(0, 1)."""
    end = most * (a + b) + _REACH
    z = np.arange(-_REACH - b, end + spacing, spacing)
    log_weight = -np.square(z) / 2 + np.log(spacing / np.sqrt(2 * np.pi))
    log_p, rise = _log_ratio(z * a - a * a / 2, q)
    log_r, other_rise = _log_ratio(-z * b - b * b / 2, q)
    order = orders[:, None]
    exponent = order * log_p + (1 - order) * log_r
    peak = (exponent + log_weight).max(axis=1, keepdims=True)
    result = np.log(np.exp(exponent + log_weight - peak).sum(axis=1)) + peak[:, 0]
    small = np.flatnonzero((result < 1e-2) & (exponent.max(axis=1) < 50))
    if len(small):
        # Less its tangent at (1, 1), whose mean is 0, so that a small moment keeps its precision.
        tangent = order[small] * rise + (1 - order[small]) * other_rise
        excess = np.expm1(exponent[small]) - tangent
        result[small] = np.log1p((np.exp(log_weight) * excess).sum(axis=1))
    return np.asarray(np.maximum(result, 0.0))


def _log_ratio(tilt: FloatArray, q: float) -> tuple[FloatArray, FloatArray]:
    """log(1 - q + q exp(tilt)), and what is inside less 1, up to e^50."""
    rise = q * np.expm1(np.minimum(tilt, 50.0))
    far = np.logaddexp(np.log1p(-q), np.log(q) + tilt)
    return np.where(tilt < 1.0, np.log1p(np.maximum(rise, -q)), far), rise
