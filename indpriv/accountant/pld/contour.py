"""Contours: the inversion integral of some examples as a finite sum with bounded errors.

laplace.py states the formula and the errors. Sensitive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import transform
from indpriv.accountant.pld.decay import log_decay
from indpriv.accountant.pld.loss_sum import UNIT_ROUNDOFF, ComplexArray, LossSum
from indpriv.accountant.pld.quadrature import QUADRATURE_ERROR
from indpriv.accountant.pld.real_axis import Problem, Scan, log_largest_weight

_LOG_TOLERANCE = float(np.log(1e-10))  # of aliasing and of truncation, relative to delta
_ROOT_STEPS = 80  # at most; Newton takes about five


def alias_free_period(scan: Scan, column: int, problem: Problem) -> FloatArray:
    """(n,) period at which aliasing is below tolerance on both sides at the Chernoff epsilon."""
    tilt, higher = scan.tilts[column], scan.tilts[column + 1 :]
    goal = problem.log_delta + _LOG_TOLERANCE
    with np.errstate(invalid="ignore"):
        chernoff = scan.transform[:, column + 1 :] - np.outer(scan.epsilon, higher)
        chernoff += log_largest_weight(higher)
    right = ((chernoff - goal[:, None]) / (higher - tilt)).min(axis=1, initial=np.inf)
    right = np.where(np.isfinite(right), right, 0.0)
    # A quarter more, because delta is needed somewhat below the Chernoff epsilon
    return np.asarray(1.25 * np.maximum(-goal / tilt, right))


@dataclass(frozen=True)
class Reach:
    """How far along a contour each example must go.

    Attributes:
        frequencies: (n_frequencies,) rising.
        tail: (n, n_frequencies) bound of 1 / pi times the integral of |E| / |w|^2 beyond each
            frequency.
        frequency: (n,) the first one beyond which the contour adds less than the tolerance; inf
            where there is none.
    """

    frequencies: FloatArray
    tail: FloatArray
    frequency: FloatArray

    @classmethod
    def of(
        cls, problem: Problem, scan: Scan, column: int, period: FloatArray, max_nodes: int
    ) -> Reach:
        """Bound the contours of examples that share a tilt and are alias-free at these periods."""
        tilt, losses = float(scan.tilts[column]), problem.losses
        highest = 2 * np.pi * max_nodes / period.min()
        # Whole laws are tried first, where the loss is nearly Gaussian and few frequencies suffice
        beyond, ratio = (1e2, 1.35) if problem.cut == 0 else (1e4, 1.2)
        lowest = 0.5 / period.max()
        n_frequencies = int(np.ceil(np.log(highest * beyond / lowest) / np.log(ratio)))
        frequencies = np.geomspace(lowest, highest * beyond, n_frequencies)
        log_size = -np.outer(losses.gaussian / 2, frequencies**2)
        laws = problem.laws(scan.step_cut)
        if len(laws):
            log_size += losses.counts @ log_decay(laws, tilt, problem.direction, frequencies)
        tail = _integrated(log_size, tilt, frequencies)
        scale = scan.transform[:, column] - tilt * scan.epsilon + 1.0
        enough = np.log(tail) + scale[:, None] <= (problem.log_delta + _LOG_TOLERANCE)[:, None]
        first = frequencies[enough.argmax(axis=1)]
        possible = enough.any(axis=1) & (first <= highest)
        return cls(frequencies, tail, np.where(possible, first, np.inf))

    def shared(self, group: NDArray[np.intp]) -> tuple[float, FloatArray]:
        """The frequency that is enough for a whole group, and each example's tail beyond it."""
        frequency = float(self.frequency[group].max())
        return frequency, self.tail[group, int(np.searchsorted(self.frequencies, frequency))]


def _integrated(log_size: FloatArray, tilt: float, frequencies: FloatArray) -> FloatArray:
    """1 / pi times the integral of exp(log_size) / (tilt^2 + omega^2) beyond each frequency.

    Shape (n, n_frequencies).
    """
    widths = np.diff(np.append(np.arctan(frequencies / tilt), np.pi / 2))
    # Far out the difference of arc tangents cancels, and 1 / omega^2 is a close upper bound
    far = frequencies > 1e3 * tilt
    widths[far] = tilt * (1 / frequencies[far] - np.append(1 / frequencies[1:], 0.0)[far])
    terms = np.exp(np.maximum(log_size, -700.0)) * widths / (np.pi * tilt)
    return np.cumsum(terms[:, ::-1], axis=1)[:, ::-1] + 1e-300


