"""Exact delta(epsilon) of the runs that have one: Gaussian runs, one sampled step, two steps. Sensitive.

Every function takes any real epsilon: delta(epsilon) = E[(1 - exp(epsilon - loss))_+] is also needed below 0 when two
steps are composed. Formulas: the Gaussian mechanism after Balle and Wang 2018 (arXiv:1805.06530v2, Theorem 8); one
Poisson-sampled step by subsampling it (Balle, Barthe, Gaboardi 2018, arXiv:1807.01647v2, Theorem 2, which is tight for
this pair); two steps by integrating the second one's curve over the loss of the first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, ndtr

from indpriv._arrays import FloatArray
from indpriv.accountant.pld.loss_sum import Direction, LossSum, log_density_ratio

CLOSED_FORM_ERROR = (
    1e-11  # relative error of a closed form's delta, with a wide margin over rounding
)
QUADRATURE_ERROR = (
    1e-9  # relative error granted to the two-step quadrature, after two step widths agreed
)

_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(8)
_TAIL = 11.0  # beyond so many standard deviations a Gaussian holds less than 1e-27
PER_UNIT = 48  # nodes of the double-exponential rule per unit of its variable: rounding is all that is left
_RELATIVE_WIDTH = 1e-13  # of a bracket of epsilon around the root of a computed delta
_MAX_ITERATIONS = 400  # halving alone would need about 4 * 50
_TINY = 1e-300  # stands for a delta of 0 where its logarithm is taken


def gaussian_delta(epsilon: FloatArray, shift: FloatArray | float) -> FloatArray:
    """Hockey-stick divergence of N(shift, 1) from N(0, 1) at any real epsilon, to about 1e-13 relative.

    Args:
        epsilon: any shape.
        shift: broadcast against epsilon, at least 0.

    Returns:
        delta, of the broadcast shape.
    """
    epsilon, shift = np.broadcast_arrays(
        np.asarray(epsilon, np.float64), np.asarray(shift, np.float64)
    )
    covered = -np.expm1(
        np.minimum(epsilon, 0.0)
    )  # delta(-x) = 1 - exp(-x) + exp(-x) delta(x) for this symmetric pair
    size = np.abs(epsilon)
    safe = np.where(shift > 0, shift, 1.0)
    centre = size / safe
    near, far = centre - safe / 2, centre + safe / 2
    direct = ndtr(-near) - np.exp(np.minimum(size, 700.0)) * ndtr(
        -far
    )  # used only where it does not cancel
    density = np.exp(-np.square(near) / 2) / np.sqrt(2 * np.pi)
    inside, above = np.clip(near, -1.0, 1e8), np.clip(far, -1.0, 1e8)
    by_mills = density * (_mills(inside) - _mills(above))
    integral = np.zeros_like(density)
    for node, weight in zip(_GAUSS_NODES, _GAUSS_WEIGHTS, strict=True):
        point = inside + safe / 2 * (1 + node)
        integral += weight * (
            1 - point * _mills(point)
        )  # the derivative of the Mills ratio is x * mills(x) - 1
    by_integral = density * safe / 2 * np.maximum(integral, 0.0)
    delta = np.where(near < -1.0, direct, np.where(safe < 0.5, by_integral, by_mills))
    delta = np.where(shift > 0, covered + np.exp(np.minimum(epsilon, 0.0)) * delta, covered)
    result: FloatArray = np.clip(delta, 0.0, 1.0)
    return result


def _mills(x: FloatArray) -> FloatArray:
    ratio: FloatArray = np.sqrt(np.pi / 2) * erfcx(x / np.sqrt(2.0))
    return ratio


def one_step_delta(
    epsilon: FloatArray,
    shift: FloatArray | float,
    sample_rate: FloatArray | float,
    direction: Direction,
) -> FloatArray:
    """delta(epsilon) of one Poisson-sampled step, closed form, at any real epsilon; arguments broadcast.

    Raises nothing: where epsilon is beyond every loss of the add direction, delta is exactly 0.
    """
    epsilon = np.asarray(epsilon, np.float64)
    rate = np.asarray(sample_rate, np.float64)
    sign = 1.0 if direction == "remove" else -1.0
    inner, possible = _amplified(sign * epsilon, rate)
    if direction == "remove":
        covered = -np.expm1(np.minimum(epsilon, 0.0))  # every loss lies above epsilon
        delta = np.where(possible, rate * gaussian_delta(inner, shift), covered)
    else:
        factor = -np.expm1(np.minimum(epsilon + np.log1p(-np.minimum(rate, 1 - 1e-16)), 0.0))
        factor = np.where(rate >= 1.0, 1.0, factor)
        delta = np.where(possible, factor * gaussian_delta(-inner, shift), 0.0)
    result: FloatArray = delta
    return result


def _amplified(epsilon: FloatArray, rate: FloatArray) -> tuple[FloatArray, NDArray[np.bool_]]:
    """log((exp(epsilon) - 1 + q) / q) and where it exists."""
    large = np.maximum(epsilon, 30.0)
    far = large - np.log(rate) + np.log1p(-(1 - rate) * np.exp(-large))
    ratio = np.expm1(np.minimum(epsilon, 30.0)) / rate
    possible = ratio > -1.0
    near = np.log1p(np.where(possible, ratio, 0.0))
    whole = rate >= 1.0
    return np.where(whole, epsilon, np.where(epsilon > 30.0, far, near)), possible | whole


def two_step_delta(
    epsilon: FloatArray,
    shifts: FloatArray,
    sample_rates: FloatArray,
    direction: Direction,
    *,
    per_unit: int = PER_UNIT,
) -> FloatArray:
    """delta(epsilon) of two steps: the second step's closed form averaged over the first step's loss.

    Args:
        epsilon: (n,).
        shifts: (n, 2) of the two steps.
        sample_rates: (n, 2); a sample rate of 1 is a Gaussian.
        direction: "remove" or "add".
        per_unit: nodes per unit of the tanh-sinh variable.

    Returns:
        (n,). The integrand is smooth but for one point, where epsilon minus the first loss meets the end of the second
        step's losses; the double-exponential rule on both sides of it converges exponentially.
    """
    shift, rate = shifts[:, :1], sample_rates[:, :1]
    second = np.log1p(-np.minimum(sample_rates[:, 1:], 1 - 1e-16))
    end = epsilon[:, None] - second  # log f of the first step where the second step's losses end
    if direction == "add":
        end = -(epsilon[:, None] + second)
    inner, possible = _amplified(end, rate)
    low = np.full_like(shift, -_TAIL)
    high = shift + _TAIL
    break_point = np.where(possible & (sample_rates[:, 1:] < 1.0), inner / shift + shift / 2, low)
    break_point = np.clip(break_point, low, high)
    total = np.zeros(len(epsilon))
    for a, b in ((low, break_point), (break_point, high)):
        z, weight = _tanh_sinh(a, b, per_unit)
        ratio = log_density_ratio(z, shift, rate)
        base = np.exp(-np.square(z) / 2) / np.sqrt(2 * np.pi)
        loss = ratio
        if direction == "remove":
            base = (1 - rate) * base + rate * np.exp(-np.square(z - shift) / 2) / np.sqrt(2 * np.pi)
        else:
            loss = -ratio
        curve = one_step_delta(
            epsilon[:, None] - loss, shifts[:, 1:], sample_rates[:, 1:], direction
        )
        total += np.sum(weight * base * curve, axis=1)
    return total


def _tanh_sinh(low: FloatArray, high: FloatArray, per_unit: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights (n, n_nodes) of the double-exponential rule between low and high, each (n, 1)."""
    t = (
        np.arange(-3 * per_unit, 3 * per_unit + 1)[None, :] / per_unit
    )  # at 3, the weights are below 1e-12 of the middle
    bent = np.pi / 2 * np.sinh(t)
    nodes = (low + high) / 2 + (high - low) / 2 * np.tanh(bent)
    weights = (high - low) / 2 * np.pi / 2 * np.cosh(t) / np.square(np.cosh(bent)) / per_unit
    return nodes, weights


