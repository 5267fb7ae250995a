"""Tight epsilon of every example by its privacy loss distribution, with proven ends. Sensitive.

The first method whose bracket is tight for an example is used:

1. `loss_sum`: where even the sum of total variations is at most delta, epsilon is 0;
2. `closed_form`: Gaussian runs (every step unsampled), a single sampled step, two steps;
3. `laplace`: inversion of the Laplace transform of the loss, for all examples at once;
4. `loss_distribution`: discretised losses, for runs in which participation is rare;
5. the Renyi bound above and 0 below, flagged as a fallback: where there is almost no noise, or
   where the work that one call may do is used up before anything is proven.

Both neighbouring directions are bracketed and the larger epsilon counts; neither is assumed to
dominate under composition (Lebeda, Regehr, Kamath, Steinke 2024, arXiv:2405.20769).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv._progress import Advance, unheard
from indpriv.accountant.histogram.lattice import Lattice
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld import closed_form
from indpriv.accountant.pld.laplace import contour_brackets, contour_deltas
from indpriv.accountant.pld.loss_distribution import grid_brackets, grid_deltas
from indpriv.accountant.pld.loss_sum import DIRECTIONS, Bounds, Direction, LossSum
from indpriv.errors import InputError

CERTIFIED, CHECKED, FALLBACK = "certified", "checked", "fallback"

_TIGHT = 1e-6  # relative width of a contour's bracket at which an example needs no grid
_DISAGREEMENT = 1e-10  # relative, allowed between two step widths of a quadrature
_NO_DELTA = 1e-100  # a delta below this is not refined
_OTHER: dict[Direction, Direction] = {"remove": "add", "add": "remove"}
_TURNED_ERROR = 4e-16  # rounding of a sum of two shares of 1
_LARGEST_SHIFT = 64.0  # beyond it, one step alone would need millions of quadrature nodes
_LEAST_DELTA = float(np.finfo(np.float64).tiny)  # below it floats lose their precision
_MAX_STEPS = 1e8  # beyond it rounding of sums over steps would show in the brackets
_DEFECT = 'this is a defect of the accountant: please report it, and use accountant="rdp" meanwhile'


@dataclass(frozen=True)
class PldResult:
    """Epsilon of each example at one delta; all arrays have shape (n_examples,).

    Attributes:
        epsilon: what to report: epsilon_upper, since a reported number must not be too small.
        epsilon_lower, epsilon_upper: the exact epsilon of the recorded trajectory is between
            them. The upper end never exceeds the Renyi bound.
        bracket: "certified" (every error of truncation, discretisation, quadrature and rounding is
            bounded), "checked" (two quadratures agree; runs of two steps only) or "fallback"
            (Renyi above, 0 below).
    """

    epsilon: FloatArray
    epsilon_lower: FloatArray
    epsilon_upper: FloatArray
    bracket: NDArray[np.str_]


def pld_epsilon(
    participations: Participations,
    *,
    delta: float,
    rdp_upper: FloatArray,
    tolerance: float = 0.0,
    lattice: Lattice | None = None,
    grids: bool = True,
    advance: Advance = unheard,
) -> PldResult:
    """Bracket the (epsilon, delta) of every example of a block.

    Args:
        participations: the one-step mechanisms, and the number of steps that each example spent in
            each; whole numbers.
        delta: in (0, 1).
        rdp_upper: (n_examples,) upper bounds of epsilon at the same delta, e.g. Renyi bounds.
        tolerance: relative width of a bracket that is not narrowed further.
        lattice: that the mechanisms are nodes of, if steps are shared between them; shares need not
            be whole. Contours alone are tried.
        grids: whether grids are tried where contours are not tight.
        advance: called with the number of examples that are done since the last call, not all.

    Returns:
        the brackets.

    Raises:
        InputError: counts that are negative or not whole numbers, or delta outside (0, 1).
        ArithmeticError: two proven bounds contradict each other, which is a defect.

    >>> from indpriv.accountant.histogram.mechanisms import Participations
    >>> one, rate = np.array([1.0]), np.array([4096 / 50000])
    >>> run = Participations(one, 3 * one, rate, np.array([[3660.0]]))
    >>> result = pld_epsilon(run, delta=1e-5, rdp_upper=np.array([8.8806]))
    >>> round(float(result.epsilon[0]), 6), str(result.bracket[0])
    (8.249377, 'certified')
    """
    delta = _checks.check_delta(delta)
    _check_counts(participations.counts, whole=lattice is None)
    losses = LossSum.from_participations(participations, lattice)
    n = len(losses)
    lower, upper = np.zeros(n), np.full(n, np.inf)
    bracket = np.full(n, CERTIFIED, dtype="<U9")
    free = losses.total_variation_bound() <= delta * (1 - 1e-12)
    upper[free] = 0.0
    exact = closed_form.has_exact_form(losses) if lattice is None else losses.steps == 0
    short = np.flatnonzero(exact & ~free)
    if len(short):
        first, place = _distinct(losses.select(short))
        low, high = _exact_brackets(losses.select(short[first]), delta)
        lower[short], upper[short] = low[place], high[place]
        bracket[short[~closed_form.is_closed_form(losses.select(short))]] = CHECKED
    rest = np.flatnonzero(np.isinf(upper) & ~_is_noiseless(losses))
    if len(rest):
        first, place = _distinct(losses.rows(rest))
        grids = grids and lattice is None
        low, high = _composed_brackets(losses.rows(rest[first]), delta, tolerance, grids, advance)
        lower[rest], upper[rest] = low[place], high[place]
        bracket[rest] = CERTIFIED
    return _reported(lower, upper, bracket, np.asarray(rdp_upper, np.float64))


def pld_delta(
    participations: Participations,
    epsilon: FloatArray,
    *,
    directions: tuple[Direction, ...] = DIRECTIONS,
) -> Bounds:
    """Bracket delta at given epsilons for every example: the curve that `pld_epsilon` inverts.

    Args:
        participations: as for `pld_epsilon`.
        epsilon: (n_examples, k) real numbers. Brackets are tight at the middle one, and at others
            within a few standard deviations of the loss over 10. For a whole curve call this with
            k = 1 for each epsilon, or repeat the example.
        directions: neighbouring directions; delta is the larger one.

    Returns:
        the brackets.

    Raises:
        InputError: counts that are negative or not whole numbers, or an epsilon that is not finite.

    >>> one = np.ones(1)
    >>> run = Participations(one, 3 * one, 4096 / 50000 * one, np.array([[3660.0]]))
    >>> found = pld_delta(run, np.array([[8.2493771074]]))
    >>> bool(found.lower[0, 0] <= 1e-5 <= found.upper[0, 0] * (1 + 1e-9))
    True
    """
    _check_counts(participations.counts)
    if not np.all(np.isfinite(epsilon)):
        raise InputError("delta was requested at an epsilon that is not finite; pass real numbers")
    losses, epsilon = LossSum.from_participations(participations), np.asarray(epsilon, np.float64)
    lower, highest = np.zeros(epsilon.shape), []
    for direction in directions:
        low, high = _delta_bounds(losses, epsilon, direction, lower)
        least = np.where(_may_exceed(losses, epsilon, direction), _LEAST_DELTA, 0.0)
        lower = np.maximum(lower, low)
        highest.append(np.maximum(high, least))
    # At 0 delta is the total variation, which is the same in both directions.
    least, most = np.minimum.reduce(highest), np.maximum.reduce(highest)
    upper = np.asarray(np.where(epsilon == 0, least, most), np.float64)
    return Bounds(np.where(lower < _LEAST_DELTA, 0.0, lower), upper)


def _check_counts(counts: FloatArray, *, whole: bool = True) -> None:
    values = np.asarray(counts, np.float64)
    if whole and values.size and not (values.min() >= 0 and np.all(values == np.floor(values))):
        raise InputError(
            "counts of steps must be whole numbers of at least 0 for the tight accountant: a share "
            "of a step has a Renyi divergence but no loss distribution; round norms up, or use "
            'accountant="rdp"'
        )
    if values.size and values.sum(axis=1).max() > _MAX_STEPS:
        raise InputError(
            f"the tight accountant takes at most {_MAX_STEPS:g} steps, and a run here has more; "
            'use accountant="rdp"'
        )


def _distinct(losses: LossSum) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """One example of each distinct histogram, and which of them each example equals."""
    seen: dict[tuple[bytes, float], int] = {}
    rows = zip(losses.counts, losses.gaussian.tolist(), strict=True)
    place = [seen.setdefault((row.tobytes(), gaussian), len(seen)) for row, gaussian in rows]
    return np.unique(place, return_index=True)[1], np.array(place)


def _is_noiseless(losses: LossSum) -> NDArray[np.bool_]:
    """(n_examples,) whether some step has so little noise that no composition is attempted."""
    noiseless = losses.counts[:, losses.shift > _LARGEST_SHIFT]
    return np.asarray(noiseless.sum(axis=1) > 0)


def _exact_brackets(losses: LossSum, delta: float) -> tuple[FloatArray, FloatArray]:
    """Brackets of runs that have an exact form; 0 and inf where two step widths disagree."""
    error = closed_form.relative_error(losses)
    lower, upper, agreed = np.zeros(len(losses)), np.zeros(len(losses)), np.ones(len(losses), bool)
    for direction in DIRECTIONS:

        def delta_of(
            epsilon: FloatArray, rows: NDArray[np.intp], direction: Direction = direction
        ) -> FloatArray:
            return closed_form.exact_delta(losses.rows(rows), epsilon, direction)

        low, _ = closed_form.invert_delta(delta_of, delta * (1 + error))
        _, high = closed_form.invert_delta(delta_of, delta * (1 - error))
        lower, upper = np.maximum(lower, low), np.maximum(upper, high)
        plain, finer = (
            closed_form.exact_delta(losses, high, direction, per_unit=per_unit)
            for per_unit in (closed_form.PER_UNIT, 3 * closed_form.PER_UNIT // 2)
        )
        agreed &= np.abs(finer - plain) <= _DISAGREEMENT * delta
    agreed |= closed_form.is_closed_form(losses)
    return np.where(agreed, lower, 0.0), np.where(agreed, upper, np.inf)


def _composed_brackets(
    losses: LossSum, delta: float, tolerance: float, grids: bool, advance: Advance
) -> tuple[FloatArray, FloatArray]:
    """Brackets of composed runs: contours for all, then grids, if any, where they are not tight."""

    def half(more: float) -> None:
        advance(more / 2)

    remove = contour_brackets(losses, delta, "remove", tolerance, advance=half)
    add = contour_brackets(losses, delta, "add", tolerance, enough=remove.upper, advance=half)
    found = [remove, add]
    lower = np.maximum(*(bracket.lower for bracket in found))
    upper = np.maximum(*(bracket.upper for bracket in found))
    tight = max(_TIGHT, tolerance)
    open_ = np.flatnonzero(upper - lower > tight * upper)
    if len(open_) and grids:
        contours = [bracket.select(open_) for bracket in found]
        lower[open_], upper[open_] = _with_grids(losses.select(open_), delta, contours, tight)
    return lower, upper


def _with_grids(
    losses: LossSum, delta: float, contours: list[Bounds], tight: float
) -> tuple[FloatArray, FloatArray]:
    """Ends of epsilon after each direction that may be the larger one is made tight by a grid."""
    lower = np.maximum(*(contour.lower for contour in contours))
    upper = np.zeros_like(lower)
    for direction, contour in zip(DIRECTIONS, contours, strict=True):
        low, high = contour.lower.copy(), contour.upper.copy()
        needed = np.flatnonzero((high - low > tight * high) & (high > lower))
        if len(needed):
            grid = grid_brackets(losses.select(needed), delta, direction)
            low[needed] = np.maximum(low[needed], grid.lower)
            high[needed] = np.minimum(high[needed], grid.upper)
        if np.any(low > high * (1 + 1e-12)):
            raise ArithmeticError(
                f"in the {direction} direction the brackets of epsilon by a contour and by a grid "
                f"do not overlap; {_DEFECT}"
            )
        lower, upper = np.maximum(lower, np.minimum(low, high)), np.maximum(upper, high)
    return lower, upper


def _reported(
    lower: FloatArray, upper: FloatArray, bracket: NDArray[np.str_], rdp_upper: FloatArray
) -> PldResult:
    """The result, after all bounds have been compared with each other."""
    slack = 1e-9 * (1 + rdp_upper)  # rounding of the Renyi bound itself
    wrong = np.isnan(lower) | np.isnan(upper) | (lower > upper) | (lower > rdp_upper + slack)
    if wrong.any():
        example = int(wrong.argmax())
        raise ArithmeticError(
            f"bounds of epsilon contradict each other (example {example} of the block: lower "
            f"{lower[example]}, upper {upper[example]}, Renyi {rdp_upper[example]}); {_DEFECT}"
        )
    unproven = (lower <= 0) & (upper >= rdp_upper) & (rdp_upper > 0)
    upper = np.minimum(upper, rdp_upper)
    return PldResult(
        epsilon=upper,
        epsilon_lower=np.minimum(lower, upper),
        epsilon_upper=upper,
        bracket=np.where(unproven, FALLBACK, bracket),
    )


def _may_exceed(losses: LossSum, epsilon: FloatArray, direction: Direction) -> NDArray[np.bool_]:
    """(n, k) whether the loss can exceed epsilon at all, so that delta is above 0 if too small."""
    costs = np.greater(losses.steps + losses.gaussian, 0)
    unbounded = costs if direction == "remove" else np.greater(losses.gaussian, 0)
    highest = losses.counts @ -np.log1p(-losses.sample_rate) * (1 + 1e-12)
    return unbounded[:, None] | (costs[:, None] & (epsilon < highest[:, None]))


def _delta_bounds(
    losses: LossSum, epsilon: FloatArray, direction: Direction, least: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Bounds of delta (n, k) in one direction; below `least` (n, k) they need not be tight.

    Below 0 almost all of delta is 1 - exp(epsilon), whatever the loss; the rest is the delta of the
    other direction: delta(epsilon) = 1 - exp(epsilon) + exp(epsilon) * other(-epsilon).
    """
    lower, upper = np.zeros(epsilon.shape), np.ones(epsilon.shape)
    turned = epsilon[:, epsilon.shape[1] // 2] < 0
    plain, below = np.flatnonzero(~turned), np.flatnonzero(turned)
    if len(plain):
        lower[plain], upper[plain] = _delta_above_0(
            losses.select(plain), epsilon[plain], direction, least[plain]
        )
    if len(below):
        low, high = _delta_above_0(
            losses.select(below), -epsilon[below], _OTHER[direction], 0 * epsilon[below]
        )
        certain, rest = -np.expm1(epsilon[below]), np.exp(epsilon[below])
        lower[below] = np.clip(certain + rest * low - _TURNED_ERROR, 0.0, 1.0)
        upper[below] = np.minimum(certain + rest * high + _TURNED_ERROR, 1.0)
    return lower, upper


def _delta_above_0(
    losses: LossSum, epsilon: FloatArray, direction: Direction, least: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Bounds of delta (n, k) by the first method that is tight; for a middle epsilon above 0."""
    lower, upper = np.zeros(epsilon.shape), np.ones(epsilon.shape)
    short = np.flatnonzero(closed_form.has_exact_form(losses))
    if len(short):
        part = losses.select(short)
        error = closed_form.relative_error(part)
        for column in range(epsilon.shape[1]):
            found = closed_form.exact_delta(part, epsilon[short, column], direction)
            lower[short, column] = found * (1 - error)
            upper[short, column] = np.minimum(found * (1 + error), 1.0)
    rest = np.flatnonzero(~closed_form.has_exact_form(losses) & ~_is_noiseless(losses))
    if not len(rest):
        return lower, upper
    lower[rest], upper[rest] = contour_deltas(losses.select(rest), epsilon[rest], direction)
    middle = epsilon.shape[1] // 2
    most = upper[rest, middle]
    matters = (most > _NO_DELTA) & (upper[rest] > least[rest]).any(axis=1)
    open_ = rest[matters & (most - lower[rest, middle] > _TIGHT * most)]
    if len(open_):
        bound = np.log(upper[open_, middle])
        low, high = grid_deltas(losses.select(open_), epsilon[open_], direction, bound)
        lower[open_], upper[open_] = np.maximum(lower[open_], low), np.minimum(upper[open_], high)
    return np.minimum(lower, upper), upper
