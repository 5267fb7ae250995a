"""Certified epsilon of composed runs by inverting the Laplace transform of the privacy loss.

    delta(epsilon) = 1 / (2 pi) * integral of exp(K(w) - w epsilon) / (w (w + 1)) over omega,

w = tilt + i omega, tilt > 0, because the Laplace transform of (1 - exp(-x))_+ is 1 / (w (w + 1)).
K adds up over steps, so that K of all examples on a contour is one complex matrix product. Examples
share a contour by their best tilt and by how far it must go. Every error of the sum is bounded:

* aliasing: the infinite sum with spacing 2 pi / period equals the sum over all k of
  exp(tilt k period) * delta(epsilon + k period), all terms at least 0, so it only overstates delta;
  k < 0 sum to at most 1 / (exp(tilt period) - 1), k > 0 are bounded by Chernoff at a larger tilt;
* truncation: by the proven decay of one step's transform (decay.py);
* quadrature of K and rounding: by the bounds of transform.py, weighted by the size of what they
  multiply.

The ends of a bracket are points at which the bounds themselves prove
delta(lower) >= delta >= delta(upper). Sensitive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv._progress import Advance, unheard
from indpriv.accountant.pld import real_axis
from indpriv.accountant.pld.contour import Axis, Contour, alias_free_period
from indpriv.accountant.pld.decay import Reach
from indpriv.accountant.pld.loss_sum import Bounds, Direction, LossSum
from indpriv.accountant.pld.quadrature import count_nodes
from indpriv.accountant.pld.real_axis import Problem, Scan, WorkBudget

_VALUES_AT_ONCE = 1 << 17  # of examples on a contour: 2 MB, which stay in cache
_NEPERS = 9.0  # of delta within which examples share a cut


@dataclass(frozen=True)
class _Effort:
    """One attempt; later ones take more work.

    Attributes:
        cut: share of delta cut off (see real_axis.Problem).
        refinements: the number of times that tilts may be refined.
        slack: nepers by which a shared tilt may be worse than an example's best one.
        max_nodes: on half a contour.
        tolerance: of aliasing and of truncation, relative to delta.
        tight: relative width of a bracket that is not tried again.
        apart: places between the tilts that are tried first.
        refined: places between those that are added by a refinement.
        own: whether tilts suit these examples, not all blocks.
    """

    cut: float
    refinements: int
    slack: float
    max_nodes: int
    tolerance: float
    tight: float
    apart: int = real_axis.NEAR_TILTS
    refined: int = 1
    own: bool = False


_ROUGH = 4e-4  # relative width of a bracket by shared steps that is wide
_FINE, _FINEST = 1e-6, 1e-10  # tolerance up to which errors of delta are this small at once


def _efforts(tolerance: float) -> list[_Effort]:
    """Attempts until a bracket is this tight, relative: errors of delta count less in epsilon."""
    rough = [
        _Effort(0.0, 0, 4.0, 4096, tolerance / 16, tolerance, real_axis.FAR_TILTS),
        _Effort(tolerance / 512, 1, 6.0, 4096, tolerance / 16, tolerance, real_axis.FAR_TILTS, 4),
        _Effort(tolerance / 512, 1, 6.0, 4096, tolerance / 512, tolerance),
    ]
    fine = [
        _Effort(0.0, 0, 2.0, 1024, _FINEST, 1e-7),
        _Effort(1e-7, 3, 6.0, 16384, _FINEST, 1e-6),
        _Effort(1e-4, 2, 6.0, 16384, _FINEST, 2e-5),
    ]
    if tolerance <= _FINE:
        return fine
    return rough + [replace(effort, tight=max(tolerance, effort.tight)) for effort in fine[1:]]


def _shared_efforts(tolerance: float) -> list[_Effort]:
    """The same where steps are shared between laws: at a tilt near the best one that counts less.

    Nothing is cut off, since that would depend on the law.
    """
    return [
        _Effort(0.0, 0, 1.0, 4096, 1e-5, max(_ROUGH, tolerance)),
        _Effort(0.0, 1, 0.3, 4096, 1e-5, max(_ROUGH / 2, tolerance), refined=4, own=True),
    ]


# Work is counted in contour nodes times quadrature nodes of all laws, about 1e9 a second. The grids
# that would be made instead of an axis cost about this much for each example and for each law
_WORK_PER_EXAMPLE, _WORK_PER_LAW = 3e8, 7e7
_MAX_WORK = 4e10  # on one axis, whatever the number of examples
_MOST_WORK = 6e10  # in one call


def contour_brackets(
    losses: LossSum,
    delta: float,
    direction: Direction,
    tolerance: float = 0.0,
    enough: FloatArray | float = 0.0,
    advance: Advance = unheard,
) -> Bounds:
    """Bracket epsilon(delta) of every example.

    Args:
        losses: the composed losses.
        delta: target.
        direction: "remove" or "add".
        tolerance: relative width of a bracket that is not narrowed further.
        enough: (n_examples,) an upper end that need not be lowered further.
        advance: called with the number of examples that are done since the last call, not all.

    Returns:
        the bracket, proven everywhere. Where no contour converges within the limit of nodes, the
        upper end may be no better than the Chernoff bound, and the lower end 0.
    """
    lower, upper = np.zeros(len(losses)), np.full(len(losses), np.inf)
    remaining, budget = np.arange(len(losses)), WorkBudget(_MOST_WORK)
    limit, start = np.broadcast_to(enough, upper.shape), 0
    efforts = _efforts(tolerance) if losses.laws.cells is None else _shared_efforts(tolerance)
    for effort in efforts:
        if not len(remaining):
            break
        log_delta = np.full(len(remaining), np.log(delta))
        problem = Problem(losses.rows(remaining), log_delta, direction, effort.cut)
        scan = real_axis.scan(problem, start=start, apart=effort.apart)
        start = scan.start
        upper[remaining] = np.minimum(np.maximum(scan.epsilon, 0.0), upper[remaining])
        open_ = np.flatnonzero(upper[remaining] > limit[remaining])
        advance(len(remaining) - len(open_))
        remaining, scan, problem = remaining[open_], scan.select(open_), problem.select(open_)
        for refinement in range(effort.refinements + 1):
            if refinement:
                scan = real_axis.refine(scan, problem, effort.refined)
            low, high = _solve_on_contours(problem, scan, effort, budget, advance)
            lower[remaining] = np.maximum(low, lower[remaining])
            upper[remaining] = np.minimum(high, upper[remaining])
            open_ = np.flatnonzero((high - low > effort.tight * high) | np.isinf(high))
            remaining, scan, problem = remaining[open_], scan.select(open_), problem.select(open_)
            if not len(open_):
                break
    return Bounds(lower, upper)


def _solve_on_contours(
    problem: Problem, scan: Scan, effort: _Effort, budget: WorkBudget, advance: Advance
) -> tuple[FloatArray, FloatArray]:
    """Brackets of epsilon by one tilt of the scan for each example."""
    upper = np.maximum(scan.epsilon, 0.0)
    lower = np.zeros_like(upper)
    for rows, contour in _contours(problem, scan, upper > 0, effort, budget):
        # Its square is what is left of an error of epsilon
        precision = float(np.sqrt(effort.tolerance)) / 32
        low, high = contour.solve(problem.log_delta[rows], problem.upper_goal[rows], precision)
        lower[rows], upper[rows] = low, np.minimum(high, upper[rows])
        advance(int(np.sum(upper[rows] - low <= effort.tight * upper[rows])))
    return lower, upper


def contour_deltas(
    losses: LossSum, epsilon: FloatArray, direction: Direction
) -> tuple[FloatArray, FloatArray]:
    """Bracket delta at several epsilons of every example.

    Args:
        losses: the composed losses.
        epsilon: (n_examples, k) any real numbers. The contour of an example is chosen for the
            middle one; the bracket is tight at the others as far as the same contour serves them.
        direction: "remove" or "add".

    Returns:
        lower, upper: (n_examples, k), proven; 0 and the Chernoff bound or 1 where no contour
        converges.
    """
    middle = epsilon.shape[1] // 2
    lower, upper = np.zeros_like(epsilon), np.ones_like(epsilon)
    log_delta, budget = np.zeros(len(losses)), WorkBudget(_MOST_WORK)
    for effort in _efforts(0.0):
        width = upper[:, middle] - lower[:, middle]
        remaining = np.flatnonzero(width > effort.tight * upper[:, middle])
        # A cut is made for the smallest delta, so that only examples of similar deltas share one
        size = np.round(log_delta[remaining] / _NEPERS) if effort.cut else 0.0 * remaining
        for value in np.unique(size):
            rows = remaining[size == value]
            part = Problem(
                losses.rows(rows), log_delta[rows], direction, effort.cut, epsilon[rows, middle]
            )
            low, high, bound = _deltas(part, epsilon[rows], effort, budget)
            lower[rows] = np.maximum(lower[rows], low)
            upper[rows] = np.minimum(upper[rows], high)
            log_delta[rows] = np.minimum(log_delta[rows], bound)
    return lower, upper


def _deltas(
    problem: Problem, epsilon: FloatArray, effort: _Effort, budget: WorkBudget
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Lower and upper delta (n, k), and log of an upper bound of the middle one."""
    middle, scan = epsilon.shape[1] // 2, real_axis.scan(problem)
    if effort.cut:
        scan = real_axis.refine(scan, problem)
    lost = scan.step_cut * problem.losses.steps
    chernoff = np.clip(scan.exponents().min(axis=1) + real_axis.ROUNDING, -600.0, 0.0)
    bound = np.log(np.exp(chernoff) + lost)
    problem = replace(problem, log_delta=np.minimum(bound, problem.log_delta))
    lower, upper = np.zeros_like(epsilon), np.ones_like(epsilon)
    upper[:, middle] = np.exp(bound)
    for rows, contour in _contours(problem, scan, np.ones(len(bound), bool), effort, budget):
        for column in range(epsilon.shape[1]):
            low, high = contour.log_bounds(epsilon[rows, column])
            above = np.exp(np.minimum(high, 0.0)) + lost[rows]
            lower[rows, column] = np.exp(low)
            upper[rows, column] = np.minimum(above, upper[rows, column])
    return lower, upper, np.minimum(bound, np.log(np.maximum(upper[:, middle], 1e-300)))