def has_exact_form(losses: LossSum) -> NDArray[np.bool_]:
    """(n_examples,) whether an example's run is a Gaussian, one sampled step, or two parts."""
    parts = losses.steps + (losses.gaussian > 0)
    result: NDArray[np.bool_] = np.less_equal(parts, 2)
    return result


def exact_delta(
    losses: LossSum, epsilon: FloatArray, direction: Direction, *, per_unit: int = PER_UNIT
) -> FloatArray:
    """(n_examples,) delta at epsilon, one per example, of runs for which `has_exact_form` holds."""
    shifts, rates = _two_parts(losses)
    sampled = losses.steps
    delta = gaussian_delta(epsilon, np.sqrt(losses.gaussian))
    one = np.flatnonzero((sampled == 1) & (losses.gaussian == 0))
    if len(one):
        delta[one] = one_step_delta(epsilon[one], shifts[one, 0], rates[one, 0], direction)
    two = np.flatnonzero((sampled == 2) | ((sampled == 1) & (losses.gaussian > 0)))
    if len(two):
        delta[two] = two_step_delta(
            epsilon[two], shifts[two], rates[two], direction, per_unit=per_unit
        )
    return delta


def is_closed_form(losses: LossSum) -> NDArray[np.bool_]:
    """(n_examples,) whether no quadrature is needed: a Gaussian run or one sampled step."""
    steps = losses.steps
    result: NDArray[np.bool_] = np.equal(steps, 0) | (
        np.equal(steps, 1) & np.equal(losses.gaussian, 0)
    )
    return result