@dataclass(frozen=True)
class Axis:
    """What a group of examples shares.

    Attributes:
        tilt, period: of the contour.
        frequencies: (n_nodes,) from 0, spaced 2 pi / period.
        fine: the number of fine frequencies; each frequency is a coarse one plus a fine one.
        weights: (n_nodes,) of the trapezoid rule over w (w + 1).
        table: the transforms of the one-step laws, None where no step is sampled.
        higher: (n_higher,) larger tilts, whose Chernoff bounds limit aliasing.
    """

    tilt: float
    period: float
    frequencies: FloatArray
    fine: int
    weights: ComplexArray
    table: transform.ContourTable | None
    higher: FloatArray

    @classmethod
    def of(cls, problem: Problem, scan: Scan, column: int, period: float, frequency: float) -> Axis:
        """The axis through a tilt, up to a frequency, for the laws of a problem."""
        tilt, spacing = float(scan.tilts[column]), 2 * np.pi / period
        frequencies: FloatArray = spacing * np.arange(float(np.ceil(frequency / spacing)) + 1)
        laws, table = problem.laws(scan.step_cut), None
        if len(laws):
            table = transform.contour_table(laws, tilt, problem.direction, frequencies)
        w = tilt + 1j * frequencies
        weights = np.asarray(spacing / np.pi / (w * (w + 1)), np.complex128)
        weights[0] /= 2
        fine = int(np.ceil(np.sqrt(len(frequencies))))
        return cls(tilt, period, frequencies, fine, weights, table, scan.tilts[column + 1 :])


