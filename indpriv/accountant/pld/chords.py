"""One table for many laws: steps between the nodes of a lattice count at the nodes, by shares.

A step of squared shift v and rate q, s = q^2, is shared between neighbouring nodes linearly in s,
and at each of these in V = exp(v) - 1. A chord of width h of a function g errs by at most
h^2 / 8 max |g''|. For g = K = log E, E = E[f^a], with A = Re a and p = 1 - (1-q)/f:

* In v, E' = a(a-1)/2 E[p^2 f^a], and E'' = a(a-1)/4 E[(2 + 4(a-2) p + (a-2)(a-3) p^2) p^2 f^a],
  since exp(y) is a martingale in v. With p^2 = c + x for any c, E'' / E - (E' / E)^2 is a(a-1)/4
  times E[(2 + 4(a-2) p) p^2 f^a] / E - (4a-6) (c^2 + 2 c E[x f^a] / E) +
  (a-2)(a-3) E[x^2 f^a] / E - a(a-1) (E[x f^a] / E)^2. The second derivative in V is exp(-2v) times
  this less E' / E, which cancels the 2.
* In s, E' = a/(2 q^2) E[(f-1)(f^(a-1) - 1)], as E[f] = 1, is at most
  |a(a-1)|/(2 q^2) E[|f-1| r_2]; r_k is at least the integral of t^(A-k) between 1 and f: it is this
  integral, (f^(A-k+1) - 1)/(A-k+1), where f > 1 and A >= k, else |f-1| max(1, f^(A-k)).
  E'' = a/(4 q^4) E[(f-1) ((a-1)(f-1) f^(a-2) - f^(a-1) + 1)] =
  a(a-1)(a-2)/(4 q^4) E[(f-1) int_1^f (t-1) t^(a-3) dt] is at most
  |a(a-1)(a-2)|/(4 q^4) (E[(f-1)^3] / 2 + |a-3|/3 E[|f-1|^3 r_4]): |t^(a-3) - 1| is at most |a-3|
  times the integral of t^(A-4), and where that is convex it lies below its chord from 1 to f.

All are bounded by means of f^A, for all laws around a node: E[f^A] rises with v and q, and so do
the means of |f-1|^(k-1) r_k (they are convex in exp(y)). So does E[p^k f^A] with v where A > 1;
else such means rise by at most sqrt(v_2 / v_1) exp((v_2 - v_1) / 8), the ratio of the densities of
y. |E| is at least what it is at a node less h max |E'|. Thus a few sums over steps bound the error
of K at all frequencies; where |E| has no such bound, contour.py adds the sizes of both transforms.

Sharing in s, in V and between norms, which comes first and is linear in v, are operators on three
axes that commute: the error is at most the sum of those of each alone, at nodes of the others. A
node bounds all laws whose steps may count at it. Below the first node a step of spread V counts
with the share V / V_0, and errs by no more than this share of four times a chord's error: K_ss
falls there as V^2. Without sampling K is linear in v, and shares are exact. Sensitive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray
from indpriv.accountant.histogram.lattice import Lattice, spread_of
from indpriv.accountant.histogram.mechanisms import Mechanisms
from indpriv.accountant.pld.loss_sum import (
    Cells,
    ComplexArray,
    Direction,
    StepLaws,
    exponent_of,
    log_density_ratio,
)
from indpriv.accountant.pld.transform import is_representable

_STEP = 0.45  # of the trapezoid rule, in units of the narrowest scale; it errs by about 1e-9
_WINDOW = 8.0
_SLACK = 1e-6  # nepers; covers the quadrature
_KINK = 1e-2  # nepers; the same where a third derivative jumps
_LARGEST = 230.0  # logarithm; nothing so large is of use
_TINIEST = 1e-300  # keeps logarithms finite
_CHUNK = 1 << 16  # numbers held at a time: they stay in cache
_NO_BOUND = 1e200
FARTHEST = 8.0  # a Gaussian holds 7e-16 beyond it; see decay.py


def chord_terms(cells: Cells, tilt: float, direction: Direction) -> FloatArray:
    """What the error of K depends on besides the frequency.

    Args:
        cells: of the laws.
        tilt: above 0.
        direction: "remove" or "add".

    Returns:
        (n_laws, 7): five numbers that `features` multiplies, the largest change of E over E at the
        tilt, per |a(a-1)|, and the logarithm of the share that decay.py needs.
    """
    size = abs(exponent_of(tilt, direction))
    shift = cells.high.shift
    start, stop = _window(cells, tilt, direction)
    width = stop - start
    step = _STEP / np.sqrt(1 + (size + 5) * np.square(shift) / 4)
    n_nodes = np.ceil(np.exp2(np.ceil(4 * np.log2(width / step)) / 4))
    terms = np.empty((len(shift), 7))
    for value in np.unique(n_nodes):
        alike = np.flatnonzero(n_nodes == value)
        at_once = max(1, _CHUNK // int(value))
        for first in range(0, len(alike), at_once):
            part = alike[first : first + at_once]
            terms[part] = _terms(cells.select(part), tilt, direction, int(value))
    return terms


def features(w: ComplexArray, direction: Direction, ratio: FloatArray | float) -> FloatArray:
    """(n, 5) numbers at points w whose product with the terms of a law bounds the error of K.

    ratio: (n,) least |E(w)| over E(Re w) of all laws, above 0.
    """
    a = w + 1 if direction == "remove" else -w
    once = np.abs(a * (a - 1)) / ratio
    twice = np.square(once)
    squares = once * np.abs((a - 2) * (a - 3)) + twice
    found = [once, once * np.abs(a - 2), once * np.abs(4 * a - 6), squares, twice]
    return np.asarray(np.stack(found, axis=-1))


def _window(cells: Cells, tilt: float, direction: Direction) -> tuple[FloatArray, FloatArray]:
    """Interval of z outside which nothing counts, as in quadrature.tilted_window."""
    shift = cells.high.shift
    if direction == "remove":
        return np.full_like(shift, -_WINDOW), _WINDOW + (tilt + 4) * shift
    rise = np.sqrt(-2 * tilt * np.log1p(-cells.high.sample_rate))
    return -_WINDOW - np.minimum(tilt * shift, rise), _WINDOW + 4 * shift


def _terms(cells: Cells, tilt: float, direction: Direction, n_nodes: int) -> FloatArray:
    a, low, high = exponent_of(tilt, direction), cells.low, cells.high
    start, stop = _window(cells, tilt, direction)
    step = (stop - start) / (n_nodes - 1)
    z = start[:, None] + step[:, None] * np.arange(n_nodes)
    log_gauss = np.log(step / np.sqrt(2 * np.pi))[:, None] - np.square(z) / 2
    below = log_density_ratio(z, low.shift[:, None], low.sample_rate[:, None])
    top = log_density_ratio(z, high.shift[:, None], high.sample_rate[:, None])
    lowest, highest = (_log_mean(a * ratio + log_gauss) for ratio in (below, top))
    highest = np.maximum(highest, lowest)
    with np.errstate(divide="ignore"):
        denser = np.log(high.shift / low.shift) + np.square(high.shift) / 8
    denser -= np.square(low.shift) / 8
    growth = FARTHEST * low.shift
    growth = np.expm1(growth if direction == "add" else -growth - np.square(low.shift) / 2)
    tilted_by = np.log1p(high.sample_rate * growth) - np.log1p(low.sample_rate * growth)
    terms = np.zeros((len(low), 7))
    if cells.chord_shift.any():
        terms += _shift_terms(cells, a, direction, z, log_gauss, (lowest, highest, denser))
    if cells.chord_rate.any():
        terms += _rate_terms(cells, a, top, log_gauss, lowest)
    terms[:, 6] = lowest - highest - denser + a * tilted_by - _SLACK
    return terms


def _shift_terms(
    cells: Cells,
    a: float,
    direction: Direction,
    z: FloatArray,
    log_gauss: FloatArray,
    around: tuple[FloatArray, FloatArray, FloatArray],
) -> FloatArray:
    """The terms of chords between shifts, on nodes z.

    around: (n_laws,) logarithms of the least and the largest E, and of the ratio of densities of y.
    """
    lowest, highest, denser = around
    shift, rate = cells.high.shift[:, None], cells.rate[:, None]
    ratio = log_density_ratio(z, shift, rate)
    posterior = np.exp(np.log(rate) + z * shift - np.square(shift) / 2 - ratio)
    square = np.square(posterior)
    weights, peak = _weighed(a * ratio + log_gauss)

    def log_moment(values: FloatArray) -> FloatArray:
        return np.asarray(peak + np.log(np.einsum("ij,ij->i", weights, values) + _TINIEST))

    total = log_moment(np.ones_like(z))
    second, third, fourth = map(log_moment, (square, square * posterior, np.square(square)))
    centre = np.exp(second - total)
    spread = log_moment(np.square(square - centre[:, None]))
    highest = np.maximum(highest, total)
    free = cells.low.shift <= 0  # around which no two densities compare
    if direction == "add":
        most = a * np.log1p(-cells.rate)  # as p <= 1
        second, third = (np.where(free, most, moment + denser) for moment in (second, third))
        fourth = np.where(free, most, fourth)
    spread = np.where(free, np.logaddexp(fourth, 2 * np.log(centre) + highest), spread + denser)
    n2, n3, m2 = (_bounded(moment - lowest) for moment in (second, third, spread))
    larger = _bounded(highest - lowest)
    by_shift, terms = cells.chord_shift, np.zeros((len(n2), 7))
    terms[:, 0] = cells.chord_norm * n2 / 2
    terms[:, 1] = by_shift * n3
    terms[:, 2] = by_shift * (np.square(centre) + 2 * centre * np.sqrt(m2 * larger)) / 4
    terms[:, 3] = by_shift * m2 * larger / 4
    terms[:, 5] = np.sqrt(8 * by_shift) * n2 / 2
    return terms


def _rate_terms(
    cells: Cells, a: float, log_f: FloatArray, log_gauss: FloatArray, lowest: FloatArray
) -> FloatArray:
    """The terms of chords between rates; log_f: at the largest shift and rate around a node."""
    smallest, variance = cells.low.sample_rate, spread_of(cells.high.shift)
    third = cells.high.sample_rate**3 * np.square(variance) * (3 + variance) * _bounded(-lowest)
    s2, s4 = (_bounded(_excess(log_f, a, k, log_gauss) - lowest + _KINK) for k in (2, 4))
    by_rate, terms = cells.chord_rate, np.zeros((len(s2), 7))
    terms[:, 1] = by_rate * third / (8 * smallest**4)
    terms[:, 3] = by_rate * s4 / (12 * smallest**4)
    terms[:, 4] = by_rate * np.square(s2) / (4 * smallest**4)
    terms[:, 5] = np.sqrt(8 * by_rate) * s2 / (2 * smallest**2)
    return terms


def _weighed(exponent: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Exp(exponent) over its largest value in each row, and the logarithm of that."""
    peak = exponent.max(axis=1)
    return np.exp(exponent - peak[:, None]), peak


