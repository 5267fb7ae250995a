"""Contours: the inversion integral of some examples as a finite sum, with a bound for each of its errors. Sensitive.

See laplace.py for the formula and the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv.accountant import transform
from indpriv.accountant.decay import log_decay
from indpriv.accountant.loss_sum import FloatArray, LossSum
from indpriv.accountant.real_axis import Problem, Scan, log_largest_weight

LOG_TOLERANCE = float(np.log(1e-10))  # aliasing and truncation each, relative to delta

_ROOT_STEPS = 80  # at most; Newton takes about five


def alias_free_period(scan: Scan, column: int, problem: Problem) -> FloatArray:
    """(n,) period at which aliasing is below tolerance on both sides at the Chernoff epsilon."""
    tilt = scan.tilts[column]
    goal = problem.log_delta + LOG_TOLERANCE
    higher = scan.tilts[column + 1 :]
    with np.errstate(invalid="ignore"):
        chernoff = scan.transform[:, column + 1 :] - np.outer(scan.epsilon, higher) + log_largest_weight(higher)
    right = ((chernoff - goal[:, None]) / (higher - tilt)).min(axis=1, initial=np.inf)
    # a quarter more, because delta is needed somewhat below the Chernoff epsilon
    result: FloatArray = 1.25 * np.maximum(-goal / tilt, np.where(np.isfinite(right), right, 0.0))
    return result


@dataclass(frozen=True)
class Reach:
    """How far along a contour each example must go.

    Attributes:
        frequencies: (n_frequencies,) rising.
        tail: (n, n_frequencies) bound of 1 / pi times the integral of |E| / |w|^2 beyond each frequency.
        frequency: (n,) the first one beyond which the contour adds less than the tolerance; inf where there is none.
    """

    frequencies: FloatArray
    tail: FloatArray
    frequency: FloatArray

    @classmethod
    def of(cls, problem: Problem, scan: Scan, column: int, period: FloatArray, max_nodes: int) -> Reach:
        """Bound the contours of examples that share a tilt and are alias-free at these periods."""
        tilt = float(scan.tilts[column])
        highest = 2 * np.pi * max_nodes / period.min()
        # an uncut law is tried first, where the loss is nearly Gaussian and few frequencies tell all
        beyond, ratio = (1e2, 1.35) if problem.cut == 0 else (1e4, 1.2)
        lowest = 0.5 / period.max()
        n_frequencies = int(np.ceil(np.log(highest * beyond / lowest) / np.log(ratio)))
        frequencies = np.geomspace(lowest, highest * beyond, n_frequencies)
        losses = problem.losses
        log_size = -np.outer(losses.gaussian / 2, frequencies**2)
        kinds = problem.kinds(scan.step_cut)
        if len(kinds):
            log_size += losses.counts @ log_decay(kinds, tilt, problem.direction, frequencies)
        tail = _integrated(log_size, tilt, frequencies)
        scale = scan.transform[:, column] - tilt * scan.epsilon + 1.0
        enough = np.log(tail) + scale[:, None] <= (problem.log_delta + LOG_TOLERANCE)[:, None]
        first = frequencies[enough.argmax(axis=1)]
        return cls(frequencies, tail, np.where(enough.any(axis=1) & (first <= highest), first, np.inf))

    def shared(self, group: NDArray[np.intp]) -> tuple[float, FloatArray]:
        """The frequency that is enough for a whole group, and the tail of each of its examples beyond it."""
        frequency = float(self.frequency[group].max())
        return frequency, self.tail[group, int(np.searchsorted(self.frequencies, frequency))]


def _integrated(log_size: FloatArray, tilt: float, frequencies: FloatArray) -> FloatArray:
    """(n, n_frequencies) 1 / pi times the integral of exp(log_size) / (tilt^2 + omega^2) beyond each frequency."""
    pieces = np.diff(np.append(np.arctan(frequencies / tilt), np.pi / 2))
    far = frequencies > 1e3 * tilt  # there the difference of arc tangents cancels, and 1 / omega^2 is above and close
    pieces[far] = tilt * (1 / frequencies[far] - np.append(1 / frequencies[1:], 0.0)[far])
    terms = np.exp(np.maximum(log_size, -700.0)) * pieces / (np.pi * tilt)
    result: FloatArray = np.cumsum(terms[:, ::-1], axis=1)[:, ::-1] + 1e-300
    return result


@dataclass(frozen=True)
class Axis:
    """What a group of examples shares.

    Attributes:
        tilt, period: of the contour.
        frequencies: (n_nodes,) from 0, spaced 2 pi / period.
        weights: (n_nodes,) of the trapezoid rule over w (w + 1).
        table: one step's transform, None where no step is sampled.
        higher: (n_higher,) tilts above, whose Chernoff bounds limit aliasing.
    """

    tilt: float
    period: float
    frequencies: FloatArray
    weights: transform.ComplexArray
    table: transform.ContourTable | None
    higher: FloatArray

    @classmethod
    def of(cls, problem: Problem, scan: Scan, column: int, period: float, frequency: float) -> Axis:
        """The axis through a tilt, as far as a frequency, for the kinds of a problem."""
        tilt = float(scan.tilts[column])
        spacing = 2 * np.pi / period
        frequencies: FloatArray = spacing * np.arange(float(np.ceil(frequency / spacing)) + 1)
        kinds = problem.kinds(scan.step_cut)
        table = transform.contour_table(kinds, tilt, problem.direction, frequencies) if len(kinds) else None
        w = tilt + 1j * frequencies
        weights = np.asarray(spacing / np.pi / (w * (w + 1)), np.complex128)
        weights[0] /= 2
        return cls(tilt, period, frequencies, weights, table, scan.tilts[column + 1 :])


@dataclass(frozen=True)
class Contour:
    """Some examples on one axis.

    Attributes:
        axis: shared.
        scale: (n,) K(tilt).
        values: (n, n_nodes) exp(K(w) - K(tilt) - i omega guess) / (w (w + 1)) times the trapezoid weight.
        guess: (n,) epsilon around which phases are kept.
        tail: (n,) truncation bound, relative to exp(K(tilt) - tilt epsilon).
        rounding: (n,) rounding and quadrature bound, relative likewise.
        higher_transform: (n, n_higher) K at the higher tilts.
    """

    axis: Axis
    scale: FloatArray
    values: transform.ComplexArray
    guess: FloatArray
    tail: FloatArray
    rounding: FloatArray
    higher_transform: FloatArray

    @classmethod
    def of(cls, axis: Axis, losses: LossSum, scan: Scan, column: int, tail: FloatArray) -> Contour:
        """The contour of examples whose kinds are those of the axis."""
        tilt, frequencies = axis.tilt, axis.frequencies
        scale, guess = scan.transform[:, column], scan.epsilon
        growth = np.asarray((2 * tilt + 1) * 1j * frequencies - frequencies**2, np.complex128)
        exponent = np.asarray(losses.gaussian[:, None] / 2 * growth, np.complex128)
        error = np.zeros((len(losses), len(frequencies)))
        if axis.table is not None:
            exponent += losses.counts @ axis.table.logarithm
            smallest = np.maximum(np.exp(axis.table.logarithm.real).min(axis=0), 1e-290)
            per_step = np.outer(losses.counts @ axis.table.error, 1 + tilt + frequencies)
            error += (per_step + axis.table.constant * losses.steps[:, None]) / smallest
        values = np.asarray(np.exp(exponent - 1j * np.outer(guess, frequencies)) * axis.weights, np.complex128)
        size = (np.abs(scale) + tilt * np.abs(guess) + 8)[:, None] + np.abs(exponent)
        error += 16 * transform.UNIT_ROUNDOFF * (size + np.outer(np.abs(guess), frequencies))
        return cls(
            axis=axis,
            scale=scale,
            values=values,
            guess=guess,
            tail=tail,
            rounding=np.sum(np.abs(values) * error, axis=1),
            higher_transform=scan.transform[:, column + 1 :],
        )

    def delta(self, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The sum at (n,) epsilons and its derivative, both relative to exp(K(tilt) - tilt epsilon)."""
        turned = self.values * np.exp(-1j * np.outer(epsilon - self.guess, self.axis.frequencies))
        w = self.axis.tilt + 1j * self.axis.frequencies
        slope: FloatArray = -(turned @ w).real
        return turned.sum(axis=1).real, slope

    def log_bounds(self, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Proven log delta from below (-inf where nothing is proven) and above."""
        value, _ = self.delta(epsilon)
        log_unit = self.scale - self.axis.tilt * epsilon
        turned = 16 * transform.UNIT_ROUNDOFF * np.abs(epsilon - self.guess) * self.axis.frequencies[-1]
        noise = self.rounding + self.tail + turned * np.abs(self.values).sum(axis=1)
        upper = log_unit + np.log(np.maximum(value + noise, 1e-300))
        left = -self.axis.tilt * self.axis.period - np.log1p(-np.exp(-self.axis.tilt * self.axis.period))
        gap = self.axis.higher - self.axis.tilt
        with np.errstate(invalid="ignore"):
            right = self.higher_transform - np.outer(epsilon, self.axis.higher) + log_largest_weight(self.axis.higher)
        right = (right - gap * self.axis.period - np.log(-np.expm1(-gap * self.axis.period))).min(
            axis=1, initial=np.inf
        )
        aliased = np.exp(np.minimum(left - log_unit, 50.0)) + np.exp(np.minimum(right - log_unit, 50.0))
        least = value - noise - aliased
        lower = np.where(least > 0, log_unit + np.log(np.maximum(least, 1e-300)), -np.inf)
        return lower, upper

    def solve(self, lower_goal: FloatArray, upper_goal: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Proven lower and upper epsilon; 0 and inf where nothing is proven."""
        zero = np.zeros_like(self.guess)
        nothing = self.log_bounds(zero)[1] <= upper_goal
        epsilon = self._root((lower_goal + upper_goal) / 2, nothing)
        value, slope = self.delta(epsilon)
        low_delta, high_delta = self.log_bounds(epsilon)
        with np.errstate(invalid="ignore", divide="ignore"):
            fall = np.where(value > 0, -slope / value, self.axis.tilt)  # of log delta, per unit of epsilon
            spread = np.where(np.isfinite(low_delta), high_delta - low_delta, 1.0) + (lower_goal - upper_goal)
        fall = np.where(np.isfinite(fall) & (fall > 0), fall, self.axis.tilt)
        reach = 2 * spread / fall + 4e-16 * np.abs(epsilon) + 1e-300
        lower, upper = zero, np.where(nothing, 0.0, np.inf)
        for _ in range(4):
            candidate = np.maximum(epsilon - reach, 0.0)
            proven = (candidate > 0) & (self.log_bounds(candidate)[0] >= lower_goal)
            lower = np.maximum(lower, np.where(proven, candidate, 0.0))
            candidate = np.maximum(epsilon + reach, 0.0)
            proven = self.log_bounds(candidate)[1] <= upper_goal
            upper = np.minimum(upper, np.where(proven, candidate, np.inf))
            reach *= 8
        return lower, upper

    def _root(self, log_delta: FloatArray, nothing: NDArray[np.bool_]) -> FloatArray:
        """Epsilon at which the sum meets a delta: Newton from the Chernoff bound, halving where it leaves the bracket."""
        low, high = np.zeros_like(self.guess), np.where(nothing, 0.0, np.maximum(self.guess, 0.0))
        epsilon = high
        for _ in range(_ROOT_STEPS):
            value, slope = self.delta(epsilon)
            sound = (value > self.rounding + self.tail) & (slope < 0)
            with np.errstate(invalid="ignore", divide="ignore"):
                residual = self.scale - self.axis.tilt * epsilon + np.log(value) - log_delta
                step = residual * value / -slope
            above = sound & (residual > 0)
            low, high = np.where(above, epsilon, low), np.where(above, high, epsilon)
            following = np.where(sound, epsilon + step, -1.0)
            settled = sound & (np.abs(step) <= 1e-13 * epsilon)
            inside = (following > low) & (following < high)
            following = np.where(settled, epsilon, np.where(inside, following, (low + high) / 2))
            epsilon = following
            if np.all(settled | nothing | (high - low <= 1e-13 * high)):
                break
        return epsilon
