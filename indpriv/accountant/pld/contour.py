"""Contours: the inversion integral of some examples as a finite sum, with a bound for each of its errors. Sensitive.

See laplace.py for the formula and the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import transform
from indpriv.accountant.pld.decay import log_decay
from indpriv.accountant.pld.loss_sum import LossSum
from indpriv.accountant.pld.real_axis import Problem, Scan, log_largest_weight

LOG_TOLERANCE = float(np.log(1e-10))  # aliasing and truncation each, relative to delta

_ROOT_STEPS = 80  # at most; Newton takes about five


def alias_free_period(scan: Scan, column: int, problem: Problem) -> FloatArray:
    """(n,) period at which aliasing is below tolerance on both sides at the Chernoff epsilon."""
    tilt = scan.tilts[column]
    goal = problem.log_delta + LOG_TOLERANCE
    higher = scan.tilts[column + 1 :]
    with np.errstate(invalid="ignore"):
        chernoff = (
            scan.transform[:, column + 1 :]
            - np.outer(scan.epsilon, higher)
            + log_largest_weight(higher)
        )
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
    def of(
        cls, problem: Problem, scan: Scan, column: int, period: FloatArray, max_nodes: int
    ) -> Reach:
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
        return cls(
            frequencies, tail, np.where(enough.any(axis=1) & (first <= highest), first, np.inf)
        )

    def shared(self, group: NDArray[np.intp]) -> tuple[float, FloatArray]:
        """The frequency that is enough for a whole group, and the tail of each of its examples beyond it."""
        frequency = float(self.frequency[group].max())
        return frequency, self.tail[group, int(np.searchsorted(self.frequencies, frequency))]


def _integrated(log_size: FloatArray, tilt: float, frequencies: FloatArray) -> FloatArray:
    """(n, n_frequencies) 1 / pi times the integral of exp(log_size) / (tilt^2 + omega^2) beyond each frequency."""
    pieces = np.diff(np.append(np.arctan(frequencies / tilt), np.pi / 2))
    far = (
        frequencies > 1e3 * tilt
    )  # there the difference of arc tangents cancels, and 1 / omega^2 is above and close
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
        fine: every frequency is the sum of a coarse and one of so many fine ones.
        weights: (n_nodes,) of the trapezoid rule over w (w + 1).
        table: one step's transform, None where no step is sampled.
        higher: (n_higher,) tilts above, whose Chernoff bounds limit aliasing.
    """

    tilt: float
    period: float
    frequencies: FloatArray
    fine: int
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
        table = (
            transform.contour_table(kinds, tilt, problem.direction, frequencies)
            if len(kinds)
            else None
        )
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
        values: (n, n_coarse, n_fine) exp(K(w) - K(tilt) - i omega guess) / (w (w + 1)) times the trapezoid weight; 0
            beyond the last frequency.
        size: (n,) sum of the moduli of the values.
        guess: (n,) epsilon around which phases are kept.
        tail: (n,) truncation bound, relative to exp(K(tilt) - tilt epsilon).
        rounding: (n,) rounding and quadrature bound, relative likewise.
        higher_transform: (n, n_higher) K at the higher tilts.
    """

    axis: Axis
    scale: FloatArray
    values: transform.ComplexArray
    size: FloatArray
    guess: FloatArray
    tail: FloatArray
    rounding: FloatArray
    higher_transform: FloatArray

    @classmethod
    def of(cls, axis: Axis, losses: LossSum, scan: Scan, column: int, tail: FloatArray) -> Contour:
        """The contour of examples whose kinds are those of the axis."""
        tilt, frequencies = axis.tilt, axis.frequencies
        scale, guess = scan.transform[:, column], scan.epsilon
        decay = np.outer(losses.gaussian / 2, -(frequencies**2))
        turn = np.outer(losses.gaussian * (tilt + 0.5) - guess, frequencies)
        one_step = (
            np.zeros((1, len(frequencies)), np.complex128)
            if axis.table is None
            else axis.table.logarithm
        )
        if axis.table is not None:
            decay += losses.counts @ one_step.real
            turn += losses.counts @ one_step.imag
        modulus = np.exp(decay) * np.abs(axis.weights)
        turn += np.angle(axis.weights)
        values = np.zeros(
            (len(losses), -(-len(frequencies) // axis.fine) * axis.fine), np.complex128
        )
        np.multiply(modulus, np.cos(turn), out=values.real[:, : len(frequencies)])
        np.multiply(modulus, np.sin(turn), out=values.imag[:, : len(frequencies)])
        size = modulus.sum(axis=1)
        # what rounding does to an exponent: sums over kinds, of moduli and of angles
        angle = losses.gaussian * (tilt + 0.5) + np.abs(guess)
        relative = (np.abs(scale) + tilt * np.abs(guess) + 8) * size - np.einsum(
            "nk,nk->n", modulus, decay
        )
        relative += losses.steps * (modulus @ np.abs(one_step.imag).max(axis=0)) + angle * (
            modulus @ frequencies
        )
        rounding = (len(one_step) + 16) * transform.UNIT_ROUNDOFF * relative
        if axis.table is not None:
            smallest = np.maximum(np.exp(one_step.real.min(axis=0)), 1e-290)
            rounding += (losses.counts @ axis.table.error) * (
                modulus @ ((1 + tilt + frequencies) / smallest)
            )
            rounding += transform.QUADRATURE_ERROR * losses.steps * (modulus @ (1 / smallest))
        return cls(
            axis=axis,
            scale=scale,
            values=values.reshape(len(losses), -1, axis.fine),
            size=size,
            guess=guess,
            tail=tail,
            rounding=rounding,
            higher_transform=scan.transform[:, column + 1 :],
        )

    def select(self, examples: NDArray[np.intp]) -> Contour:
        """The contour of some examples only."""
        return Contour(
            axis=self.axis,
            scale=self.scale[examples],
            values=self.values[examples],
            size=self.size[examples],
            guess=self.guess[examples],
            tail=self.tail[examples],
            rounding=self.rounding[examples],
            higher_transform=self.higher_transform[examples],
        )

    def delta(self, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The sum at (n,) epsilons and its derivative, both relative to exp(K(tilt) - tilt epsilon)."""
        _, n_coarse, n_fine = self.values.shape
        spacing = 2 * np.pi / self.axis.period
        angle = spacing * (epsilon - self.guess)
        coarse, fine = n_fine * np.arange(n_coarse), np.arange(n_fine)
        near, far = np.exp(-1j * np.outer(angle, fine)), np.exp(-1j * np.outer(angle, coarse))
        sums = self.values @ np.stack([near, near * fine], axis=2)
        total = np.einsum("nk,nk->n", far, sums[:, :, 0])
        times_frequency = spacing * (
            np.einsum("nk,nk->n", far * coarse, sums[:, :, 0])
            + np.einsum("nk,nk->n", far, sums[:, :, 1])
        )
        slope: FloatArray = times_frequency.imag - self.axis.tilt * total.real
        return total.real, slope

    def log_bounds(self, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Proven log delta from below (-inf where nothing is proven) and above."""
        value, _ = self.delta(epsilon)
        log_unit = self.scale - self.axis.tilt * epsilon
        terms = sum(self.values.shape[1:]) + 16  # that are added one after the other
        turned = (
            16 * np.abs(epsilon - self.guess) * self.axis.frequencies[-1] + 4 * terms
        ) * transform.UNIT_ROUNDOFF
        noise = self.rounding + self.tail + turned * self.size
        upper = log_unit + np.log(np.maximum(value + noise, 1e-300))
        left = -self.axis.tilt * self.axis.period - np.log1p(
            -np.exp(-self.axis.tilt * self.axis.period)
        )
        gap = self.axis.higher - self.axis.tilt
        with np.errstate(invalid="ignore"):
            right = (
                self.higher_transform
                - np.outer(epsilon, self.axis.higher)
                + log_largest_weight(self.axis.higher)
            )
        right = (right - gap * self.axis.period - np.log(-np.expm1(-gap * self.axis.period))).min(
            axis=1, initial=np.inf
        )
        aliased = np.exp(np.minimum(left - log_unit, 50.0)) + np.exp(
            np.minimum(right - log_unit, 50.0)
        )
        least = value - noise - aliased
        lower = np.where(least > 0, log_unit + np.log(np.maximum(least, 1e-300)), -np.inf)
        return lower, upper

    def solve(
        self, lower_goal: FloatArray, upper_goal: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Proven lower and upper epsilon; 0 and inf where nothing is proven."""
        zero = np.zeros_like(self.guess)
        nothing = self.log_bounds(zero)[1] <= upper_goal
        epsilon = self._root((lower_goal + upper_goal) / 2, nothing)
        value, slope = self.delta(epsilon)
        low_delta, high_delta = self.log_bounds(epsilon)
        with np.errstate(invalid="ignore", divide="ignore"):
            fall = np.where(
                value > 0, -slope / value, self.axis.tilt
            )  # of log delta, per unit of epsilon
            spread = np.where(np.isfinite(low_delta), high_delta - low_delta, 1.0) + (
                lower_goal - upper_goal
            )
        fall = np.where(np.isfinite(fall) & (fall > 0), fall, self.axis.tilt)
        reach = 2 * spread / fall + 4e-16 * np.abs(epsilon) + 1e-300
        lower = self._proven_end(epsilon, -reach, lower_goal, 0.0)
        upper = self._proven_end(epsilon, reach, upper_goal, np.inf)
        return lower, np.where(nothing, 0.0, upper)

    def _proven_end(
        self, epsilon: FloatArray, reach: FloatArray, goal: FloatArray, unproven: float
    ) -> FloatArray:
        """The first of four points ever further to one side of epsilon whose bound meets the goal."""
        found, open_ = np.full_like(epsilon, unproven), np.arange(len(epsilon))
        for widening in (1.0, 8.0, 64.0, 512.0):
            part = self if len(open_) == len(epsilon) else self.select(open_)
            candidate = np.maximum(epsilon[open_] + widening * reach[open_], 0.0)
            low, high = part.log_bounds(candidate)
            is_lower = reach[open_] < 0
            proven = np.where(is_lower, (candidate > 0) & (low >= goal[open_]), high <= goal[open_])
            found[open_[proven]] = candidate[proven]
            open_ = open_[~proven]
            if not len(open_):
                break
        return found

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
