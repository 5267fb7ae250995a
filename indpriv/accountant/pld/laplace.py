"""Certified epsilon of composed runs by inverting the Laplace transform of the privacy loss. Sensitive.

    delta(epsilon) = 1 / (2 pi) * integral of exp(K(w) - w epsilon) / (w (w + 1)), w = tilt + i omega, tilt > 0,

because the Laplace transform of (1 - exp(-x))_+ is 1 / (w (w + 1)). K adds up over steps, so that K of all examples on a
contour is one complex matrix product. Examples share a contour by their best tilt and by how far it must reach. Every
error of the sum is bounded:

* aliasing: the infinite sum with spacing 2 pi / period equals the sum over all k of exp(tilt k period) *
  delta(epsilon + k period), all terms at least 0, so it only overstates delta; k < 0 sum to at most
  1 / (exp(tilt period) - 1), k > 0 are bounded by Chernoff at a larger tilt;
* truncation: by the proven decay of one step's transform (decay.py);
* quadrature of K and rounding: by the bounds of transform.py, weighted by the size of what they multiply.

The ends of a bracket are points where the bounds themselves prove delta(lower) >= delta >= delta(upper).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import real_axis, transform
from indpriv.accountant.pld.contour import Axis, Contour, Reach, alias_free_period
from indpriv.accountant.pld.loss_sum import Direction, LossSum
from indpriv.accountant.pld.real_axis import Problem, Scan
from indpriv.accountant.pld.work_budget import WorkBudget

_VALUES_AT_ONCE = 1 << 18  # of examples on a contour: 4 MB
_DECADES = 9.0  # nepers of delta within which examples share a cut


@dataclass(frozen=True)
class _Effort:
    """How hard to try.

    Attributes:
        cut: share of delta cut off (see real_axis.Problem).
        refinements: how often tilts may be refined.
        slack: nepers by which a shared tilt may be worse than an example's best one.
        max_nodes: on half a contour.
        tight: relative width of a bracket that is not tried again.
    """

    cut: float
    refinements: int
    slack: float
    max_nodes: int
    tight: float


_EFFORTS = (
    _Effort(0.0, 0, 2.0, 1024, 1e-7),
    _Effort(1e-7, 3, 6.0, 16384, 1e-6),
    _Effort(1e-4, 2, 6.0, 16384, 2e-5),
)
# Contour nodes times quadrature nodes of all kinds that an axis is worth; about 1e9 a second. The grids that would have
# to be made instead cost about as much for each example, and for each kind.
_WORK_PER_EXAMPLE, _WORK_PER_KIND = 3e8, 7e7
_MAX_WORK = 4e10  # that one axis is worth, whatever the number of examples
_MOST_WORK = 6e10  # that one call is worth


@dataclass(frozen=True)
class Bracket:
    """Proven bounds of epsilon in one direction, (n_examples,); solved says where they lie close together."""

    lower: FloatArray
    upper: FloatArray
    solved: NDArray[np.bool_]

    def select(self, examples: NDArray[np.intp]) -> Bracket:
        """The bracket of some examples only."""
        return Bracket(self.lower[examples], self.upper[examples], self.solved[examples])


def contour_brackets(losses: LossSum, delta: float, direction: Direction) -> Bracket:
    """Bracket epsilon(delta) of every example.

    Args:
        losses: the composed losses.
        delta: target.
        direction: "remove" or "add".

    Returns:
        the bracket, proven everywhere; where `solved` it is tight as well. Elsewhere, where no contour converges within
        the node limit, the upper end may be no better than the Chernoff bound, and the lower end 0.
    """
    lower, upper = np.zeros(len(losses)), np.full(len(losses), np.inf)
    solved, budget = np.zeros(len(losses), bool), WorkBudget(_MOST_WORK)
    for effort in _EFFORTS:
        remaining = np.flatnonzero(~solved)
        if not len(remaining):
            break
        problem = Problem(
            losses.select(remaining), np.full(len(remaining), np.log(delta)), direction, effort.cut
        )
        scan = real_axis.scan(problem)
        for refinement in range(effort.refinements + 1):
            if refinement:
                scan = real_axis.refine(scan, problem)
            found = _solve_on_contours(problem, scan, effort, budget)
            lower[remaining] = np.maximum(found.lower, lower[remaining])
            upper[remaining] = np.minimum(found.upper, upper[remaining])
            solved[remaining] = found.solved
            open_ = ~found.solved
            if not open_.any():
                break
            remaining, scan, problem = remaining[open_], scan.select(open_), problem.select(open_)
    return Bracket(lower, upper, solved)


def _solve_on_contours(
    problem: Problem, scan: Scan, effort: _Effort, budget: WorkBudget
) -> Bracket:
    """Brackets of the examples for which a tilt of the scan will do."""
    upper = np.maximum(scan.epsilon, 0.0)
    lower, solved = np.zeros_like(upper), upper == 0
    for rows, contour in _contours(problem, scan, ~solved, effort, budget):
        low, high = contour.solve(problem.log_delta[rows], problem.upper_goal[rows])
        lower[rows], upper[rows] = low, np.minimum(high, upper[rows])
        solved[rows] = upper[rows] - low <= effort.tight * upper[rows]
    return Bracket(lower, upper, solved)


def _contours(
    problem: Problem, scan: Scan, wanted: NDArray[np.bool_], effort: _Effort, budget: WorkBudget
) -> Iterator[tuple[NDArray[np.intp], Contour]]:
    """Contours for the wanted examples, a few at a time; none where no tilt will do or it would be too much work."""
    columns = np.where(wanted, scan.shared_columns(problem, effort.slack), -1)
    for column in np.unique(columns[columns >= 0]):
        examples = np.flatnonzero(columns == column)
        part, seen = problem.select(examples), scan.select(examples)
        period = alias_free_period(seen, column, problem.select(examples))
        reach = Reach.of(part, seen, column, period, effort.max_nodes)
        for group in _groups(reach.frequency * period / (2 * np.pi), period, effort.max_nodes):
            frequency, tail = reach.shared(group)
            alike, longest = part.select(group), float(period[group].max())
            work = _work(alike, seen, column, longest, frequency)
            if work > _worth(alike) or not budget.affords(work):
                continue
            axis = Axis.of(alike, seen, column, longest, frequency)
            at_once = max(1, _VALUES_AT_ONCE // len(axis.frequencies))
            for start in range(0, len(group), at_once):
                rows = np.arange(start, min(start + at_once, len(group)))
                losses = alike.losses.rows(rows)
                yield (
                    examples[group[rows]],
                    Contour.of(axis, losses, seen.select(group[rows]), column, tail[rows]),
                )


def _work(problem: Problem, scan: Scan, column: int, period: float, frequency: float) -> float:
    """What an axis for these examples costs: contour nodes times quadrature nodes of all kinds."""
    kinds = problem.kinds(scan.step_cut)
    if not len(kinds):
        return 0.0
    nodes = int(
        transform.count_nodes(kinds, float(scan.tilts[column]), problem.direction, frequency).max()
    )
    return nodes * len(kinds) * frequency * period / (2 * np.pi)


def _worth(problem: Problem) -> float:
    """What an axis for these examples may cost: no more than what would be tried instead."""
    return min(
        _WORK_PER_EXAMPLE * len(problem.losses) + _WORK_PER_KIND * len(problem.losses.shift),
        _MAX_WORK,
    )


def contour_deltas(
    losses: LossSum, epsilon: FloatArray, direction: Direction
) -> tuple[FloatArray, FloatArray]:
    """Bracket delta at several epsilons of every example.

    Args:
        losses: the composed losses.
        epsilon: (n_examples, k) any real numbers; the contour of an example is laid for the middle one, and its bracket
            is tight for others as far as the same contour serves them.
        direction: "remove" or "add".

    Returns:
        lower, upper: (n_examples, k), proven; 0 and the Chernoff bound or 1 where no contour converges.
    """
    anchor = epsilon[:, epsilon.shape[1] // 2]
    lower, upper = np.zeros_like(epsilon), np.ones_like(epsilon)
    log_delta, budget = np.zeros(len(losses)), WorkBudget(_MOST_WORK)
    for effort in _EFFORTS:
        middle = (lower[:, epsilon.shape[1] // 2], upper[:, epsilon.shape[1] // 2])
        remaining = np.flatnonzero(middle[1] - middle[0] > effort.tight * middle[1])
        decades = np.round(log_delta[remaining] / _DECADES)
        for decade in np.unique(
            decades if effort.cut else np.zeros_like(decades)
        ):  # a cut is made for the smallest delta
            examples = remaining[decades == decade] if effort.cut else remaining
            part = Problem(
                losses.select(examples),
                log_delta[examples],
                direction,
                effort.cut,
                anchor[examples],
            )
            low, high, bound = _deltas(part, epsilon[examples], effort, budget)
            lower[examples] = np.maximum(lower[examples], low)
            upper[examples] = np.minimum(upper[examples], high)
            log_delta[examples] = np.minimum(log_delta[examples], bound)
    return lower, upper


def _deltas(
    problem: Problem, epsilon: FloatArray, effort: _Effort, budget: WorkBudget
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Lower and upper delta (n, k), and log of an upper bound of the middle one."""
    scan = real_axis.scan(problem)
    if effort.cut:
        scan = real_axis.refine(scan, problem)
    lost = scan.step_cut * problem.losses.steps
    bound = np.log(
        np.exp(np.clip(scan.exponents().min(axis=1) + real_axis.ROUNDING, -600.0, 0.0)) + lost
    )
    problem = replace(problem, log_delta=np.minimum(bound, problem.log_delta))
    lower, upper = np.zeros_like(epsilon), np.ones_like(epsilon)
    upper[:, epsilon.shape[1] // 2] = np.exp(bound)
    for rows, contour in _contours(problem, scan, np.ones(len(bound), bool), effort, budget):
        for column in range(epsilon.shape[1]):
            low, high = contour.log_bounds(epsilon[rows, column])
            lower[rows, column] = np.exp(low)
            upper[rows, column] = np.minimum(
                np.exp(np.minimum(high, 0.0)) + lost[rows], upper[rows, column]
            )
    return (
        lower,
        upper,
        np.minimum(bound, np.log(np.maximum(upper[:, epsilon.shape[1] // 2], 1e-300))),
    )


def _groups(nodes: FloatArray, period: FloatArray, max_nodes: int) -> list[NDArray[np.intp]]:
    """Examples that may share one axis: alike in period and in node count; those beyond the limit in none."""
    possible = np.flatnonzero(nodes <= max_nodes)
    key = np.stack(
        [np.ceil(2 * np.log2(period[possible])), np.ceil(np.log2(np.maximum(nodes[possible], 16)))],
        axis=1,
    )
    _, inverse = np.unique(key, axis=0, return_inverse=True)
    return [possible[inverse.ravel() == group] for group in range(int(inverse.max(initial=-1)) + 1)]
