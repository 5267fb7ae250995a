"""Exact delta(epsilon) where a run has one: Gaussian runs, one sampled step, two steps. Sensitive.

Every function accepts any real epsilon, because delta(epsilon) = E[(1 - exp(epsilon - loss))_+] is
also needed below 0 when two steps are composed. Sources: the Gaussian mechanism after Balle and
Wang 2018 (arXiv:1805.06530v2, Theorem 8); one Poisson-sampled step by amplification (Balle, Barthe,
Gaboardi 2018, arXiv:1807.01647v2, Theorem 2, which is tight for this pair); two steps by
integrating the curve of the second over the loss of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize.elementwise import find_root
from scipy.special import erfcx, ndtr

from indpriv._arrays import FloatArray
from indpriv.accountant.pld.loss_sum import Direction, LossSum, log_density_ratio

CLOSED_FORM_ERROR = 1e-11  # relative, of delta; a wide margin over rounding
QUADRATURE_ERROR = 1e-9  # relative, of the two-step quadrature once two step widths agree
# Nodes of the double-exponential rule per unit of its variable: enough to leave only rounding.
PER_UNIT = 48

_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(8)
_TAIL = 11.0  # beyond this number of standard deviations a Gaussian holds less than 1e-27
_TINY = float(np.finfo(np.float64).tiny)  # replaces a delta of 0 before its logarithm is taken


def gaussian_delta(epsilon: FloatArray, shift: FloatArray | float) -> FloatArray:
    """Hockey-stick divergence of N(shift, 1) from N(0, 1) at any real epsilon, to about 1e-13.

    Args:
        epsilon: any shape.
        shift: at least 0; broadcast against epsilon.

    Returns:
        delta, in the broadcast shape; its error is relative.
    """
    epsilon, shift = np.broadcast_arrays(
        np.asarray(epsilon, np.float64), np.asarray(shift, np.float64)
    )
    # For this symmetric pair delta(-x) = 1 - exp(-x) + exp(-x) delta(x)
    covered = -np.expm1(np.minimum(epsilon, 0.0))
    size = np.abs(epsilon)
    safe = np.where(shift > 0, shift, 1.0)
    centre = size / safe
    near, far = centre - safe / 2, centre + safe / 2
    # The difference is used only where it does not cancel
    direct = ndtr(-near) - np.exp(np.minimum(size, 700.0)) * ndtr(-far)
    density = np.exp(-np.square(near) / 2) / np.sqrt(2 * np.pi)
    inside, above = np.clip(near, -1.0, 1e8), np.clip(far, -1.0, 1e8)
    by_mills = density * (_mills(inside) - _mills(above))
    integral = np.zeros_like(density)
    for node, weight in zip(_GAUSS_NODES, _GAUSS_WEIGHTS, strict=True):
        point = inside + safe / 2 * (1 + node)
        integral += weight * (1 - point * _mills(point))  # minus the derivative of the Mills ratio
    by_integral = density * safe / 2 * np.maximum(integral, 0.0)
    delta = np.where(near < -1.0, direct, np.where(safe < 0.5, by_integral, by_mills))
    delta = np.where(shift > 0, covered + np.exp(np.minimum(epsilon, 0.0)) * delta, covered)
    return np.clip(delta, 0.0, 1.0)


def _mills(x: FloatArray) -> FloatArray:
    ratio: FloatArray = np.sqrt(np.pi / 2) * erfcx(x / np.sqrt(2.0))
    return ratio


def one_step_delta(
    epsilon: FloatArray,
    shift: FloatArray | float,
    sample_rate: FloatArray | float,
    direction: Direction,
) -> FloatArray:
    """delta(epsilon) of one Poisson-sampled step in closed form, at any real epsilon.

    Arguments broadcast. In the add direction delta is exactly 0 where epsilon is above all losses.
    """
    epsilon = np.asarray(epsilon, np.float64)
    rate = np.asarray(sample_rate, np.float64)
    inner, possible = _amplified(epsilon if direction == "remove" else -epsilon, rate)
    if direction == "remove":
        covered = -np.expm1(np.minimum(epsilon, 0.0))  # where every loss lies above epsilon
        return np.where(possible, rate * gaussian_delta(inner, shift), covered)
    factor = -np.expm1(np.minimum(epsilon + np.log1p(-np.minimum(rate, 1 - 1e-16)), 0.0))
    factor = np.where(rate >= 1.0, 1.0, factor)
    return np.where(possible, factor * gaussian_delta(-inner, shift), 0.0)


def _amplified(epsilon: FloatArray, rate: FloatArray) -> tuple[FloatArray, NDArray[np.bool_]]:
    """log((exp(epsilon) - 1 + q) / q), and where it exists."""
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
    """delta(epsilon) of two steps: the second step's closed form averaged over the first's loss.

    The integrand is smooth except at one point, where epsilon minus the first loss meets the end
    of the second step's losses; the double-exponential rule converges exponentially on both sides.

    Args:
        epsilon: (n,).
        shifts: (n, 2) of the two steps.
        sample_rates: (n, 2); a sample rate of 1 is a Gaussian.
        direction: "remove" or "add".
        per_unit: nodes per unit of the double-exponential variable.

    Returns:
        (n,) delta.
    """
    sign = 1.0 if direction == "remove" else -1.0
    shift, rate = shifts[:, :1], sample_rates[:, :1]
    second = np.log1p(-np.minimum(sample_rates[:, 1:], 1 - 1e-16))
    # log f of the first step at which the losses of the second one end
    inner, possible = _amplified(sign * epsilon[:, None] - second, rate)
    low, high = np.full_like(shift, -_TAIL), shift + _TAIL
    break_point = np.where(possible & (sample_rates[:, 1:] < 1.0), inner / shift + shift / 2, low)
    break_point = np.clip(break_point, low, high)
    total = np.zeros(len(epsilon))
    for a, b in ((low, break_point), (break_point, high)):
        z, weight = _tanh_sinh(a, b, per_unit)
        density = np.exp(-np.square(z) / 2) / np.sqrt(2 * np.pi)
        if direction == "remove":
            sampled = np.exp(-np.square(z - shift) / 2) / np.sqrt(2 * np.pi)
            density = (1 - rate) * density + rate * sampled
        rest = epsilon[:, None] - sign * log_density_ratio(z, shift, rate)
        curve = one_step_delta(rest, shifts[:, 1:], sample_rates[:, 1:], direction)
        total += np.sum(weight * density * curve, axis=1)
    return total


def _tanh_sinh(low: FloatArray, high: FloatArray, per_unit: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights (n, n_nodes) of the double-exponential rule from low to high, (n, 1).

    At 3, where the variable ends, weights are below 1e-12 of the middle one. scipy's `tanhsinh`
    chooses its nodes for each row and takes 30 times as long.
    """
    t = np.arange(-3 * per_unit, 3 * per_unit + 1)[None, :] / per_unit
    bent = np.pi / 2 * np.sinh(t)
    nodes = (low + high) / 2 + (high - low) / 2 * np.tanh(bent)
    weights = (high - low) / 2 * np.pi / 2 * np.cosh(t) / np.square(np.cosh(bent)) / per_unit
    return nodes, weights


