"""Contours: the inversion integral of some examples as a finite sum with bounded errors.

laplace.py states the formula and the errors. Sensitive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import transform
from indpriv.accountant.pld.chords import features
from indpriv.accountant.pld.decay import Reach
from indpriv.accountant.pld.loss_sum import UNIT_ROUNDOFF, ComplexArray, LossSum, exponent_of
from indpriv.accountant.pld.quadrature import QUADRATURE_ERROR
from indpriv.accountant.pld.real_axis import Problem, Scan, log_largest_weight

_ROOT_STEPS = 80  # at most; Newton takes about five
_PREFACTOR = 2.0  # nepers by which delta is mostly below its Chernoff bound
_SMALL = 20.0  # epsilon times tilt beyond which delta at 0 need not be compared with its target
# Periods are powers of 4: few different ones, because making the tables of a contour takes longer
# than to add more nodes to it
_PERIOD_RATIO = 4.0
_LEAST_RATIO = 1e-6  # of moduli; a smaller one bounds no error of K
_LARGEST_ERROR = 5.0  # nepers; beyond, what the two transforms are at most is a better bound


def alias_free_period(
    scan: Scan, column: int, log_delta: FloatArray, log_tolerance: float
) -> FloatArray:
    """(n,) period at which aliasing is below tolerance on both sides at the Chernoff epsilon.

    log_tolerance: of aliasing, relative to delta.
    """
    tilts, goal = scan.tilts, log_delta + log_tolerance
    tilt, higher = tilts[column], tilts[column + 1 :]
    with np.errstate(invalid="ignore"):
        chernoff = scan.transform[:, column + 1 :] - np.outer(scan.epsilon, higher)
        chernoff += log_largest_weight(higher)
    right = ((chernoff - goal[:, None]) / (higher - tilt)).min(axis=1, initial=np.inf)
    right = np.where(np.isfinite(right), right, 0.0)
    # A quarter more, because delta is needed somewhat below the Chernoff epsilon
    period = 1.25 * np.maximum(-goal / tilt, right)
    return np.asarray(_PERIOD_RATIO ** np.ceil(np.log(period) / np.log(_PERIOD_RATIO)))


def _chord_noise(
    axis: Axis, modulus: FloatArray, chords: FloatArray, reach: Reach, too_large: FloatArray
) -> FloatArray:
    """(n,) bound of what shared steps change in the sum of a contour.

    It is |exp(K)| times exp(error) - 1 or, where the error is large, the size of both transforms.
    """
    error = chords @ axis.features.T
    far = axis.unbound | np.any(error > _LARGEST_ERROR, axis=0)
    noise = np.einsum("nk,nk->n", modulus[:, ~far], np.expm1(error[:, ~far]))
    if far.any():
        sizes = np.pad(reach.log_size, ((0, 0), (1, 0)))
        sizes = sizes[:, np.searchsorted(reach.frequencies, axis.frequencies[far], "right")]
        with np.errstate(over="ignore"):
            both = np.exp(sizes + too_large[:, None]) * np.abs(axis.weights[far]) + modulus[:, far]
        near = np.expm1(np.minimum(error[:, far], _LARGEST_ERROR)) * modulus[:, far]
        unknown = axis.unbound[far] | (error[:, far] > _LARGEST_ERROR)
        noise += np.where(unknown, both, np.minimum(near, both)).sum(axis=1)
    return np.asarray(noise)


@dataclass(frozen=True)
class Axis:
    """What a group of examples shares.

    Attributes:
        tilt, period: of the contour.
        frequencies: (n_nodes,) from 0, spaced 2 pi / period.
        fine: the number of fine frequencies; each frequency is a coarse one plus a fine one.
        weights: (n_nodes,) of the trapezoid rule over w (w + 1).
        used: (n_laws,) laws that the examples have steps under.
        log_modulus, angle: (n_used, n_nodes) parts of the logarithm of their transforms over those
            at the tilt. error: (n_used,) bound of their rounding (see transform.ContourTable).
        higher: (n_higher,) larger tilts, whose Chernoff bounds limit aliasing.
        chord_terms, at_tilt, features: (n_used, 5), (5,) and (n_nodes, 5) whose product bounds the
            error of K where steps are shared between laws, at the tilt and at the frequencies.
        unbound: (n_nodes,) frequencies at which there is no such bound.
    """

    tilt: float
    period: float
    frequencies: FloatArray
    fine: int
    weights: ComplexArray
    used: NDArray[np.bool_]
    log_modulus: FloatArray
    angle: FloatArray
    error: FloatArray
    higher: FloatArray
    chord_terms: FloatArray
    at_tilt: FloatArray
    features: FloatArray
    unbound: NDArray[np.bool_]

    @classmethod
    def of(cls, problem: Problem, scan: Scan, column: int, period: float, frequency: float) -> Axis:
        """The axis through a tilt, up to a frequency, for the laws of a problem."""
        tilt, spacing = float(scan.tilts[column]), 2 * np.pi / period
        frequencies: FloatArray = spacing * np.arange(float(np.ceil(frequency / spacing)) + 1)
        used, n_nodes = problem.losses.used, len(frequencies)
        logarithm, error = np.zeros((len(used), n_nodes), np.complex128), np.zeros(len(used))
        if used.any():
            laws, direction = problem.laws(scan.step_cut), problem.direction

            def make(missing: NDArray[np.intp]) -> tuple[ComplexArray, FloatArray]:
                made = transform.contour_table(laws.select(missing), tilt, direction, frequencies)
                return made.logarithm, made.error

            place = int(scan.place[column])
            key = ("contour", direction, scan.step_cut, place, period, frequency)
            logarithm, error = problem.losses.laws.rows(key, used, make)
        w = np.asarray(tilt + 1j * frequencies, np.complex128)
        terms = np.zeros((int(used.sum()), 7))
        if problem.losses.laws.cells is not None and used.any():
            terms = problem.chord_terms(used, int(scan.place[column]))[used]
        a = exponent_of(tilt, problem.direction) + 1j * frequencies  # or its conjugate
        ratio = np.exp(logarithm.real[used].min(axis=0, initial=0.0))
        ratio -= np.abs(a * (a - 1)) * terms[:, 5].max(initial=0.0)
        weights = np.asarray(spacing / np.pi / (w * (w + 1)), np.complex128)
        weights[0] /= 2
        return cls(
            tilt=tilt,
            period=period,
            frequencies=frequencies,
            fine=int(np.ceil(np.sqrt(n_nodes))),
            weights=weights,
            used=used,
            log_modulus=np.ascontiguousarray(logarithm.real[used]),
            angle=np.ascontiguousarray(logarithm.imag[used]),
            error=error[used],
            higher=scan.tilts[column + 1 :],
            chord_terms=terms[:, :5],
            at_tilt=features(w[0], problem.direction, 1.0),
            features=features(w, problem.direction, np.where(ratio > _LEAST_RATIO, ratio, 1.0)),
            unbound=ratio <= _LEAST_RATIO,
        )

    @cached_property
    def largest_angle(self) -> FloatArray:
        """(n_nodes,) over the laws."""
        return np.asarray(np.abs(self.angle).max(axis=0, initial=0.0))

    @cached_property
    def smallest(self) -> FloatArray:
        """(n_nodes,) modulus of a transform over that at the tilt, over the laws."""
        return np.asarray(np.maximum(np.exp(self.log_modulus.min(axis=0, initial=0.0)), 1e-290))


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
    def of(cls, axis: Axis, losses: LossSum, scan: Scan, column: int, reach: Reach) -> Contour:
        """The contour of examples whose laws are those of the axis, and whose reach it has."""
        tilt, frequencies, n_frequencies = axis.tilt, axis.frequencies, len(axis.frequencies)
        guess = scan.epsilon
        decay = np.outer(losses.gaussian / 2, -(frequencies**2))
        turn = np.outer(losses.gaussian * (tilt + 0.5) - guess, frequencies)
        counts = losses.counts if axis.used.all() else losses.counts[:, axis.used]
        chords = counts @ axis.chord_terms
        too_large = chords @ axis.at_tilt
        scale = scan.transform[:, column] - too_large
        decay += counts @ axis.log_modulus
        turn += counts @ axis.angle
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
        relative += losses.steps * (modulus @ axis.largest_angle)
        angle = losses.gaussian * (tilt + 0.5) + np.abs(guess)
        relative += angle * (modulus @ frequencies)
        tail = reach.tail[np.arange(len(losses)), reach.place]
        with np.errstate(over="ignore"):
            tail *= np.exp(too_large)
        noise = tail + (counts.shape[1] + 16) * UNIT_ROUNDOFF * relative
        amplified = modulus @ ((1 + tilt + frequencies) / axis.smallest)
        noise += (counts @ axis.error) * amplified
        noise += QUADRATURE_ERROR * losses.steps * (modulus @ (1 / axis.smallest))
        if axis.chord_terms.any():
            noise += _chord_noise(axis, modulus, chords, reach, too_large)
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

    def log_bounds(
        self, epsilon: FloatArray, value: FloatArray | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Proven log delta from below (-inf where nothing is proven) and above.

        value: the sum at epsilon, where it is known.
        """
        value = self.delta(epsilon)[0] if value is None else value
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
        self, lower_goal: FloatArray, upper_goal: FloatArray, precision: float
    ) -> tuple[FloatArray, FloatArray]:
        """Proven lower and upper epsilon; 0 and inf where nothing is proven.

        precision: relative step of Newton's method that is the last one.
        """
        nothing = np.zeros(len(self.guess), dtype=bool)
        small = np.flatnonzero(self.guess * self.axis.tilt < _SMALL)
        if len(small):
            at_zero = self.select(small).log_bounds(np.zeros(len(small)))[1]
            nothing[small] = at_zero <= upper_goal[small]
        epsilon, value, slope = self._root((lower_goal + upper_goal) / 2, nothing, precision)
        low_delta, high_delta = self.log_bounds(epsilon, value)
        with np.errstate(invalid="ignore", divide="ignore"):
            fall = np.where(value > 0, -slope / value, self.axis.tilt)  # of log delta
            spread = np.where(np.isfinite(low_delta), high_delta - low_delta, 1.0)
        spread += lower_goal - upper_goal
        fall = np.where(np.isfinite(fall) & (fall > 0), fall, self.axis.tilt)
        reach = 2 * spread / fall + (4e-16 + precision**2) * np.abs(epsilon) + 1e-300
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

    def _root(
        self, log_delta: FloatArray, nothing: NDArray[np.bool_], precision: float
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Epsilon at which the sum meets a delta, the sum there about and its derivative.

        Newton's method from the Chernoff bound, halving where a step leaves the bracket.
        """
        low, high = np.zeros_like(self.guess), np.where(nothing, 0.0, np.maximum(self.guess, 0.0))
        epsilon = high - np.minimum(_PREFACTOR / self.axis.tilt, high / 2)
        for _ in range(_ROOT_STEPS):
            value, slope = self.delta(epsilon)
            sound = (value > self.noise) & (slope < 0)
            with np.errstate(invalid="ignore", divide="ignore"):
                residual = self.scale - self.axis.tilt * epsilon + np.log(value) - log_delta
                step = residual * value / -slope
            above = sound & (residual > 0)
            low, high = np.where(above, epsilon, low), np.where(above, high, epsilon)
            following = np.where(sound, epsilon + step, -1.0)
            settled = sound & (np.abs(step) <= precision * epsilon)
            inside = (following >= low) & (following <= high)
            epsilon = np.where(inside, following, (low + high) / 2)
            if np.all(settled | nothing | (high - low <= precision**2 * high)):
                break
        return epsilon, value, slope
