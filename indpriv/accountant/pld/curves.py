"""Whole privacy curves and risk figures of each example along the recorded trajectory. Sensitive.

delta(epsilon) of an example says everything about how well an attacker who sees the whole
trajectory can distinguish its run from a run without it. Three figures are read off this curve:

* membership advantage: the largest true-positive minus false-positive rate of any attack, delta(0);
* true-positive rate at a false-positive rate: min over epsilon of delta(epsilon) +
  exp(epsilon) * rate, the trade-off function of Dong, Roth and Su 2022 (J. R. Stat. Soc. B 84,
  Proposition 6) seen from above;
* mu of a Gaussian mechanism (their mu-GDP) whose curve is just above the example's.

Like the epsilons, they describe this run. Only those of the worst case (max_grad_norm in every
step) limit attacks in general: pass the participations of such an example.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from indpriv._arrays import FloatArray
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld.brackets import pld_delta, pld_epsilon
from indpriv.accountant.pld.closed_form import gaussian_delta, invert_delta
from indpriv.accountant.pld.loss_sum import Bounds

_OFFSETS = np.arange(-3.0, 4.0)  # of the epsilons that are looked at together, in steps
_SHRINK = 24.0  # factor by which the step falls once these epsilons enclose the threshold
_STALE = 3  # rounds without progress after which the bounds of delta themselves are the limit
_ROUNDS = 20  # at most; three or four are enough unless participation is rare
_PRECISION = 1e-6  # relative, of a true-positive rate
_ROUNDING = 4e-15  # relative, of the few sums that turn delta into a true-positive rate
_STEEP = 1e30  # a slope beyond any
_LOWEST_EPSILON = -40.0  # a test with a lower threshold has a true-positive rate within 1e-17 of 1
_MU_POINTS = 9  # epsilons at which a Gaussian curve is compared with an example's
_LARGEST_MU = 1e12


def delta_curve(participations: Participations, epsilon: FloatArray) -> Bounds:
    """Bound delta of every example at each of some epsilons.

    Args:
        participations: of the examples; see `pld_epsilon`.
        epsilon: (k,) real numbers.

    Returns:
        bounds of shape (n_examples, k), the larger of both neighbouring directions.

    >>> one = np.ones(1)
    >>> run = Participations(one, one, one, one[:, None])  # one Gaussian step at the clipping norm
    >>> delta_curve(run, np.array([0.0, 4.3771781])).upper.round(6)
    array([[3.82925e-01, 1.00000e-05]])
    """
    n_examples = len(participations.counts)
    lower, upper = np.zeros((2, n_examples, len(epsilon)))
    for column, value in enumerate(np.asarray(epsilon, np.float64)):
        found = pld_delta(participations, np.full((n_examples, 1), value))
        lower[:, column], upper[:, column] = found.lower[:, 0], found.upper[:, 0]
    return Bounds(lower + 0.0, upper + 0.0)  # adding 0 turns a negative 0 into 0


def membership_advantage(participations: Participations) -> Bounds:
    """The largest true-positive minus false-positive rate of any test, for each example.

    It is delta at epsilon 0, the total variation between the outputs with and without the example;
    bounds have shape (n_examples,).
    """
    found = delta_curve(participations, np.zeros(1))
    return Bounds(found.lower[:, 0], found.upper[:, 0])


def true_positive_rates(
    participations: Participations, rates: FloatArray, advantage: Bounds
) -> Bounds:
    """The largest true-positive rate of any membership test at each false-positive rate.

    Args:
        participations: of the examples; see `pld_epsilon`.
        rates: (n_rates,) false-positive rates, each in (0, 1): how often a test says "present" of
            runs without the example.
        advantage: of the same examples.

    Returns:
        bounds of shape (n_examples, n_rates): how often it says "present" of runs with the example.
        The upper one is valid at any epsilons that are looked at, the lower one because the curve
        is convex in exp(epsilon).

    >>> one = np.ones(1)
    >>> run = Participations(one, one, one, one[:, None])  # N(1, 1) or N(0, 1): Phi(1 - 1.2816)
    >>> true_positive_rates(run, np.array([0.1]), membership_advantage(run)).upper.round(4)
    array([[0.3891]])
    """
    bounds = [_true_positive_rate(participations, float(rate), advantage) for rate in rates]
    empty = np.zeros((len(participations.counts), 0))
    return Bounds(
        np.column_stack([empty, *(bound.lower for bound in bounds)]),
        np.column_stack([empty, *(bound.upper for bound in bounds)]),
    )


def _true_positive_rate(participations: Participations, rate: float, advantage: Bounds) -> Bounds:
    """Minimise delta(epsilon) + exp(epsilon) * rate over epsilons that close in on the minimum."""
    # The trade-off function is concave and meets rate* + advantage at a rate* <= 1 - advantage
    least = np.minimum(advantage.lower, rate / np.maximum(1 - advantage.lower, rate))
    lower, upper = np.maximum(least, rate), np.minimum(rate + advantage.upper, 1.0)
    search = _Search.of(advantage.upper, rate)
    stale = np.zeros(len(upper), np.int64)
    active = np.flatnonzero(upper - lower > _PRECISION * upper)
    for _ in range(_ROUNDS):
        if not len(active):
            break
        width = (upper - lower)[active]
        epsilon = search.centre[active, None] + search.step[active, None] * _OFFSETS
        found = pld_delta(participations.select(active), epsilon, directions=("remove",))
        weight = np.exp(epsilon)
        low, high = found.lower + weight * rate, found.upper + weight * rate
        best = high.argmin(axis=1)
        upper[active] = np.minimum(upper[active], high.min(axis=1))
        inside = (best > 1) & (best < len(_OFFSETS) - 2)
        proven = _least_between(weight, low, high, np.clip(best, 2, len(_OFFSETS) - 3))
        lower[active] = np.maximum(lower[active], np.where(inside, proven, 0.0))
        closer = search.move(active, epsilon, weight, found)
        closer |= (upper - lower)[active] < 0.9 * width
        stale[active] = np.where(closer, 0, stale[active] + 1)
        active = active[((upper - lower > _PRECISION * upper) & (stale < _STALE))[active]]
    lower = np.minimum(lower, upper) * (1 - _ROUNDING)
    return Bounds(lower, np.minimum(upper * (1 + _ROUNDING), 1.0))


@dataclass
class _Search:
    """The epsilon at which the loss of each example exceeds epsilon as rarely as the rate.

    There the best test has its threshold. The share of runs without the example whose loss exceeds
    epsilon is minus the slope of delta over exp(epsilon). All arrays have shape (n_examples,); the
    threshold is between left and right.
    """

    log_rate: float
    centre: FloatArray
    step: FloatArray
    left: FloatArray
    right: FloatArray

    @classmethod
    def of(cls, advantage: FloatArray, rate: float) -> _Search:
        """Start from the threshold of a Gaussian run with this advantage."""
        mu = 2 * ndtri(np.minimum((1 + advantage) / 2, 1 - 1e-16))
        left, right = np.full(len(mu), _LOWEST_EPSILON), np.full(len(mu), -np.log(rate))
        centre = np.clip(-mu * ndtri(rate) - mu**2 / 2, left + 1e-3, right)
        return cls(float(np.log(rate)), centre, np.maximum(mu, 1e-12) / 4, left, right)

    def move(
        self, active: NDArray[np.intp], epsilon: FloatArray, weight: FloatArray, delta: Bounds
    ) -> NDArray[np.bool_]:
        """Move on from the deltas of some examples; returns whether left and right came closer."""
        rise, rate = np.diff(weight), np.exp(self.log_rate)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            surely = (delta.lower[:, :-1] - delta.upper[:, 1:]) / rise > rate
            possibly = (delta.upper[:, :-1] - delta.lower[:, 1:]) / rise > rate
            falls = np.maximum(-np.diff((delta.lower + delta.upper) / 2), 0.0)
            excess = np.log(falls / rise) - self.log_rate
        left, right = self.left[active], self.right[active]
        distance = right - left
        left = np.maximum(left, np.where(surely, epsilon[:, :-1], -np.inf).max(axis=1))
        right = np.minimum(right, np.where(possibly, np.inf, epsilon[:, 1:]).min(axis=1))
        rows, place = np.arange(len(active)), (epsilon[:, 1:] + epsilon[:, :-1]) / 2
        first = np.clip((excess > 0).sum(axis=1) - 1, 0, place.shape[1] - 2)
        begin, end = (rows, first), (rows, first + 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = (excess[end] - excess[begin]) / (place[end] - place[begin])
            root = place[begin] - excess[begin] / slope
        root = np.where((root >= left) & (root <= right), root, (left + right) / 2)
        step, apart = self.step[active], np.abs(root - self.centre[active])
        enclosed = (left >= epsilon[:, 0]) & (right <= epsilon[:, -1])
        wider = np.maximum(step, apart / _OFFSETS[-1])
        self.step[active] = np.where(enclosed, step / _SHRINK, wider)
        self.centre[active], self.left[active], self.right[active] = root, left, right
        return np.asarray(right - left < 0.9 * distance)


def _least_between(
    x: FloatArray, low: FloatArray, high: FloatArray, best: NDArray[np.intp]
) -> FloatArray:
    """(n,) lower bound of the minimum of a convex function with known bounds at points x (n, k).

    Between two points the function is above the lines through each of them and its outer neighbour.
    """
    rows = np.arange(len(best))

    def at(array: FloatArray, shift: int) -> FloatArray:
        return array[rows, best + shift]

    def slope(stop_at: FloatArray, start_at: FloatArray, start: int, unknown: float) -> FloatArray:
        width = at(x, start + 1) - at(x, start)
        rise = at(stop_at, start + 1) - at(start_at, start)
        return np.where(width > 0, rise / np.where(width > 0, width, 1.0), unknown)

    # Below the slope to their right, and above the slope to their left
    falls, far_falls = slope(low, high, -1, -_STEEP), slope(low, high, -2, -_STEEP)
    rises, far_rises = slope(high, low, 0, _STEEP), slope(high, low, 1, _STEEP)
    right = _crossing(at(x, 0), at(low, 0), falls, at(x, 1), at(low, 1), far_rises)
    left = _crossing(at(x, -1), at(low, -1), far_falls, at(x, 0), at(low, 0), rises)
    # Unless both neighbours are higher, the minimum may be further out
    turns = (at(low, 1) >= at(high, 0)) & (at(low, -1) >= at(high, 0))
    return np.where(turns, np.minimum(left, right), 0.0)


def _crossing(
    x0: FloatArray,
    y0: FloatArray,
    slope0: FloatArray,
    x1: FloatArray,
    y1: FloatArray,
    slope1: FloatArray,
) -> FloatArray:
    """At most the minimum on [x0, x1] of the larger of two lines, a falling and a rising one."""
    with np.errstate(invalid="ignore", divide="ignore"):
        where = (y1 - y0 + slope0 * x0 - slope1 * x1) / (slope0 - slope1)
    where = np.clip(np.where(np.isfinite(where), where, x0), x0, x1)
    # Wherever rounding put the crossing, one of the lines is below it there
    return np.minimum(y0 + slope0 * (where - x0), y1 + slope1 * (where - x1))


@dataclass(frozen=True)
class GaussianApproximation:
    """The Gaussian mechanism that an example's run resembles; arrays have shape (n_examples,).

    Attributes:
        mu: the smallest mu whose curve is above the example's at every epsilon that was looked at,
            from 0 to epsilon(delta).
        error: by how much its delta exceeds the example's there, at most: 0 for a run of unsampled
            steps.
    """

    mu: FloatArray
    error: FloatArray


def gaussian_approximation(
    participations: Participations, least: Participations, *, delta: float, limit: float
) -> GaussianApproximation:
    """Approximate the whole curve by one number, mu, and say how wrong it is.

    Args:
        participations: of the examples; see `pld_epsilon`.
        least: the same, or steps never worse than these, if norms were rounded up; the error is
            relative to them.
        delta: the curve is followed from epsilon 0 to epsilon(delta). Beyond that a sampled run has
            heavier tails than any Gaussian of comparable mu.
        limit: an upper bound of all examples' epsilon(delta), e.g. the worst case's Renyi bound.

    Returns:
        mu and its error. mu is an approximation, never a bound below delta.

    >>> one = np.ones(1)
    >>> run = Participations(one, 2 * one, one, 16 * one[:, None])  # mu = sqrt(16) / 2
    >>> gaussian_approximation(run, run, delta=1e-5, limit=20.0).mu.round(6)
    array([2.])
    """
    n_examples = len(participations.counts)
    end = pld_epsilon(participations, delta=delta, rdp_upper=np.full(n_examples, limit)).epsilon
    mu, curve = np.zeros(n_examples), []
    for share in np.linspace(0.0, 1.0, _MU_POINTS):
        epsilon = share * end
        bound = pld_delta(participations, epsilon[:, None])
        below = bound if least is participations else pld_delta(least, epsilon[:, None])
        mu = np.maximum(mu, gaussian_mu(epsilon, bound.upper[:, 0]))
        curve.append((epsilon, below.lower[:, 0]))
    excess = [gaussian_delta(epsilon, mu) - lower for epsilon, lower in curve]
    return GaussianApproximation(mu, np.maximum(np.max(excess, axis=0), 0.0))


def gaussian_mu(epsilon: FloatArray, delta: FloatArray) -> FloatArray:
    """(n,) mu at which the Gaussian mechanism has this delta, from above; 0 where delta is 0."""
    reachable = np.clip(delta, 1e-300, 1 - 1e-15)

    def delta_of(inverse: FloatArray, examples: NDArray[np.intp]) -> FloatArray:
        return gaussian_delta(epsilon[examples], 1 / inverse)

    lower, _ = invert_delta(delta_of, reachable, low=1 / _LARGEST_MU)
    return np.where(delta > 0, 1 / lower, 0.0)
