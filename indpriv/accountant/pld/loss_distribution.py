"""Certified epsilon by discretised loss distributions, for runs whose loss is far from Gaussian. Sensitive.

Where participation is rare the transform of the loss decays too slowly for a contour (laplace.py), but a grid resolves
the loss well: the laws above and below of loss_grid.py are composed by powers of their discrete Fourier transforms, both
tilted by exp(tilt * loss) so that rounding is relative to delta. On n points of spacing h what is composed is the law
modulo the window n h; every error is bounded and added on the safe side:

* losses right of the window are missing from delta: at most their probability, bounded by Chernoff; folded back they may
  add to it, and so may losses left of the window: bounded under the tilted law, subtracted from the lower bound;
* what lies beyond the cuts of each step's law: its probability, added to the upper bound and left out of the lower;
* rounding of the transforms and of their powers (Higham 2002, Accuracy and Stability, Theorem 24.2): in the 2-norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import real_axis
from indpriv.accountant.pld.closed_form import invert_delta
from indpriv.accountant.pld.laplace import Bracket
from indpriv.accountant.pld.loss_grid import LOWER_EXCESS, LossGrid, Step, lower_grid, upper_grid
from indpriv.accountant.pld.loss_sum import Direction, LossSum
from indpriv.accountant.pld.real_axis import Problem, Scan, log_largest_weight
from indpriv.accountant.pld.transform import UNIT_ROUNDOFF, ComplexArray, Kinds
from indpriv.accountant.pld.work_budget import WorkBudget

_CUT = 1e-7  # share of delta given to what lies beyond the ends of the steps' laws
_LOG_TOLERANCE = np.log(1e-9)  # of what leaves the window, relative to delta
_FAR = 10.0  # standard deviations to which a step's law is followed in the harmless direction, at least
_FAINT = 60.0  # nepers by which the tilt must have damped losses that are dropped in the harmless direction
_POINTS = tuple(2**k for k in (14, 16, 18, 20, 21))
_TIGHT = 1e-5  # relative width at which no finer grid is tried
_MASS_ERROR = 64.0  # units of rounding that a point's mass may be wrong by, quadrature included
_PROGRESS = (
    0.8  # of the width of the last bracket, that a finer grid must reach to be refined further
)
# Work is counted in points, weighted by what they cost (about 1e-8 s each). A call is worth so much of it, whatever the
# number of its examples, so that none takes hours; what is left over keeps the wider bracket that is proven by then.
_MOST_WORK = 3e9
_PER_BUCKET, _PER_KIND, _PER_EXAMPLE, _PER_SOLUTION = 150.0, 40.0, 2.0, 200.0
_RECENTRINGS = 6
_MARGIN = 1.5  # by which windows are longer than they need be at the epsilon they are chosen for
_LARGEST_UNIT = 16.0  # nepers by which exp(K(tilt) - tilt epsilon) may exceed delta
_TILTS_BEYOND = 1e3  # how far above the best tilt others are looked at
_HIGHER = (
    1.05,
    1.15,
    1.4,
    2.0,
    4.0,
    8.0,
)  # larger tilts, relative, that bound what leaves the window


def grid_brackets(losses: LossSum, delta: float, direction: Direction) -> Bracket:
    """Bracket epsilon(delta) of every example by composing discretised losses.

    Args:
        losses: the composed losses.
        delta: target.
        direction: "remove" or "add".

    Returns:
        the bracket, proven everywhere; `solved` where it is tight. The more examples and kinds, the coarser the grids that
        the budget of work allows: brackets widen, but stay proven.
    """
    problem = Problem(losses, np.full(len(losses), np.log(delta)), direction, _CUT)
    scan = real_axis.refine(real_axis.scan(problem, beyond=_TILTS_BEYOND), problem)
    lower, upper = np.zeros(len(losses)), np.maximum(scan.epsilon, 0.0)
    width = np.full(
        len(losses), np.inf
    )  # of the last bracket: rounding grows with the number of points

    def open_examples() -> NDArray[np.intp]:
        nonlocal width
        improving = upper - lower < _PROGRESS * width
        width = np.where(improving, upper - lower, 0.0)
        return np.flatnonzero((upper - lower > _TIGHT * upper) & improving)

    for composer, row, example in _composed_examples(problem, scan, upper, open_examples):
        low, high = composer.solve(row, float(upper[example]))
        lower[example], upper[example] = max(lower[example], low), min(upper[example], high)
    return Bracket(lower, upper, upper - lower <= _TIGHT * upper)


def grid_deltas(
    losses: LossSum, epsilon: FloatArray, direction: Direction, log_delta: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Bracket delta at several epsilons of every example by composing discretised losses.

    Args:
        losses: the composed losses.
        epsilon: (n_examples, k) any real numbers, not far from each other.
        direction: "remove" or "add".
        log_delta: (n_examples,) log of an upper bound of delta at the middle epsilon.

    Returns:
        lower, upper: (n_examples, k), proven.
    """
    middle = epsilon[:, epsilon.shape[1] // 2]
    problem = Problem(losses, np.maximum(log_delta, -600.0), direction, _CUT, middle)
    scan = real_axis.refine(real_axis.scan(problem, beyond=_TILTS_BEYOND), problem)
    lower, upper = np.zeros_like(epsilon), np.ones_like(epsilon)

    def open_examples() -> NDArray[np.intp]:
        return np.flatnonzero((upper - lower > _TIGHT * upper).any(axis=1))

    for composer, row, example in _composed_examples(problem, scan, middle, open_examples):
        low, high = composer.deltas(row, epsilon[example])
        lower[example], upper[example] = (
            np.maximum(lower[example], low),
            np.minimum(upper[example], high),
        )
    return lower, upper


def _composed_examples(
    problem: Problem, scan: Scan, near: FloatArray, open_examples: Callable[[], NDArray[np.intp]]
) -> Iterator[tuple[_Composer, int, int]]:
    """Yield (composer, row in it, example) for the examples that are still open, on ever finer grids.

    Args:
        problem: of all examples.
        scan: of its real axis.
        near: (n_examples,) epsilons that windows are laid for; the caller may lower them in place between grids.
        open_examples: asked before each finer grid.
    """
    budget = WorkBudget(_MOST_WORK)
    for n_points in _POINTS:
        open_ = open_examples()
        for window in (
            _windows(problem.select(open_), scan.select(open_), near[open_]) if len(open_) else ()
        ):
            examples = open_[window.examples]
            part = problem.select(examples)
            if budget.affords(_work(part, window, n_points)):
                composer = _Composer(part, window, n_points)
                yield from ((composer, row, int(example)) for row, example in enumerate(examples))


@dataclass(frozen=True)
class _Window:
    """What some examples share: the tilt, how far the window reaches left of epsilon, and its whole length."""

    examples: NDArray[np.intp]
    tilt: float
    left: float
    length: float


def _windows(problem: Problem, scan: Scan, upper: FloatArray) -> list[_Window]:
    """The shortest windows that hold what matters for epsilons near `upper`.

    A larger tilt than the best one damps losses left of epsilon sooner, until it lifts those on the right or makes
    delta small beside what is added up.
    """
    goal = problem.log_delta + _LOG_TOLERANCE
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = scan.transform - np.outer(upper, scan.tilts)
    length = np.full(exponent.shape, np.inf)
    for column, tilt in enumerate(scan.tilts[:-1]):
        above = scan.tilts[column + 1 :]
        usable = (above <= _HIGHER[-1] * tilt) & (above >= _HIGHER[0] * tilt)
        if usable.any():
            bound = (
                exponent[:, column + 1 :][:, usable]
                + log_largest_weight(above[usable])
                - goal[:, None]
            )
            right = (bound / (above[usable] - tilt)).min(axis=1)
            length[:, column] = _MARGIN * (-goal / tilt + np.maximum(right, -goal / tilt / 2))
    allowed = exponent <= np.maximum(problem.log_delta + _LARGEST_UNIT, 1.0)[:, None]
    allowed[np.arange(len(upper)), scan.best] = True
    best = np.where(allowed, length, np.inf).argmin(axis=1)
    chosen = np.take_along_axis(length, best[:, None], axis=1)[:, 0]
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(chosen), np.ceil(2 * np.log2(chosen)), np.inf)
    own = np.where(
        problem.losses.gaussian > 0, np.arange(len(upper)), -1
    )  # their Gaussian part is a kind of their own
    keys, place = np.unique(np.stack([best, size, own], axis=1), axis=0, return_inverse=True)
    windows = []
    for group in range(len(keys)):
        examples = np.flatnonzero(place.ravel() == group)
        if np.isfinite(keys[group, 1]):
            tilt = float(scan.tilts[int(keys[group, 0])])
            left = -_MARGIN * float(goal[examples].min()) / tilt
            windows.append(_Window(examples, tilt, left, float(chosen[examples].max())))
    return windows


