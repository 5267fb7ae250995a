"""Whole curves and plain risk of each example along the recorded trajectory. Sensitive.

delta(epsilon) of an example says everything about how well anybody who sees the whole trajectory can tell its run from a
run without it. Three plain readings of the same curve:

* membership advantage: the largest true-positive rate minus false-positive rate of any attack, which is delta(0);
* true-positive rate at a false-positive rate: min over epsilon of delta(epsilon) + exp(epsilon) * rate, the trade-off
  function of Dong, Roth and Su 2022 (J. R. Stat. Soc. B 84, Proposition 6) seen from above;
* mu of a Gaussian mechanism (their mu-GDP) whose curve lies just above the example's.

Like the epsilons, they describe this run; only those of the worst case (max_grad_norm in every step) limit attacks in
general: pass the participations of such an example.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from indpriv._arrays import FloatArray
from indpriv.accountant.histogram.governing_records import Participations
from indpriv.accountant.pld import closed_form
from indpriv.accountant.pld.brackets import Bounds, pld_delta, pld_epsilon

_OFFSETS = np.arange(-3.0, 4.0)  # of a stencil of epsilons, in units of its step
_SHRINK = 24.0  # of the step, once a stencil holds the threshold that is looked for
_STALE = 3  # rounds without progress after which the bounds of delta themselves are the limit
_ROUNDS = 20  # at most; three or four are enough unless participation is rare
_PRECISION = 1e-6  # relative, of a true-positive rate
_ROUNDING = 4e-15  # relative, of the few sums that make a true-positive rate of delta
_STEEP = 1e30  # a slope beyond any
_LOWEST_EPSILON = -40.0  # a test with a lower threshold has a true-positive rate of 1 but for 1e-17
_MU_POINTS = 9  # epsilons at which a Gaussian curve is held against an example's
_HALVINGS = 60


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
    columns = [
        pld_delta(participations, np.full((n_examples, 1), value))
        for value in np.asarray(epsilon, np.float64)
    ]
    empty = np.zeros((n_examples, 0))
    return Bounds(
        np.concatenate([empty, *(column.lower for column in columns)], axis=1)
        + 0.0,  # which makes 0 of a negative 0
        np.concatenate([empty, *(column.upper for column in columns)], axis=1) + 0.0,
    )


def membership_advantage(participations: Participations) -> Bounds:
    """The largest advantage, true-positive minus false-positive rate, of any test for each example: (n_examples,).

    It is delta at epsilon 0, the total variation between the outputs with and without the example.
    """
    found = delta_curve(participations, np.zeros(1))
    return Bounds(found.lower[:, 0], found.upper[:, 0])


def true_positive_rates(
    participations: Participations, rates: FloatArray, advantage: Bounds
) -> Bounds:
    """The largest true-positive rate of any membership test at each false-positive rate, for each example.

    Args:
        participations: of the examples; see `pld_epsilon`.
        rates: (n_rates,) false-positive rates, each in (0, 1): how often "present" is said of runs without the example.
        advantage: of the same examples.

    Returns:
        bounds of shape (n_examples, n_rates): how often "present" is said of runs with the example. The upper one is
        valid at whatever epsilons were looked at, the lower one by convexity of the curve in exp(epsilon).

    >>> one = np.ones(1)
    >>> run = Participations(one, one, one, one[:, None])  # N(1, 1) against N(0, 1): Phi(1 - 1.2816)
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
    """Minimise delta(epsilon) + exp(epsilon) * rate by stencils of epsilons that close in on the least value."""
    # The trade-off function is concave and reaches rate* + advantage at some rate* of at most 1 - advantage
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
    return Bounds(
        np.minimum(lower, upper) * (1 - _ROUNDING), np.minimum(upper * (1 + _ROUNDING), 1.0)
    )