def _two_parts(losses: LossSum) -> tuple[FloatArray, FloatArray]:
    """Shifts and rates (n_examples, 2) of up to two parts, the wider loss second; a single part stands first."""
    n = len(losses)
    shifts, rates = np.ones((n, 2)), np.full((n, 2), 0.5)
    if len(losses.shift):
        first = (losses.counts > 0).argmax(axis=1)
        last = len(losses.shift) - 1 - (losses.counts[:, ::-1] > 0).argmax(axis=1)
        shifts[:, 0], shifts[:, 1] = losses.shift[first], losses.shift[last]
        rates[:, 0], rates[:, 1] = losses.sample_rate[first], losses.sample_rate[last]
    unsampled = losses.gaussian > 0
    shifts[unsampled, 1], rates[unsampled, 1] = np.sqrt(losses.gaussian[unsampled]), 1.0
    order = np.argsort(
        log_density_ratio(shifts + 8.0, shifts, rates), axis=1, kind="stable"
    )  # the integrand is smoothest over the narrower loss
    sampled = losses.steps + unsampled >= 2
    order[~sampled] = (0, 1)
    return np.take_along_axis(shifts, order, axis=1), np.take_along_axis(rates, order, axis=1)


def invert_delta(
    delta_of: Callable[[FloatArray], FloatArray],
    target: FloatArray,
    *,
    begin: float = 0.0,
    start: float = 1.0,
    limit: float = np.inf,
) -> tuple[FloatArray, FloatArray]:
    """Where a falling delta(epsilon) meets its target, for many examples at once.

    Args:
        delta_of: maps (n,) epsilons of at least 0 to (n,) deltas; must fall to below the target.
        target: (n,) deltas.
        begin: the smallest epsilon looked at; where delta is at most the target there, both ends are this.
        start: a first guess of the upper end; doubled until it is one.
        limit: the largest epsilon looked at; where delta is above the target there, both ends are this.

    Returns:
        lower, upper: (n,), within 1e-13 relative, delta_of(lower) > target >= delta_of(upper).
    """
    goal = np.log(target)
    low = np.full_like(target, begin)
    value_low = _log(delta_of(low)) - goal
    high = np.full_like(target, max(min(start, limit), begin))
    value_high = _log(delta_of(high)) - goal
    done = value_low <= 0
    while np.any(grow := (value_high > 0) & ~done & (high < limit)):
        low, value_low = np.where(grow, high, low), np.where(grow, value_high, value_low)
        high = np.where(grow, np.minimum(2 * high, limit), high)
        value_high = np.where(grow, _log(delta_of(high)) - goal, value_high)
    beyond = value_high > 0
    low = np.where(beyond, high, low)
    done |= beyond
    for iteration in range(_MAX_ITERATIONS):
        width = high - low
        if np.all(done | (width <= _RELATIVE_WIDTH * high)):
            break
        slope = np.maximum(value_low - value_high, 1e-30) / np.maximum(width, 1e-300)
        if iteration % 4 == 3:
            middle = low + width / 2
        elif iteration % 2 == 0:  # secant
            middle = low + np.maximum(value_low, 0.0) / slope
        else:  # step over the root from the nearer end, so that the other end closes in as well
            nearer = value_low < -value_high
            middle = np.where(nearer, low + 2 * value_low / slope, high + 2 * value_high / slope)
        margin = _RELATIVE_WIDTH * high / 4
        middle = np.clip(middle, low + margin, high - margin)
        value = _log(delta_of(middle)) - goal
        above = value > 0
        low, value_low = np.where(above, middle, low), np.where(above, value, value_low)
        high, value_high = np.where(above, high, middle), np.where(above, value_high, value)
    at_begin = done & ~beyond
    return np.where(at_begin, begin, low), np.where(at_begin, begin, high)


def _log(delta: FloatArray) -> FloatArray:
    logarithm: FloatArray = np.log(np.maximum(delta, _TINY))
    return logarithm