def _contours(
    problem: Problem, scan: Scan, wanted: NDArray[np.bool_], effort: _Effort, budget: WorkBudget
) -> Iterator[tuple[NDArray[np.intp], Contour]]:
    """Contours for the wanted examples, a few at a time.

    There is none where no tilt will do or where it would be too much work.
    """
    columns = scan.shared_columns(problem, effort.slack, own=effort.own)
    columns = np.where(wanted, columns, -1)
    log_tolerance = float(np.log(effort.tolerance))
    for column in np.unique(columns[columns >= 0]):
        examples = np.flatnonzero(columns == column)
        part, part_scan = problem.select(examples), scan.select(examples)
        period = alias_free_period(part_scan, column, part.log_delta, log_tolerance)
        reach = Reach.of(part, part_scan, column, log_tolerance)
        n_nodes = reach.frequencies[reach.place] * period / (2 * np.pi)
        possible = (reach.place >= 0) & (n_nodes <= effort.max_nodes)
        keys = np.column_stack([period, reach.place])[possible]
        shared, group = np.unique(keys, axis=0, return_inverse=True)
        for number, (longest, place) in enumerate(shared):
            alike = np.flatnonzero(possible)[group.ravel() == number]
            frequency = float(reach.frequencies[int(place)])
            chosen = part.select(alike)
            work = _work(chosen, scan, column, longest * frequency / (2 * np.pi), frequency)
            if work > _worth(chosen) or not budget.affords(work):
                continue
            axis = Axis.of(chosen, scan, column, float(longest), frequency)
            at_once = max(1, _VALUES_AT_ONCE // len(axis.frequencies))
            for start in range(0, len(alike), at_once):
                rows = alike[start : start + at_once]
                losses, row_scan = part.losses.rows(rows), part_scan.select(rows)
                contour = Contour.of(axis, losses, row_scan, column, reach.select(rows))
                yield examples[rows], contour


def _work(problem: Problem, scan: Scan, column: int, n_nodes: float, frequency: float) -> float:
    """What an axis for these examples costs."""
    needed = np.flatnonzero(problem.losses.used)
    if not len(needed):
        return 0.0
    largest = needed[[problem.losses.shift[needed].argmax()]]
    law, tilt = problem.laws(scan.step_cut).select(largest), float(scan.tilts[column])
    n_quadrature = int(count_nodes(law, tilt, problem.direction, frequency)[0])
    return n_nodes * len(needed) * n_quadrature


def _worth(problem: Problem) -> float:
    """What an axis for these examples may cost: no more than the grids that would replace it."""
    n_laws = int(problem.losses.used.sum())
    return min(_WORK_PER_EXAMPLE * len(problem.losses) + _WORK_PER_LAW * n_laws, _MAX_WORK)
