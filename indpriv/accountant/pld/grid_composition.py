"""Composition of discretised one-step losses by powers of their discrete Fourier transforms.

The laws above and below of loss_grid.py are tilted by exp(tilt * loss) before they are composed, so
that rounding is relative to delta. On n points of spacing h what is composed is the law modulo the
window n h; every error is bounded and added on the safe side:

* losses right of the window are missing from delta: at most their probability, bounded by Chernoff.
  Folded back into the window they may add to delta, and so may losses left of it: bounded under the
  tilted law, and subtracted from the lower bound;
* the probability of losses beyond the cuts of each step's law is added to the upper bound and left
  out of the lower one;
* rounding of the transforms and of their powers (Higham 2002, Accuracy and Stability,
  Theorem 24.2): in the 2-norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from indpriv._arrays import FloatArray
from indpriv.accountant.pld.closed_form import invert_delta
from indpriv.accountant.pld.loss_grid import LOWER_EXCESS, LossGrid, Step, lower_grid, upper_grid
from indpriv.accountant.pld.loss_sum import UNIT_ROUNDOFF, ComplexArray, Direction, StepLaws
from indpriv.accountant.pld.real_axis import Problem, log_largest_weight

HIGHER = (1.05, 1.15, 1.4, 2.0, 4.0, 8.0)  # larger tilts, relative; they bound what leaves a window

_FAR = 10.0  # standard deviations to which a law is followed at least, where losses are harmless
_FAINT = 60.0  # nepers by which the tilt must damp losses that are dropped where they are harmless
# Relative error of the mass of one point of a law, in units of rounding: bounds what quadrature and
# a few dozen operations on positive numbers can do. It counts once for each step.
_MASS_ERROR = 64.0
_RECENTRINGS = 6


@dataclass(frozen=True)
class Window:
    """What some examples share.

    Attributes:
        examples: their positions.
        tilt: of the laws.
        left: how far the window reaches left of epsilon.
        length: of the whole window.
    """

    examples: NDArray[np.intp]
    tilt: float
    left: float
    length: float


def step_law(problem: Problem, tilt: float, shift: float, rate: float, n_steps: float) -> Step:
    """One step's law, so far that the run goes beyond with at most the cut's probability."""
    probability = problem.cut * float(np.exp(problem.log_delta.min())) / (2 * n_steps)
    laws = StepLaws(np.array([shift]), np.array([rate])).cut_at(probability, problem.direction)
    end = float(laws.cut[0]) if laws.cut is not None else 0.0
    if problem.direction == "remove":
        return Step(float(shift), float(rate), low=-_FAR, high=end)
    whole = Step(float(shift), float(rate), low=-max(end, _FAR), high=shift + _FAR)
    faint = float(whole.z_at(_FAINT / tilt - whole.floor))
    return Step(whole.shift, whole.sample_rate, whole.low, min(whole.high, faint))


@dataclass(frozen=True)
class _Table:
    """Grids of all laws of a group, ready to be composed; arrays have shape (n_laws, ...).

    Attributes:
        offsets: loss at each law's first point (with the sign of the direction).
        log_tilted: log of the sum of mass * exp(w loss) at the tilt, relative to the offset's.
        log_higher: (n_laws, n_higher) the same at larger tilts.
        log_transform: (n_laws, n_points / 2 + 1) log of the discrete Fourier transform of the
            tilted masses.
        norms: 2-norms of the tilted masses, without the atom.
        atoms, places: the largest tilted mass of each law where it is more than half, else 0, and
            its place: rare participation leaves nearly all mass in one point. It is transformed
            exactly, so that rounding is relative to the rest.
    """

    offsets: FloatArray
    log_tilted: FloatArray
    log_higher: FloatArray
    log_transform: ComplexArray
    norms: FloatArray
    atoms: FloatArray
    places: NDArray[np.int64]


@dataclass(frozen=True)
class GridLaws:
    """What is composed.

    Attributes:
        direction: of the losses.
        log_delta: (n_examples,) logarithm of the delta at which epsilon is wanted.
        counts: (n_examples, n_laws) steps under each law.
        missed: (n_laws,) what one step can add to delta beyond the end that raises the loss.
        lost: (n_laws,) bound of the share of one step's tilted law beyond the other end.
        upper, lower: the laws above and below; no lower ones if no lower end is wanted.
    """

    direction: Direction
    log_delta: FloatArray
    counts: FloatArray
    missed: FloatArray
    lost: FloatArray
    upper: list[LossGrid]
    lower: list[LossGrid]

    @classmethod
    def of(cls, problem: Problem, tilt: float, spacing: float) -> GridLaws:
        """The laws of a problem's steps."""
        losses, direction = problem.losses, problem.direction
        shift, rate, counts = losses.shift, losses.sample_rate, losses.counts
        if np.any(losses.gaussian > 0):  # then the window has one example
            shift = np.append(shift, np.sqrt(losses.gaussian[0]))
            rate, counts = np.append(rate, 1.0), np.append(counts, [[1.0]], axis=1)
        n_steps = float(counts.sum(axis=1).max())
        steps = [step_law(problem, tilt, *law, n_steps) for law in zip(shift, rate, strict=True)]
        return cls(
            direction,
            problem.log_delta,
            counts,
            np.array([_missed(step, direction) for step in steps]),
            np.array([_lost(step, direction, tilt) for step in steps]),
            [upper_grid(step, spacing) for step in steps],
            [lower_grid(step, spacing) for step in steps],
        )