def has_exact_form(losses: LossSum) -> NDArray[np.bool_]:
    """(n_examples,) whether a run is a Gaussian, one sampled step, or two parts of these kinds."""
    return np.less_equal(losses.steps + (losses.gaussian > 0), 2)


def is_closed_form(losses: LossSum) -> NDArray[np.bool_]:
    """(n_examples,) whether no quadrature is needed: a Gaussian run or one sampled step."""
    return np.equal(losses.steps, 0) | (np.equal(losses.steps, 1) & np.equal(losses.gaussian, 0))


def relative_error(losses: LossSum) -> FloatArray:
    """(n_examples,) bound of the relative error of `exact_delta`."""
    return np.where(is_closed_form(losses), CLOSED_FORM_ERROR, QUADRATURE_ERROR)


def exact_delta(
    losses: LossSum, epsilon: FloatArray, direction: Direction, *, per_unit: int = PER_UNIT
) -> FloatArray:
    """(n_examples,) delta at one epsilon each, of runs for which `has_exact_form` holds."""
    shifts, rates = _two_parts(losses)
    sampled = losses.steps
    delta = gaussian_delta(epsilon, np.sqrt(losses.gaussian))
    one = np.flatnonzero((sampled == 1) & (losses.gaussian == 0))
    if len(one):
        delta[one] = one_step_delta(epsilon[one], shifts[one, 0], rates[one, 0], direction)
    two = np.flatnonzero((sampled == 2) | ((sampled == 1) & (losses.gaussian > 0)))
    if len(two):
        parts = epsilon[two], shifts[two], rates[two]
        delta[two] = two_step_delta(*parts, direction, per_unit=per_unit)
    return delta