def _step(problem: Problem, tilt: float, shift: float, rate: float, n_steps: float) -> Step:
    """One step's law followed far enough that the run goes beyond with at most the cut's probability."""
    probability = _CUT * float(np.exp(problem.log_delta.min())) / (2 * n_steps)
    kinds = Kinds(np.array([shift]), np.array([rate])).cut_at(probability, problem.direction)
    end = float(kinds.cut[0]) if kinds.cut is not None else 0.0
    if problem.direction == "remove":
        return Step(float(shift), float(rate), low=-_FAR, high=end)
    whole = Step(float(shift), float(rate), low=-max(end, _FAR), high=shift + _FAR)
    faint = float(whole.z_at(_FAINT / tilt - whole.floor))
    return Step(whole.shift, whole.sample_rate, whole.low, min(whole.high, faint))


def _work(problem: Problem, window: _Window, n_points: int) -> float:
    """What it takes to compose the examples of a window: laws on the grid, their transforms, powers, and solutions."""
    losses, buckets = problem.losses, 0.0
    for shift, rate in zip(losses.shift, losses.sample_rate, strict=True):
        step = _step(problem, window.tilt, shift, rate, max(float(losses.steps.max()), 1.0))
        buckets += float(step.rise(step.high) - step.rise(step.low)) * n_points / window.length
    per_example = _PER_EXAMPLE * (len(losses.shift) + 1) + _PER_SOLUTION
    kinds = len(losses.shift) + 1
    return _PER_BUCKET * buckets + n_points * (_PER_KIND * kinds + per_example * len(losses))