def _missed(step: Step, direction: Direction) -> float:
    if direction == "remove":
        rate, sampled = step.sample_rate, ndtr(step.shift - step.high)
        return float((1 - rate) * ndtr(-step.high) + rate * sampled)
    return float(ndtr(step.low))


def _lost(step: Step, direction: Direction, tilt: float) -> float:
    """Beyond the far end losses are far below."""
    if direction == "remove":
        return 0.0
    lowest = step.floor + float(step.rise(step.high))
    return float(np.exp(log_ndtr(-step.high) - tilt * lowest))


class Composer:
    """Composes the steps of a window's examples on one grid, above and below."""

    def __init__(self, laws: GridLaws, window: Window, n_points: int) -> None:
        self.laws, self.tilt, self.left = laws, window.tilt, window.left
        self.spacing, self.n_points = window.length / n_points, n_points
        self.higher = self.tilt * np.array(HIGHER)
        self.missed, self.lost = laws.counts @ laws.missed, laws.counts @ laws.lost
        self.upper, self.lower = self._table(laws.upper), self._table(laws.lower)

    def _table(self, grids: list[LossGrid]) -> _Table:
        """Tilted transforms of the grids."""
        n_laws, remove = len(grids), self.laws.direction == "remove"
        sign = 1 if remove else -1
        offsets, norms, log_tilted = np.empty(n_laws), np.empty(n_laws), np.empty(n_laws)
        atoms, places = np.zeros(n_laws), np.zeros(n_laws, np.int64)
        log_higher = np.empty((n_laws, len(self.higher)))
        log_transform = np.empty((n_laws, self.n_points // 2 + 1), np.complex128)
        for law, grid in enumerate(grids):
            index = np.arange(len(grid.mass))
            with np.errstate(divide="ignore"):
                log_mass = np.log(grid.mass)
            if remove:  # masses under P, the law that z has
                log_mass += grid.offset + self.spacing * index
            rise = sign * self.spacing * index
            tilted, log_tilted[law] = _normalised(log_mass + self.tilt * rise)
            log_higher[law] = [_normalised(log_mass + tilt * rise)[1] for tilt in self.higher]
            place = (sign * index) % self.n_points
            folded = np.bincount(place, weights=tilted, minlength=self.n_points)
            atom = int(folded.argmax())
            if folded[atom] > 0.5:
                atoms[law], places[law], folded[atom] = folded[atom], atom, 0.0
            transform = np.fft.rfft(folded) + atoms[law] * self.phases(int(places[law]))
            log_transform[law] = np.log(np.where(transform == 0, 1e-300, transform))
            offsets[law], norms[law] = sign * grid.offset, np.linalg.norm(folded)
        return _Table(offsets, log_tilted, log_higher, log_transform, norms, atoms, places)

    def phases(self, place: int) -> ComplexArray:
        """The discrete Fourier transform of a unit mass at a place; angles are exact."""
        turns = (np.arange(self.n_points // 2 + 1) * place) % self.n_points
        return np.asarray(np.exp(-2j * np.pi / self.n_points * turns))

    def upper_end(self, row: int, limit: float) -> float:
        """Proven upper epsilon of one example; limit: another one."""
        target = np.exp(self.laws.log_delta[row : row + 1])
        high = limit
        for _ in range(_RECENTRINGS):  # the first window may lie too far right
            above = _Composed(self, self.upper, row, high)
            begin = max(above.first_loss, 0.0)
            _, high = _crossing(above.upper_delta, target, begin, high)
            if high > begin or begin == 0:
                break
        return high

    def lower_end(self, row: int, high: float) -> float:
        """Proven lower epsilon of one example; high: an upper one."""
        target = np.exp(self.laws.log_delta[row : row + 1])
        below = _Composed(self, self.lower, row, high)
        gap = 1e-7 * high
        while gap < 4 * high:  # from the right, since far left of epsilon rounding hides the bound
            begin = max(high - gap, below.first_loss, 0.0)
            if below.lower_delta(np.array([begin]))[0] > target[0]:
                return _crossing(below.lower_delta, target, begin, high)[0]
            gap *= 4
        return 0.0

    def deltas(self, row: int, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Proven lower and upper delta of one example at several epsilons."""
        near = float(epsilon.min())
        below = _Composed(self, self.lower, row, near)
        above = _Composed(self, self.upper, row, near)
        return below.lower_delta(epsilon), np.minimum(above.upper_delta(epsilon), 1.0)


def _crossing(
    bound: Callable[[FloatArray], FloatArray], target: FloatArray, low: float, high: float
) -> tuple[float, float]:
    """`invert_delta` of one example."""
    lower, upper = invert_delta(lambda epsilon, _: bound(epsilon), target, low=low, high=high)
    return float(lower[0]), float(upper[0])


def _normalised(log_mass: FloatArray) -> tuple[FloatArray, float]:
    """Masses that sum to 1, and the logarithm of what they summed to."""
    peak = log_mass.max()
    mass = np.exp(log_mass - peak)
    total = mass.sum()
    return mass / total, float(peak + np.log(total))


class _Composed:
    """The composed tilted law of one example on a window of losses around a given epsilon."""

    def __init__(self, composer: Composer, table: _Table, row: int, near: float) -> None:
        counts = composer.laws.counts[row]
        self.composer = composer
        self.missed, self.lost = float(composer.missed[row]), float(composer.lost[row])
        offset = float(counts @ table.offsets)
        self.scale = float(counts @ table.log_tilted) + composer.tilt * offset
        self.higher = counts @ table.log_higher + composer.higher * offset
        self.steps = float(counts.sum())
        exponent = counts @ table.log_transform
        atom = float(np.prod(table.atoms**counts))
        place = int(counts.astype(np.int64) @ table.places % composer.n_points)
        masses = np.fft.irfft(np.exp(exponent) - atom * composer.phases(place), composer.n_points)
        log_n = np.log2(composer.n_points) + 1
        forward = 8 * log_n * float(counts @ table.norms)
        spread = np.exp(exponent.real) * (self.steps + np.abs(exponent))
        power = 4 * np.sqrt(np.sum(spread**2) * 2 / composer.n_points)
        backward = 8 * log_n * float(np.linalg.norm(masses)) + 8 * atom
        self.rounding = UNIT_ROUNDOFF * float(forward + power + backward)
        masses[place] += atom
        first = int(np.ceil((near - composer.left - offset) / composer.spacing))
        self.masses = np.roll(masses, -(first % composer.n_points))
        self.first_loss = offset + composer.spacing * first
        self.end = self.first_loss + composer.spacing * composer.n_points

    def upper_delta(self, epsilon: FloatArray) -> FloatArray:
        """Upper bounds of delta at some epsilons, (k,)."""
        higher = self.higher - self.composer.higher * self.end
        missing = float(np.exp(min(higher.min(), 0.0))) + self.missed
        return np.array([self._upper(float(value)) + missing for value in epsilon])

    def _upper(self, epsilon: float) -> float:
        if epsilon < self.first_loss:  # losses between are folded to the right of the window
            return 1.0
        unit, found, noise = self._sum(epsilon)
        return unit * (found + noise + self.lost)

    def lower_delta(self, epsilon: FloatArray) -> FloatArray:
        """Lower bounds of delta at some epsilons, (k,)."""
        tilt, higher = self.composer.tilt, self.composer.higher
        from_left = np.exp(min(tilt * self.first_loss - self.scale, 0.0))
        right = self.higher - self.scale - (higher - tilt) * self.end
        heaviest = float(np.exp(log_largest_weight(np.array([tilt]))[0]))
        folded = heaviest * float(from_left + np.exp(min(right.min(), 0.0)))
        return np.array([self._lower(float(value), folded) for value in epsilon])

    def _lower(self, epsilon: float, folded: float) -> float:
        if epsilon < self.first_loss:
            return 0.0
        unit, found, noise = self._sum(epsilon)
        noise += LOWER_EXCESS * self.steps * abs(found)
        return max(unit * (found - noise - folded), 0.0)

    def _sum(self, epsilon: float) -> tuple[float, float, float]:
        """The unit of delta at epsilon, delta on the window in this unit, and its rounding."""
        tilt, spacing, n_points = self.composer.tilt, self.composer.spacing, self.composer.n_points
        begin = int(np.clip(np.ceil((epsilon - self.first_loss) / spacing), 0, n_points))
        excess = self.first_loss + spacing * np.arange(begin, n_points) - epsilon
        weight = np.exp(-tilt * excess) * -np.expm1(-excess)
        found = float(weight @ self.masses[begin:])
        relative = 4 * (abs(self.scale) + tilt * abs(epsilon) + 8) + n_points
        relative += _MASS_ERROR * self.steps
        noise = self.rounding * float(np.linalg.norm(weight))
        noise += UNIT_ROUNDOFF * relative * abs(found)
        return float(np.exp(min(self.scale - tilt * epsilon, 600.0))), found, noise