def _log_mean(exponent: FloatArray, factor: FloatArray | float = 1.0) -> FloatArray:
    """Log of the sum over each row of exp(exponent) times a factor."""
    weights, peak = _weighed(exponent)
    return np.asarray(peak + np.log((weights * factor).sum(axis=1) + _TINIEST))


def _excess(log_f: FloatArray, a: float, power: int, log_gauss: FloatArray) -> FloatArray:
    """Log of the mean of |f - 1|^(power - 1) times r(f), see above."""
    above, last = log_f > 0, a - power + 1
    exponent = np.where(above, max(a, power), min(a - power, 0.0)) * log_f
    nearness = -np.expm1(-np.abs(log_f))  # |f - 1| / max(1, f)
    factor = nearness**power
    if a >= power:
        factor = nearness ** (power - 1) * np.where(
            above, -np.expm1(-last * np.abs(log_f)) / last, nearness
        )
    return _log_mean(exponent + log_gauss, factor)


def _bounded(logarithm: FloatArray) -> FloatArray:
    return np.asarray(np.exp(np.minimum(logarithm + _SLACK, _LARGEST)))


@dataclass(frozen=True)
class SharedDivergences:
    """Renyi divergences of one step at each node of a lattice, with what a chord may err by.

    mechanisms: all nodes.
    """

    mechanisms: Mechanisms
    lattice: Lattice

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n_mechanisms) upper bounds."""
        found = self.mechanisms.divergences(orders)
        shift, rate = self.mechanisms.shifts, self.mechanisms.sample_rate
        kept = np.flatnonzero((shift > 0) & (rate < 1))
        if len(kept):
            laws = StepLaws(shift[kept], rate[kept])
            lattice = self.lattice
            cells = Cells.of(laws, lattice.chord_norms, lattice.chord_rates, lattice.chord_shifts)
            for row, order in enumerate(orders):
                tilt = float(order) - 1
                usable = is_representable(cells.high, tilt, "remove")
                terms = chord_terms(cells.select(usable), tilt, "remove")[:, :5]
                error = np.full(len(kept), _NO_BOUND)
                bound = terms @ features(np.array(tilt + 0j), "remove", 1.0)
                error[usable] = np.minimum(bound, _NO_BOUND)
                found[row, kept] += error / tilt
        return found