@dataclass
class _Search:
    """Where the best test of each example has its threshold: the epsilon at which loss > epsilon is as rare as the rate.

    The share of runs without the example whose loss exceeds epsilon is minus the slope of delta over exp(epsilon). All
    arrays have shape (n_examples,); the threshold lies between left and right.
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
        """Go on from the deltas of some examples at a stencil; whether left and right came closer to each other."""
        rise = np.diff(weight)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            surely = (delta.lower[:, :-1] - delta.upper[:, 1:]) / rise > np.exp(self.log_rate)
            possibly = (delta.upper[:, :-1] - delta.lower[:, 1:]) / rise > np.exp(self.log_rate)
            middle = (delta.lower + delta.upper) / 2
            excess = np.log(np.maximum(-np.diff(middle), 0.0) / rise) - self.log_rate
        left, right = self.left[active], self.right[active]
        distance = right - left
        left = np.maximum(left, np.where(surely, epsilon[:, :-1], -np.inf).max(axis=1))
        right = np.minimum(right, np.where(possibly, np.inf, epsilon[:, 1:]).min(axis=1))
        rows, place = np.arange(len(active)), (epsilon[:, 1:] + epsilon[:, :-1]) / 2
        first = np.clip((excess > 0).sum(axis=1) - 1, 0, place.shape[1] - 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = (excess[rows, first + 1] - excess[rows, first]) / (
                place[rows, first + 1] - place[rows, first]
            )
            root = place[rows, first] - excess[rows, first] / slope
        root = np.where((root >= left) & (root <= right), root, (left + right) / 2)
        step, apart = self.step[active], np.abs(root - self.centre[active])
        between = (left >= epsilon[:, 0]) & (right <= epsilon[:, -1])
        self.step[active] = np.where(
            between, step / _SHRINK, np.maximum(step, apart / _OFFSETS[-1])
        )
        self.centre[active], self.left[active], self.right[active] = root, left, right
        return np.asarray(right - left < 0.9 * distance)


def _least_between(
    x: FloatArray, low: FloatArray, high: FloatArray, best: NDArray[np.intp]
) -> FloatArray:
    """(n,) lower bound of a convex function of which bounds are known at the points x (n, k), near its least one.

    Between two points it lies above the lines through each of them and its outer neighbour.
    """
    rows = np.arange(len(best))

    def at(array: FloatArray, shift: int) -> FloatArray:
        return array[rows, best + shift]

    def slope(stop_at: FloatArray, start_at: FloatArray, start: int, unknown: float) -> FloatArray:
        width = at(x, start + 1) - at(x, start)
        rise = at(stop_at, start + 1) - at(start_at, start)
        return np.where(width > 0, rise / np.where(width > 0, width, 1.0), unknown)

    falls, far_falls = (
        slope(low, high, -1, -_STEEP),
        slope(low, high, -2, -_STEEP),
    )  # below the slope to their right
    rises, far_rises = (
        slope(high, low, 0, _STEEP),
        slope(high, low, 1, _STEEP),
    )  # above the slope to their left
    right = _crossing(at(x, 0), at(low, 0), falls, at(x, 1), at(low, 1), far_rises)
    left = _crossing(at(x, -1), at(low, -1), far_falls, at(x, 0), at(low, 0), rises)
    turns = (at(low, 1) >= at(high, 0)) & (
        at(low, -1) >= at(high, 0)
    )  # else the least point may lie further out
    return np.where(turns, np.minimum(left, right), 0.0)


def _crossing(
    x0: FloatArray,
    y0: FloatArray,
    slope0: FloatArray,
    x1: FloatArray,
    y1: FloatArray,
    slope1: FloatArray,
) -> FloatArray:
    """No more than the least value on [x0, x1] of the larger of two lines, a falling and a rising one."""
    with np.errstate(invalid="ignore", divide="ignore"):
        where = (y1 - y0 + slope0 * x0 - slope1 * x1) / (slope0 - slope1)
    where = np.clip(np.where(np.isfinite(where), where, x0), x0, x1)
    # Wherever rounding put the crossing, one of the lines is below it there
    return np.minimum(y0 + slope0 * (where - x0), y1 + slope1 * (where - x1))


@dataclass(frozen=True)
class GaussianApproximation:
    """The Gaussian mechanism that an example's run resembles; arrays have shape (n_examples,).

    Attributes:
        mu: the smallest mu whose curve lies above the example's at every epsilon looked at, from 0 to epsilon(delta).
        error: by how much its delta exceeds the example's at most there: 0 for a run of unsampled steps.
    """

    mu: FloatArray
    error: FloatArray


def gaussian_approximation(
    participations: Participations, least: Participations, *, delta: float, limit: float
) -> GaussianApproximation:
    """mu-GDP beside (epsilon, delta): one number for the whole curve, with how wrong it is.

    Args:
        participations: of the examples; see `pld_epsilon`.
        least: the same, or steps never worse than these, if counts were rounded up: the error is against them.
        delta: the curve is followed from epsilon 0 to epsilon(delta); beyond, a sampled run has heavier tails than any
            Gaussian of comparable mu.
        limit: an upper bound of everybody's epsilon(delta), for instance the worst case's Renyi bound.

    Returns:
        mu and its error. mu is an approximation, never a bound below delta.

    >>> one = np.ones(1)
    >>> run = Participations(one, 2 * one, one, 16 * one[:, None])  # mu = sqrt(16) / 2
    >>> gaussian_approximation(run, run, delta=1e-5, limit=20.0).mu.round(6)
    array([2.])
    """
    n_examples = len(participations.counts)
    end = pld_epsilon(participations, delta=delta, rdp_upper=np.full(n_examples, limit)).epsilon
    mu, curves = np.zeros(n_examples), []
    for share in np.linspace(0.0, 1.0, _MU_POINTS):
        epsilon = share * end[:, None]
        bound = pld_delta(participations, epsilon)
        below = bound if least is participations else pld_delta(least, epsilon)
        mu = np.maximum(mu, _gaussian_mu(epsilon, bound.upper)[:, 0])
        curves.append((epsilon[:, 0], below.lower[:, 0]))
    excess = [closed_form.gaussian_delta(epsilon, mu) - lower for epsilon, lower in curves]
    return GaussianApproximation(mu, np.maximum(np.max(excess, axis=0), 0.0))


def _gaussian_mu(epsilon: FloatArray, delta: FloatArray) -> FloatArray:
    """The mu at which the Gaussian mechanism has this delta, from above; 0 where delta is 0."""
    low, high = np.zeros_like(delta), np.ones_like(delta)
    reachable = np.minimum(delta, 1 - 1e-15)
    while np.any(short := closed_form.gaussian_delta(epsilon, high) < reachable):
        high = np.where(short, 2 * high, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = closed_form.gaussian_delta(epsilon, middle) >= reachable
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(delta > 0, high, 0.0)