def _two_parts(losses: LossSum) -> tuple[FloatArray, FloatArray]:
    """Shifts and rates (n_examples, 2) of up to two parts, the wider loss second.

    The integrand is smoothest over the narrower loss. A single part stands first.
    """
    n = len(losses)
    shifts, rates = np.ones((n, 2)), np.full((n, 2), 0.5)
    if len(losses.shift):
        first = (losses.counts > 0).argmax(axis=1)
        last = len(losses.shift) - 1 - (losses.counts[:, ::-1] > 0).argmax(axis=1)
        shifts = losses.shift[np.stack([first, last], axis=1)]
        rates = losses.sample_rate[np.stack([first, last], axis=1)]
    unsampled = losses.gaussian > 0
    shifts[unsampled, 1], rates[unsampled, 1] = np.sqrt(losses.gaussian[unsampled]), 1.0
    width = log_density_ratio(shifts + 8.0, shifts, rates)
    order = np.argsort(width, axis=1, kind="stable")
    order[losses.steps + unsampled < 2] = (0, 1)
    return np.take_along_axis(shifts, order, axis=1), np.take_along_axis(rates, order, axis=1)


def invert_delta(
    delta_of: Callable[[FloatArray, NDArray[np.intp]], FloatArray],
    target: FloatArray,
    *,
    low: float = 0.0,
    high: float | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Find where a falling delta(epsilon) crosses its target, for many examples at once.

    Args:
        delta_of: maps (k,) epsilons, and the (k,) positions of their examples, to (k,) deltas.
        target: (n,) deltas.
        low: the smallest epsilon; where delta is at most the target there, both ends are `low`.
        high: the largest epsilon; where delta is above the target there, both ends are `high`.
            By default 1, doubled until delta is at most the target.

    Returns:
        lower, upper: (n,), within 1e-13 relative, with delta_of(lower) > target >= delta_of(upper).
    """
    examples = np.arange(len(target))
    end = np.full_like(target, 1.0 if high is None else high)
    while high is None and np.any(above := delta_of(end, examples) > target):
        end = np.where(above, 2 * end, end)

    def excess(epsilon: FloatArray, /, *example: Any, **_: Any) -> FloatArray:
        ratio: FloatArray = np.maximum(delta_of(epsilon, *example), _TINY) / target[example]
        return np.where(ratio > 1, np.log(ratio), np.minimum(np.log(ratio), -_TINY))

    found = find_root(
        excess,
        (np.full_like(target, low), end),
        args=(examples,),
        tolerances={"xatol": 0.0, "xrtol": 1e-13, "fatol": 0.0, "frtol": 0.0},
    )
    (lower, upper), (at_lower, at_upper) = found.bracket, found.f_bracket
    return np.where(at_upper > 0, upper, lower), np.where(at_lower <= 0, lower, upper)