@dataclass(frozen=True)
class Contour:
    """Some examples on one axis.

    Attributes:
        axis: shared.
        scale: (n,) K(tilt).
        values: (n, n_coarse, n_fine) exp(K(w) - K(tilt) - i omega guess) / (w (w + 1)) times the
            trapezoid weight; 0 beyond the last frequency.
        size: (n,) sum of the moduli of the values.
        guess: (n,) epsilon around which phases are kept.
        noise: (n,) bound of truncation, rounding and quadrature, relative to
            exp(K(tilt) - tilt epsilon).
        higher_transform: (n, n_higher) K at the higher tilts.
    """

    axis: Axis
    scale: FloatArray
    values: ComplexArray
    size: FloatArray
    guess: FloatArray
    noise: FloatArray
    higher_transform: FloatArray

    @classmethod
    def of(cls, axis: Axis, losses: LossSum, scan: Scan, column: int, tail: FloatArray) -> Contour:
        """The contour of examples whose laws are those of the axis; tail: their truncation."""
        tilt, frequencies, table = axis.tilt, axis.frequencies, axis.table
        n_frequencies = len(frequencies)
        scale, guess = scan.transform[:, column], scan.epsilon
        decay = np.outer(losses.gaussian / 2, -(frequencies**2))
        turn = np.outer(losses.gaussian * (tilt + 0.5) - guess, frequencies)
        one_step = np.zeros((1, n_frequencies), np.complex128)
        if table is not None:
            one_step = table.logarithm
            decay += losses.counts @ one_step.real
            turn += losses.counts @ one_step.imag
        modulus = np.exp(decay) * np.abs(axis.weights)
        turn += np.angle(axis.weights)
        n_padded = -(-n_frequencies // axis.fine) * axis.fine
        values = np.zeros((len(losses), n_padded), np.complex128)
        np.multiply(modulus, np.cos(turn), out=values.real[:, :n_frequencies])
        np.multiply(modulus, np.sin(turn), out=values.imag[:, :n_frequencies])
        size = modulus.sum(axis=1)
        # What rounding does to an exponent: to sums over laws, of moduli and of angles
        relative = (np.abs(scale) + tilt * np.abs(guess) + 8) * size
        relative -= np.einsum("nk,nk->n", modulus, decay)
        relative += losses.steps * (modulus @ np.abs(one_step.imag).max(axis=0))
        angle = losses.gaussian * (tilt + 0.5) + np.abs(guess)
        relative += angle * (modulus @ frequencies)
        noise = tail + (len(one_step) + 16) * UNIT_ROUNDOFF * relative
        if table is not None:
            smallest = np.maximum(np.exp(one_step.real.min(axis=0)), 1e-290)
            amplified = modulus @ ((1 + tilt + frequencies) / smallest)
            noise += (losses.counts @ table.error) * amplified
            noise += QUADRATURE_ERROR * losses.steps * (modulus @ (1 / smallest))
        blocks = values.reshape(len(losses), -1, axis.fine)
        return cls(axis, scale, blocks, size, guess, noise, scan.transform[:, column + 1 :])

    def select(self, examples: NDArray[np.intp]) -> Contour:
        """The contour of some examples."""
        return replace(
            self,
            scale=self.scale[examples],
            values=self.values[examples],
            size=self.size[examples],
            guess=self.guess[examples],
            noise=self.noise[examples],
            higher_transform=self.higher_transform[examples],
        )

    def delta(self, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The sum at (n,) epsilons and its derivative, relative to exp(K(tilt) - tilt epsilon)."""
        _, n_coarse, n_fine = self.values.shape
        spacing = 2 * np.pi / self.axis.period
        angle = spacing * (epsilon - self.guess)
        coarse, fine = n_fine * np.arange(n_coarse), np.arange(n_fine)
        near, far = np.exp(-1j * np.outer(angle, fine)), np.exp(-1j * np.outer(angle, coarse))
        sums = self.values @ np.stack([near, near * fine], axis=2)
        total = np.einsum("nk,nk->n", far, sums[:, :, 0])
        weighted = np.einsum("nk,nk->n", far * coarse, sums[:, :, 0])
        weighted += np.einsum("nk,nk->n", far, sums[:, :, 1])
        return total.real, spacing * weighted.imag - self.axis.tilt * total.real

    def log_bounds(self, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Proven log delta from below (-inf where nothing is proven) and above."""
        value, _ = self.delta(epsilon)
        tilt, period, higher = self.axis.tilt, self.axis.period, self.axis.higher
        log_unit = self.scale - tilt * epsilon
        terms = sum(self.values.shape[1:]) + 16  # that are added one after the other
        turned = 16 * np.abs(epsilon - self.guess) * self.axis.frequencies[-1] + 4 * terms
        noise = self.noise + turned * UNIT_ROUNDOFF * self.size
        upper = log_unit + np.log(np.maximum(value + noise, 1e-300))
        left = -tilt * period - np.log1p(-np.exp(-tilt * period))
        gap = higher - tilt
        with np.errstate(invalid="ignore"):
            right = self.higher_transform - np.outer(epsilon, higher) + log_largest_weight(higher)
            right = right - gap * period - np.log(-np.expm1(-gap * period))
        farthest = right.min(axis=1, initial=np.inf)
        aliased = np.exp(np.minimum(left - log_unit, 50.0))
        aliased += np.exp(np.minimum(farthest - log_unit, 50.0))
        least = value - noise - aliased
        lower = np.where(least > 0, log_unit + np.log(np.maximum(least, 1e-300)), -np.inf)
        return lower, upper

    def solve(
        self, lower_goal: FloatArray, upper_goal: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Proven lower and upper epsilon; 0 and inf where nothing is proven."""
        nothing = self.log_bounds(np.zeros_like(self.guess))[1] <= upper_goal
        epsilon = self._root((lower_goal + upper_goal) / 2, nothing)
        value, slope = self.delta(epsilon)
        low_delta, high_delta = self.log_bounds(epsilon)
        with np.errstate(invalid="ignore", divide="ignore"):
            fall = np.where(value > 0, -slope / value, self.axis.tilt)  # of log delta
            spread = np.where(np.isfinite(low_delta), high_delta - low_delta, 1.0)
        spread += lower_goal - upper_goal
        fall = np.where(np.isfinite(fall) & (fall > 0), fall, self.axis.tilt)
        reach = 2 * spread / fall + 4e-16 * np.abs(epsilon) + 1e-300
        lower = self._proven_end(epsilon, -reach, lower_goal, 0.0)
        upper = self._proven_end(epsilon, reach, upper_goal, np.inf)
        return lower, np.where(nothing, 0.0, upper)

    def _proven_end(
        self, epsilon: FloatArray, reach: FloatArray, goal: FloatArray, unproven: float
    ) -> FloatArray:
        """The first of four points, ever further from epsilon, whose bound meets the goal."""
        found, open_ = np.full_like(epsilon, unproven), np.arange(len(epsilon))
        for widening in (1.0, 8.0, 64.0, 512.0):
            part = self if len(open_) == len(epsilon) else self.select(open_)
            candidate = np.maximum(epsilon[open_] + widening * reach[open_], 0.0)
            low, high = part.log_bounds(candidate)
            at_lower = (candidate > 0) & (low >= goal[open_])
            proven = np.where(reach[open_] < 0, at_lower, high <= goal[open_])
            found[open_[proven]] = candidate[proven]
            open_ = open_[~proven]
            if not len(open_):
                break
        return found

    def _root(self, log_delta: FloatArray, nothing: NDArray[np.bool_]) -> FloatArray:
        """Epsilon at which the sum meets a delta.

        Newton's method from the Chernoff bound, halving where a step leaves the bracket.
        """
        low, high = np.zeros_like(self.guess), np.where(nothing, 0.0, np.maximum(self.guess, 0.0))
        epsilon = high
        for _ in range(_ROOT_STEPS):
            value, slope = self.delta(epsilon)
            sound = (value > self.noise) & (slope < 0)
            with np.errstate(invalid="ignore", divide="ignore"):
                residual = self.scale - self.axis.tilt * epsilon + np.log(value) - log_delta
                step = residual * value / -slope
            above = sound & (residual > 0)
            low, high = np.where(above, epsilon, low), np.where(above, high, epsilon)
            following = np.where(sound, epsilon + step, -1.0)
            settled = sound & (np.abs(step) <= 1e-13 * epsilon)
            inside = (following > low) & (following < high)
            following = np.where(inside, following, (low + high) / 2)
            epsilon = np.where(settled, epsilon, following)
            if np.all(settled | nothing | (high - low <= 1e-13 * high)):
                break
        return epsilon
