"""Rényi differential privacy of the Poisson-sampled Gaussian mechanism, for many norms and orders.

With shift u = relative_norm / noise_multiplier and z ~ N(0, 1), the density ratio of one step is
f(z) = 1 - q + q * exp(z * u - u**2 / 2), and (order - 1) * rdp = log E[f(z)**order] (Mironov,
Talwar and Zhang 2019, arXiv 1908.10530v1, Theorem 4 and section 3.3; this direction dominates the
other one, Theorem 5).

If one owner has k rows, each of this norm and sampled independently, the worst case is that their
gradients all point in one direction: f(z) = sum over j of Binomial(k, q)(j) * exp(j z u - (j u)**2
/ 2), of which the above is k = 1; units.py says why this bounds what the owner's rows reveal. As a
polynomial in exp(z u) it has only real zeros, all negative: those of (1 - q + q x)**k, and
multiplying the coefficients by exp(-(j u)**2 / 2) keeps zeros real (a multiplier sequence of
Laguerre; Pólya and Schur 1914). So, for every k, f has no zero where |Im z| < pi / u.

The integrand is analytic in the strip |Im z| < pi / u and its modulus there is at most f(x)**order
* exp(y**2 / 2), so the trapezoid rule of spacing h is wrong by at most 2 * exp(y**2 / 2 - 2 * pi *
y / h) of the result: h is chosen from this bound. What is left is rounding: every value is within
FLOAT_SLACK (relative) of the truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.errors import InputError

FLOAT_SLACK = 1e-10  # relative; errors seen against 50-digit arithmetic are far below (tests)
_LOG_PRECISION = 36.0  # quadrature and truncation errors are below exp(-36) = 2e-16 of the result
# Standard deviations beyond the outer peaks, 0 and order * u: 81 * exp(-81 / 2) is 2e-16.
_REACH = 9.0
_DIRECT_ABOVE = 1e-4  # larger log moments are summed directly, smaller ones without the leading 1
# Number of terms of the series in moments of log f, by the largest order * |log f|.
_SERIES = ((0.5, 15), (4.0, 32))
_CANCELLING_BELOW, _CANCELLING_TERMS = 0.05, 9  # the same for a single node
_ELEMENTS_AT_ONCE = 1 << 19  # of a working array: 4 MB, which stays in cache


def compute_rdp(
    *, sample_rate: float, noise_multiplier: float, relative_norms: ArrayLike, orders: ArrayLike
) -> FloatArray:
    """Rényi divergence of one step, for each relative norm and order.

    Args:
        sample_rate: Poisson sampling rate, in (0, 1].
        noise_multiplier: noise standard deviation over max_grad_norm, above 0.
        relative_norms: (n_norms,) contributions min(norm, C) / C, in [0, 1].
        orders: (n_orders,) Rényi orders, finite and above 1.

    Returns:
        (n_norms, n_orders) in nats, add/remove neighbours. Exactly 0 where the norm is 0; within
        FLOAT_SLACK relative of the truth elsewhere.

    Raises:
        InputError: a value outside its range.

    >>> compute_rdp(
    ...     sample_rate=1.0, noise_multiplier=2.0, relative_norms=[0.0, 1.0], orders=[2.0, 8.0]
    ... )
    array([[0.  , 0.  ],
           [0.25, 1.  ]])
    """
    rate = float(_checks.check_sample_rate(sample_rate))
    sigma = float(_checks.check_noise_multiplier(noise_multiplier))
    norms = np.atleast_1d(np.asarray(relative_norms, dtype=np.float64))
    if norms.ndim != 1 or not np.all((norms >= 0) & (norms <= 1)):
        raise InputError(
            f"relative_norms={relative_norms!r} must be one row of numbers in [0, 1]: "
            "min(norm, C) / C"
        )
    return renyi_divergences(norms / sigma, np.full(len(norms), rate), check_orders(orders))


def check_orders(orders: ArrayLike) -> FloatArray:
    """Rényi orders as (n_orders,) float64; InputError unless each is finite and above 1."""
    return _checks.check_row(
        "orders",
        orders,
        lambda x: np.isfinite(x) & (x > 1),
        "finite numbers above 1, e.g. [1.5, 2, 4, 8, 16, 32]",
        least=1,
    )


def renyi_divergences(
    shifts: FloatArray, sample_rates: FloatArray, orders: FloatArray, k: int = 1
) -> FloatArray:
    """(n, n_orders) Rényi divergences of one step, unchecked.

    shifts: (n,) relative_norm / noise_multiplier; sample_rates: (n,); k: rows of one owner, each of
    that shift.
    """
    row = np.repeat(np.arange(len(shifts)), len(orders))
    values = divergences_of_pairs(shifts, sample_rates, row, np.tile(orders, len(shifts)), k)
    return values.reshape(len(shifts), len(orders))


def divergences_of_pairs(
    shifts: FloatArray, sample_rates: FloatArray, row: IntArray, order: FloatArray, k: int
) -> FloatArray:
    """(n_pairs,) divergences of mechanism row[i] at order[i]; see `renyi_divergences`."""
    log_moments = np.zeros(len(row))
    unfilled = np.flatnonzero(
        _fill_closed_form(log_moments, shifts[row], sample_rates[row], order, k)
    )
    largest = np.zeros(len(shifts))
    np.maximum.at(largest, row[unfilled], order[unfilled])
    rows = np.flatnonzero(largest)
    rows = rows[np.argsort(shifts[rows])]  # neighbours have grids of similar length
    place = np.zeros(len(shifts), np.int64)
    place[rows] = np.arange(len(rows))
    unfilled = unfilled[np.argsort(place[row[unfilled]], kind="stable")]
    where = place[row[unfilled]]
    for part in _batches(_n_nodes(shifts[rows], largest[rows], k)):
        batch = rows[part]
        pairs = slice(*np.searchsorted(where, (part.start, part.stop)))
        chosen = unfilled[pairs]
        log_moments[chosen] = _quadrature(
            shifts[batch], sample_rates[batch], k, where[pairs] - part.start, order[chosen]
        )
    return log_moments / (order - 1)


def _log_binomial(k: int, j: int, q: FloatArray) -> FloatArray:
    """Log of the probability that j of k rows are sampled, at rates q below 1."""
    return np.asarray(math.log(math.comb(k, j)) + j * np.log(q) + (k - j) * np.log1p(-q))


def _fill_closed_form(
    out: FloatArray, shifts: FloatArray, q: FloatArray, orders: FloatArray, k: int
) -> NDArray[np.bool_]:
    """Fill pairs (n,) where two closed-form bounds agree; return a mask of the others."""
    unsampled = q == 1.0
    with np.errstate(over="ignore"):  # infinity is right where there is almost no noise
        exponent = 0.5 * np.square(k * shifts) * (orders - 1)
        out[unsampled] = orders[unsampled] * exponent[unsampled]
    # E[f^a]^(1/a) <= sum of w_j e^{(a-1)(ju)^2/2} (Minkowski); E[f^a] >= w_k^a e^{a(a-1)(ku)^2/2}.
    rate = np.where(unsampled, 0.5, q)
    log_all = _log_binomial(k, k, rate)
    excess = np.full(out.shape, -np.inf)
    gap = np.zeros(out.shape)
    for j in range(k):
        below = _log_binomial(k, j, rate) - log_all - exponent * (1 - (j / k) ** 2)
        gap += np.exp(np.minimum(below, 0.0))
        np.maximum(excess, below, out=excess)
    upper = orders * (exponent + log_all + gap)
    closed = (
        (excess < -math.log(1e14)) & (orders * gap <= 1e-14 * np.maximum(upper, 1.0)) & ~unsampled
    )
    out[closed] = upper[closed]
    return np.asarray(~closed & (shifts > 0) & ~unsampled)


def _spacing(shift: FloatArray) -> FloatArray:
    """Trapezoid spacing for a relative error of exp(-_LOG_PRECISION), as the module proves."""
    widest = math.sqrt(2 * _LOG_PRECISION)  # the best height where no singularity limits it
    height = np.minimum(widest, math.pi / np.maximum(shift, 1e-300))
    return np.asarray(2 * math.pi * height / (_LOG_PRECISION + np.square(height) / 2))


def _n_nodes(shift: FloatArray, largest_order: FloatArray, k: int) -> FloatArray:
    return np.asarray((largest_order * k * shift + 2 * _REACH) / _spacing(shift) + 3)


def _batches(n_nodes: FloatArray) -> Iterator[slice]:
    """Split rows so that the table of log f of a batch stays small."""
    begin, widest = 0, 0.0
    for end, width in enumerate(n_nodes):
        widest = max(widest, width)
        if end > begin and (end + 1 - begin) * widest > _ELEMENTS_AT_ONCE:
            yield slice(begin, end)
            begin, widest = end, width
    if begin < len(n_nodes):
        yield slice(begin, len(n_nodes))


@dataclass(frozen=True)
class _Grid:
    """Trapezoid nodes of some rows, each array (n_rows, n_nodes).

    They are log f, the log of the weight, the weight, and weight * (f - 1).
    """

    log_f: FloatArray
    log_weight: FloatArray
    weight: FloatArray
    gain: FloatArray


def _grid(u: FloatArray, q: FloatArray, k: int, first: FloatArray, n_nodes: int) -> _Grid:
    h = _spacing(u)
    z = (first[:, None] + np.arange(n_nodes)) * h[:, None]
    log_weight = -0.5 * np.square(z) + np.log(h / math.sqrt(2 * math.pi))[:, None]
    weight = np.exp(log_weight)
    log_f, rise = _density_ratio(z, u[:, None], q[:, None], k)
    gain = weight * rise
    far = rise > 1.0  # f may overflow where its product with the weight does not
    gain[far] = np.exp(np.minimum(log_f[far] + log_weight[far], 700.0)) - weight[far]
    return _Grid(log_f, log_weight, weight, gain)


def _quadrature(
    u: FloatArray, q: FloatArray, k: int, row: IntArray, order: FloatArray
) -> FloatArray:
    """(n_cells,) log moments of (row, order) cells: one grid per row serves all its orders."""
    h = _spacing(u)
    first = -np.ceil(_REACH / h)
    end = order * k * u[row] + _REACH
    needed = np.ceil(end / h[row]) - first[row] + 1
    # A few fixed widths, so that the bits of a sum do not depend on what else is computed.
    n_nodes = np.ceil(1.2 ** np.ceil(np.log(needed) / math.log(1.2))).astype(np.int64)
    grid = _grid(u, q, k, first, int(n_nodes.max(initial=1)))
    largest_power = order * np.maximum(
        _density_ratio(end, u[row], q[row], k)[0], -k * np.log1p(-q[row])
    )
    leading = 0.5 * order * (order - 1) * np.square(k * q[row])
    leading *= np.expm1(np.minimum(np.square(u[row]), 600.0))
    small = leading < _DIRECT_ABOVE
    values = np.zeros(len(row))
    done = np.zeros(len(row), dtype=bool)
    for limit, n_terms in _SERIES:
        chosen = np.flatnonzero((largest_power <= limit) & ~done)
        done[chosen] = True
        for cells, width in _buckets(chosen, n_nodes):
            values[cells] = _log_moments_by_series(grid, row[cells], order[cells], width, n_terms)
    small &= ~done
    for cells, width in _buckets(np.flatnonzero(small), n_nodes):
        values[cells] = _small_log_moments(grid, row[cells], order[cells, None], width)
    large = ~done & ~small
    large[small] = values[small] > 1.0  # the leading term misjudged them
    for cells, width in _buckets(np.flatnonzero(large), n_nodes):
        values[cells] = _log_moments(grid, row[cells], order[cells, None], width)
    return values


def _buckets(cells: IntArray, n_nodes: IntArray) -> Iterator[tuple[IntArray, int]]:
    """Split cells into parts that need the same number of nodes, which are small enough."""
    for width in np.unique(n_nodes[cells]).tolist():
        alike = cells[n_nodes[cells] == width]
        step = max(1, _ELEMENTS_AT_ONCE // width)
        yield from ((alike[begin : begin + step], width) for begin in range(0, len(alike), step))


def _density_ratio(
    z: FloatArray, u: FloatArray, q: FloatArray, k: int
) -> tuple[FloatArray, FloatArray]:
    """Log f to full relative precision, and f - 1 up to e^600; z has the shape of u and q."""
    rise, largest = np.zeros(z.shape), np.zeros(z.shape)
    for j in range(1, k + 1):
        tilt = z * (j * u) - 0.5 * np.square(j * u)
        np.maximum(largest, tilt, out=largest)
        rise += np.exp(_log_binomial(k, j, q)) * np.expm1(np.minimum(tilt, 600.0))
    log_f = np.log1p(np.maximum(rise, -0.5))
    odd = (largest > 600.0) | (rise < -0.5)  # e^tilt overflows at 709, and 1 + rise cancels near -1
    if odd.any():
        at, shift, rate = (np.broadcast_to(values, z.shape)[odd] for values in (z, u, q))
        total = k * np.log1p(-rate)
        for j in range(1, k + 1):
            total = np.logaddexp(
                total, _log_binomial(k, j, rate) + at * (j * shift) - 0.5 * np.square(j * shift)
            )
        log_f[odd] = total
    return log_f, rise


def _log_moments(grid: _Grid, row: IntArray, order: FloatArray, width: int) -> FloatArray:
    """Log of E[f^order] of cells; small ones are left to `_small_log_moments`."""
    exponent = grid.log_f[row, :width]
    exponent *= order
    exponent += grid.log_weight[row, :width]
    peak = exponent.max(axis=1)
    exponent -= peak[:, None]
    total = np.asarray(peak + np.log(np.exp(exponent, out=exponent).sum(axis=1)))
    small = np.flatnonzero(total < _DIRECT_ABOVE)
    if len(small):
        total[small] = _small_log_moments(grid, row[small], order[small], width)
    return total


def _small_log_moments(grid: _Grid, row: IntArray, order: FloatArray, width: int) -> FloatArray:
    """log1p(E[f^a - 1 - a (f - 1)]) of cells: it needs only E[f] = 1; each term is at least 0."""
    log_f, weight, gain = grid.log_f[row, :width], grid.weight[row, :width], grid.gain[row, :width]
    power = order * log_f
    # f^a - 1 - a (f - 1) = f expm1((a-1) log f) - (a-1) (f-1), which keeps its precision where a
    # is close to 1.
    terms = (weight + gain) * np.expm1((order - 1) * np.minimum(log_f, 2.0 / order))
    terms -= (order - 1) * gain
    far = power > 1.0
    if far.any():
        exponent = power[far] + grid.log_weight[row, :width][far]
        scaled = np.broadcast_to(order, power.shape)[far] * gain[far]
        terms[far] = np.exp(np.minimum(exponent, 700.0)) - weight[far] - scaled
    tiny = np.abs(power) < _CANCELLING_BELOW
    y, inverse = power[tiny], np.broadcast_to(1 / order, power.shape)[tiny]
    series = np.zeros_like(y)
    for k in range(_CANCELLING_TERMS, 1, -1):  # sum over k of y^k (1 - a^(1-k)) / k!, by Horner
        series = series * y + (1 - inverse ** (k - 1)) / math.factorial(k)
    terms[tiny] = weight[tiny] * np.square(y) * series
    return np.asarray(np.log1p(terms.sum(axis=1)))


def _log_moments_by_series(
    grid: _Grid, row: IntArray, order: FloatArray, width: int, n_terms: int
) -> FloatArray:
    """log1p(sum over k of (a^k - a) E[(log f)^k] / k!) of cells whose a * log f is small."""
    rows, place = np.unique(row, return_inverse=True)
    log_f = grid.log_f[rows, :width]
    scale = np.ones(len(rows))  # a power of 2 that keeps powers of log f and of the order in range
    np.minimum.at(scale, place, np.exp2(-np.ceil(np.log2(order))))
    scaled = log_f / scale[:, None]
    moment = grid.weight[rows, :width] * scaled
    power, first = order * scale[place], scale.copy()  # (a c)^k / k! and c^k / k!
    total, relative = np.zeros(len(row)), order * scale[place]
    for k in range(2, n_terms + 1):
        moment *= scaled
        power *= relative / k
        first *= scale / k
        total += (power - order * first[place]) * moment.sum(axis=1)[place]
    return np.asarray(np.log1p(total))
