"""Certified epsilon by discretised loss distributions, for a loss that is far from Gaussian.

Where participation is rare the transform of the loss decays too slowly for a contour (laplace.py),
but a grid resolves the loss well. This module chooses the windows of losses that the grids cover;
grid_composition.py composes the steps on them. Sensitive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import real_axis
from indpriv.accountant.pld.grid_composition import (
    HIGHER,
    Composer,
    GridLaws,
    Window,
    step_law,
)
from indpriv.accountant.pld.loss_sum import Bounds, Direction, LossSum
from indpriv.accountant.pld.real_axis import Problem, Scan, WorkBudget, log_largest_weight

_CUT = 1e-7  # share of delta given to losses beyond the ends of the steps' laws
LOG_TOLERANCE = np.log(1e-9)  # of what leaves the window, relative to delta
_POINTS = tuple(2**k for k in (14, 16, 18, 20, 21))
_TIGHT = 1e-5  # relative width at which no finer grid is tried
# A finer grid must narrow the bracket to this share of its width, or none finer is tried: rounding
# grows with the number of points
_PROGRESS = 0.8
# Work is counted in points, weighted by what they cost (about 1e-8 s each). A call may do this
# much, whatever the number of its examples, so that none takes hours; examples that are left over
# keep the wider bracket that is proven by then
_MOST_WORK = 3e9
_PER_BUCKET, _PER_LAW, _PER_EXAMPLE, _PER_SOLUTION = 150.0, 40.0, 2.0, 200.0
MARGIN = 1.5  # factor by which windows are longer than needed at the epsilon they are chosen for
_LARGEST_UNIT = 16.0  # nepers by which exp(K(tilt) - tilt epsilon) may exceed delta
_TILTS_BEYOND = 1e3  # factor above the best tilt up to which others are considered


def grid_brackets(losses: LossSum, delta: float, direction: Direction) -> Bounds:
    """Bracket epsilon(delta) of every example by composing discretised losses.

    Args:
        losses: the composed losses.
        delta: target.
        direction: "remove" or "add".

    Returns:
        the bracket, proven everywhere. The more examples and one-step laws there are, the coarser
        the grids that the work budget allows, and the wider the brackets.
    """
    problem = Problem(losses, np.full(len(losses), np.log(delta)), direction, _CUT)
    scan = real_axis.refine(real_axis.scan(problem, beyond=_TILTS_BEYOND), problem)
    lower, upper = np.zeros(len(losses)), np.maximum(scan.epsilon, 0.0)
    width = np.full(len(losses), np.inf)

    def open_examples() -> NDArray[np.intp]:
        nonlocal width
        improving = upper - lower < _PROGRESS * width
        width = np.where(improving, upper - lower, 0.0)
        return np.flatnonzero((upper - lower > _TIGHT * upper) & improving)

    for composer, row, example in _composed_examples(problem, scan, upper, open_examples):
        upper[example] = composer.upper_end(row, float(upper[example]))
        low = composer.lower_end(row, float(upper[example]))
        lower[example] = max(lower[example], low)
    return Bounds(lower, upper)


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
        lower[example] = np.maximum(lower[example], low)
        upper[example] = np.minimum(upper[example], high)
    return lower, upper


def _composed_examples(
    problem: Problem, scan: Scan, near: FloatArray, open_examples: Callable[[], NDArray[np.intp]]
) -> Iterator[tuple[Composer, int, int]]:
    """Yield (composer, row in it, example) for the examples still open, on ever finer grids.

    Args:
        problem: of all examples.
        scan: of its real axis.
        near: (n_examples,) epsilons that windows are chosen for; the caller may lower them in place
            between grids.
        open_examples: called before each finer grid.
    """
    budget = WorkBudget(_MOST_WORK)
    for n_points in _POINTS:
        open_ = open_examples()
        if not len(open_):
            return
        for window in _windows(problem.select(open_), scan.select(open_), near[open_]):
            examples = open_[window.examples]
            part = problem.select(examples)
            if budget.affords(_work(part, window, n_points)):
                laws = GridLaws.of(part, window.tilt, window.length / n_points)
                composer = Composer(laws, window, n_points)
                yield from ((composer, row, int(example)) for row, example in enumerate(examples))


def _windows(problem: Problem, scan: Scan, upper: FloatArray) -> list[Window]:
    """The shortest windows of all losses that matter for epsilons near `upper`.

    A larger tilt than the best one damps losses left of epsilon sooner, until it lifts those on the
    right or makes delta small compared with the terms of its sum.
    """
    goal = problem.log_delta + LOG_TOLERANCE
    rows = np.arange(len(upper))
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = scan.transform - np.outer(upper, scan.tilts)
    length = window_lengths(exponent, scan.tilts, goal)
    allowed = may_tilt(exponent, problem.log_delta)
    allowed[rows, scan.best] = True
    best = np.where(allowed, length, np.inf).argmin(axis=1)
    chosen = length[rows, best]
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(chosen), np.ceil(2 * np.log2(chosen)), np.inf)
    # An example with a Gaussian part shares no window: its Gaussian is a law of its own
    own = np.where(problem.losses.gaussian > 0, rows, -1)
    keys, place = np.unique(np.stack([best, size, own], axis=1), axis=0, return_inverse=True)
    windows = []
    for group, (column, log_length, _) in enumerate(keys):
        examples = np.flatnonzero(place.ravel() == group)
        if np.isfinite(log_length):
            tilt = float(scan.tilts[int(column)])
            left = -MARGIN * float(goal[examples].min()) / tilt
            windows.append(Window(examples, tilt, left, float(chosen[examples].max())))
    return windows


def window_lengths(exponent: FloatArray, tilts: FloatArray, goal: FloatArray) -> FloatArray:
    """(n_examples, n_tilts) lengths of windows that nothing that matters leaves; inf if unknown.

    Args:
        exponent: (n_examples, n_tilts) K(tilt) - tilt epsilon.
        tilts: (n_tilts,) rising.
        goal: (n_examples,) logarithm of what may leave a window.
    """
    length = np.full(exponent.shape, np.inf)
    for column, tilt in enumerate(tilts[:-1]):
        above = tilts[column + 1 :]
        usable = (above <= HIGHER[-1] * tilt) & (above >= HIGHER[0] * tilt)
        if usable.any():
            bound = exponent[:, column + 1 :][:, usable] + log_largest_weight(above[usable])
            right = ((bound - goal[:, None]) / (above[usable] - tilt)).min(axis=1)
            length[:, column] = MARGIN * (-goal / tilt + np.maximum(right, -goal / tilt / 2))
    return length


def may_tilt(exponent: FloatArray, log_delta: FloatArray) -> NDArray[np.bool_]:
    """(n_examples, n_tilts) whether delta is not too small compared with exp(exponent)."""
    allowed = exponent <= np.maximum(log_delta + _LARGEST_UNIT, 1.0)[:, None]
    return np.asarray(allowed)


def _work(problem: Problem, window: Window, n_points: int) -> float:
    """The work to compose a window's examples: laws on the grid, transforms, powers, solutions."""
    losses, buckets = problem.losses, 0.0
    for shift, rate in zip(losses.shift, losses.sample_rate, strict=True):
        step = step_law(problem, window.tilt, shift, rate, max(float(losses.steps.max()), 1.0))
        buckets += float(step.rise(step.high) - step.rise(step.low)) * n_points / window.length
    n_laws = len(losses.shift) + 1
    per_example = _PER_EXAMPLE * n_laws + _PER_SOLUTION
    return _PER_BUCKET * buckets + n_points * (_PER_LAW * n_laws + per_example * len(losses))