@dataclass(frozen=True)
class _Table:
    """Grids of all kinds of a group, ready to compose: (n_kinds, ...) each.

    Attributes:
        offsets: loss at each kind's first point (with the sign of the direction).
        log_tilted: log of the sum of mass * exp(w loss) at the tilt, relative to the offset's.
        log_higher: (n_kinds, n_higher) the same at larger tilts.
        log_transform: (n_kinds, n_points / 2 + 1) log of the discrete Fourier transform of the tilted masses.
        norms: 2-norms of the tilted masses, the atom left out.
        atoms, places: the largest tilted mass of each kind where it holds more than half, else 0, and its place: rare
            participation leaves nearly all mass in one point. It is transformed exactly, so that rounding is relative to
            what remains.
    """

    offsets: FloatArray
    log_tilted: FloatArray
    log_higher: FloatArray
    log_transform: ComplexArray
    norms: FloatArray
    atoms: FloatArray
    places: NDArray[np.int64]


class _Composer:
    """Composes the steps of a group of examples on one grid, above and below."""

    def __init__(self, problem: Problem, window: _Window, n_points: int) -> None:
        self.problem, self.tilt, self.left = problem, window.tilt, window.left
        self.spacing, self.n_points = window.length / n_points, n_points
        self.higher = self.tilt * np.array(_HIGHER)
        losses = problem.losses
        shift, rate, counts = losses.shift, losses.sample_rate, losses.counts
        if np.any(losses.gaussian > 0):  # such groups hold one example
            shift = np.append(shift, np.sqrt(losses.gaussian[0]))
            rate = np.append(rate, 1.0)
            counts = np.append(counts, [[1.0]], axis=1)
        self.counts = counts
        n_steps = float(counts.sum(axis=1).max())
        steps = [_step(problem, self.tilt, *law, n_steps) for law in zip(shift, rate, strict=True)]
        self.missed = counts @ np.array([self._missed(step) for step in steps])
        self.lost = counts @ np.array([self._lost(step) for step in steps])
        self.upper = self._table([upper_grid(step, self.spacing) for step in steps])
        self.lower = self._table([lower_grid(step, self.spacing) for step in steps])

    def _missed(self, step: Step) -> float:
        """Bound of what the end that raises the loss can add to delta, per step."""
        if self.problem.direction == "remove":
            beyond = (1 - step.sample_rate) * ndtr(-step.high) + step.sample_rate * ndtr(
                step.shift - step.high
            )
            return float(beyond)
        return float(ndtr(step.low))

    def _lost(self, step: Step) -> float:
        """Bound of the share of the tilted law beyond the other end, per step: in the add direction losses far below."""
        if self.problem.direction == "remove":
            return 0.0
        tilted_here = -self.tilt * (step.floor + float(step.rise(step.high))) + log_ndtr(-step.high)
        return float(np.exp(tilted_here))

    def _table(self, grids: list[LossGrid]) -> _Table:
        """Tilted transforms of the grids."""
        sign, power = (1, 1.0) if self.problem.direction == "remove" else (-1, 0.0)
        n_kinds = len(grids)
        offsets, norms, log_tilted = np.empty(n_kinds), np.empty(n_kinds), np.empty(n_kinds)
        atoms, places = np.zeros(n_kinds), np.zeros(n_kinds, np.int64)
        log_higher = np.empty((n_kinds, len(self.higher)))
        log_transform = np.empty((n_kinds, self.n_points // 2 + 1), np.complex128)
        for kind, grid in enumerate(grids):
            index = np.arange(len(grid.mass))
            with np.errstate(divide="ignore"):
                log_mass = np.log(grid.mass)
            log_mass += power * (
                grid.offset + self.spacing * index
            )  # masses under the law that z has
            rise = sign * self.spacing * index
            exponent = log_mass + self.tilt * rise
            peak = exponent.max()
            tilted = np.exp(exponent - peak)
            total = tilted.sum()
            tilted /= total
            log_tilted[kind] = peak + np.log(total)
            for column, tilt in enumerate(self.higher):
                exponent = log_mass + tilt * rise
                log_higher[kind, column] = exponent.max() + np.log(
                    np.exp(exponent - exponent.max()).sum()
                )
            folded = np.bincount(
                (sign * index) % self.n_points, weights=tilted, minlength=self.n_points
            )
            place = int(folded.argmax())
            if folded[place] > 0.5:
                atoms[kind], places[kind], folded[place] = folded[place], place, 0.0
            transform = np.fft.rfft(folded) + atoms[kind] * self.phases(int(places[kind]))
            log_transform[kind] = np.log(np.where(transform == 0, 1e-300, transform))
            offsets[kind], norms[kind] = sign * grid.offset, np.linalg.norm(folded)
        return _Table(offsets, log_tilted, log_higher, log_transform, norms, atoms, places)

    def phases(self, place: int) -> ComplexArray:
        """The discrete Fourier transform of one unit of mass at a place: exact angles, whatever the place."""
        turns = (np.arange(self.n_points // 2 + 1) * place) % self.n_points
        result: ComplexArray = np.exp(-2j * np.pi / self.n_points * turns)
        return result

    def solve(self, row: int, limit: float) -> tuple[float, float]:
        """Proven lower and upper epsilon of one example, of which `limit` is a proven upper one."""
        target = np.exp(self.problem.log_delta[row : row + 1])
        high = limit
        for _ in range(_RECENTRINGS):  # the first window may lie too far right
            begin, high = _Composed(self, self.upper, row, high).upper_end(target, high)
            if high > begin or begin == 0:
                break
        below = _Composed(self, self.lower, row, high)
        gap = 1e-7 * high
        while (
            gap < 4 * high
        ):  # far left of epsilon rounding drowns the bound: it is looked for from the right
            begin = max(high - gap, below.first_loss, 0.0)
            if below.delta(np.array([begin]), upper=False)[0] > target[0]:
                low, _ = invert_delta(
                    lambda epsilon: below.delta(epsilon, upper=False),
                    target,
                    begin=begin,
                    start=high,
                    limit=high,
                )
                return float(low[0]), high
            gap *= 4
        return 0.0, high

    def deltas(self, row: int, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Proven lower and upper delta of one example at several epsilons."""
        near = float(epsilon.min())
        below, above = (
            _Composed(self, self.lower, row, near),
            _Composed(self, self.upper, row, near),
        )
        low = [below.delta(epsilon[k : k + 1], upper=False)[0] for k in range(len(epsilon))]
        high = [above.delta(epsilon[k : k + 1], upper=True)[0] for k in range(len(epsilon))]
        return np.array(low), np.minimum(np.array(high), 1.0)


class _Composed:
    """The composed tilted law of one example on a window of losses from `left` below a given epsilon."""

    def __init__(self, composer: _Composer, table: _Table, row: int, near: float) -> None:
        counts = composer.counts[row]
        self.composer, self.missed, self.lost = (
            composer,
            float(composer.missed[row]),
            float(composer.lost[row]),
        )
        offset = float(counts @ table.offsets)
        self.scale = float(counts @ table.log_tilted) + composer.tilt * offset
        self.higher = counts @ table.log_higher + composer.higher * offset
        exponent = counts @ table.log_transform
        size = np.exp(exponent.real)
        atom = float(np.prod(table.atoms**counts))
        place = int(counts.astype(np.int64) @ table.places % composer.n_points)
        masses = np.fft.irfft(np.exp(exponent) - atom * composer.phases(place), composer.n_points)
        first = int(np.ceil((near - composer.left - offset) / composer.spacing))
        log_n = np.log2(composer.n_points) + 1
        forward = 8 * log_n * float(counts @ table.norms)
        self.steps = float(counts.sum())
        power = 4 * np.sqrt(
            np.sum((size * (self.steps + np.abs(exponent))) ** 2) * 2 / composer.n_points
        )
        backward = 8 * log_n * float(np.linalg.norm(masses)) + 8 * atom
        masses[place] += atom
        self.rounding = UNIT_ROUNDOFF * float(forward + power + backward)
        self.masses = np.roll(masses, -(first % composer.n_points))
        self.first_loss = offset + composer.spacing * first

    def upper_end(self, target: FloatArray, limit: float) -> tuple[float, float]:
        """The smallest epsilon looked at, and the first from there on, up to the limit, whose delta is proven below."""
        begin = max(self.first_loss, 0.0)
        _, found = invert_delta(
            lambda epsilon: self.delta(epsilon, upper=True),
            target,
            begin=begin,
            start=limit,
            limit=limit,
        )
        return begin, float(found[0])

    def delta(self, epsilon: FloatArray, *, upper: bool) -> FloatArray:
        """Bound of delta at one epsilon (1,), above or below."""
        value, tilt = float(epsilon[0]), self.composer.tilt
        if value < self.first_loss:  # what lies between would be folded to the right of the window
            return np.array([1.0 if upper else 0.0])
        spacing, n_points = self.composer.spacing, self.composer.n_points
        begin = int(np.clip(np.ceil((value - self.first_loss) / spacing), 0, n_points))
        excess = self.first_loss + spacing * np.arange(begin, n_points) - value
        weight = np.exp(-tilt * excess) * -np.expm1(-excess)
        unit = np.exp(min(self.scale - tilt * value, 600.0))
        found = float(weight @ self.masses[begin:])
        relative = (
            4 * (abs(self.scale) + tilt * abs(value) + 8) + n_points + _MASS_ERROR * self.steps
        )
        noise = self.rounding * float(np.linalg.norm(weight)) + UNIT_ROUNDOFF * relative * abs(
            found
        )
        end = self.first_loss + spacing * n_points
        if upper:
            missing = float(np.exp(min((self.higher - self.composer.higher * end).min(), 0.0)))
            return np.array([unit * (found + noise + self.lost) + missing + self.missed])
        noise += LOWER_EXCESS * self.steps * abs(found)
        heaviest = float(np.exp(log_largest_weight(np.array([tilt]))[0]))
        from_left = np.exp(min(tilt * self.first_loss - self.scale, 0.0))
        from_right = np.exp(
            min((self.higher - self.scale - (self.composer.higher - tilt) * end).min(), 0.0)
        )
        proven = unit * (found - noise - heaviest * float(from_left + from_right))
        return np.array([max(proven, 0.0)])
