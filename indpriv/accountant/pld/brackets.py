"""Tight epsilon of every example by its privacy loss distribution, with proven ends. Sensitive.

Each example goes to the first engine that settles it:

1. `loss_sum`: where even the sum of total variations is at most delta, epsilon is 0;
2. `exact`: Gaussian runs (every step unsampled), a single sampled step, two steps;
3. `laplace`: inversion of the Laplace transform of the loss, all examples at once;
4. `loss_distribution`: discretised losses, for runs in which participation is rare;
5. the Renyi bound above and 0 below, flagged as a fallback: where there is next to no noise, or where the work that a
   call may do is used up before anything is proven.

Both neighbouring directions are bracketed and the larger counts; neither is assumed to dominate under composition
(Lebeda, Regehr, Kamath, Steinke 2024, arXiv:2405.20769).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv.accountant.histogram.governing_records import Participations
from indpriv.accountant.pld import closed_form
from indpriv.accountant.pld.laplace import Bracket, contour_brackets, contour_deltas
from indpriv.accountant.pld.loss_distribution import grid_brackets, grid_deltas
from indpriv.accountant.pld.loss_sum import DIRECTIONS, Direction, LossSum
from indpriv.errors import InputError

CERTIFIED, CHECKED, FALLBACK = "certified", "checked", "fallback"

_SETTLED = 1e-6  # relative width of a contour's bracket with which an example needs no grid
_DISAGREEMENT = 1e-10  # relative, allowed between two step widths of a quadrature
_NO_DELTA = 1e-100  # below it nothing is refined
_OTHER: dict[Direction, Direction] = {"remove": "add", "add": "remove"}
_TURNED_ERROR = 4e-16  # rounding of a sum of two shares of 1
_LARGEST_SHIFT = 64.0  # beyond it, under next to no noise, one step alone would need millions of quadrature nodes
_LEAST_DELTA = float(np.finfo(np.float64).tiny)  # below it floats lose their precision
_MAX_STEPS = 1e8  # beyond it rounding of sums over steps would show in the brackets


@dataclass(frozen=True)
class PldResult:
    """Epsilon of each example at one delta; all arrays have shape (n_examples,).

    Attributes:
        epsilon: what to report: epsilon_upper, since a number that is shown must not be too small.
        epsilon_lower, epsilon_upper: the exact epsilon of the recorded trajectory lies between them. The upper end never
            exceeds the Renyi bound.
        bracket: "certified" (every error of truncation, discretisation, quadrature and rounding is bounded), "checked"
            (two quadratures agree; runs of two steps only) or "fallback" (Renyi above, 0 below).
    """

    epsilon: FloatArray
    epsilon_lower: FloatArray
    epsilon_upper: FloatArray
    bracket: NDArray[np.str_]


def pld_epsilon(
    participations: Participations, *, delta: float, rdp_upper: FloatArray
) -> PldResult:
    """Bracket the (epsilon, delta) of every example of a block.

    Args:
        participations: the one-step mechanisms, and in how many steps each example took part in each; whole numbers.
        delta: in (0, 1).
        rdp_upper: (n_examples,) upper bounds of epsilon at the same delta, for instance Renyi bounds.

    Returns:
        the brackets.

    Raises:
        InputError: counts that are not whole numbers, a negative count, or delta outside (0, 1).
        ArithmeticError: two proven bounds contradict each other: a defect, never a number in a report.

    >>> from indpriv.accountant.histogram.governing_records import Participations
    >>> one, rate = np.array([1.0]), np.array([4096 / 50000])
    >>> run = Participations(one, 3 * one, rate, np.array([[3660.0]]))
    >>> result = pld_epsilon(run, delta=1e-5, rdp_upper=np.array([8.8806]))
    >>> round(float(result.epsilon[0]), 6), str(result.bracket[0])
    (8.249377, 'certified')
    """
    delta = _checks.check_delta(delta)
    _check_counts(participations.counts)
    losses = LossSum.from_participations(participations)
    n = len(losses)
    lower, upper = np.zeros(n), np.full(n, np.inf)
    bracket = np.full(n, CERTIFIED, dtype="<U9")
    free = losses.total_variation_bound() <= delta * (1 - 1e-12)
    upper[free] = 0.0
    short = np.flatnonzero(closed_form.has_exact_form(losses) & ~free)
    if len(short):
        first, place = _distinct(losses.select(short))
        low, high, agreed = _exact_brackets(losses.select(short[first]), delta)
        lower[short], upper[short] = low[place], np.where(agreed, high, np.inf)[place]
        bracket[short[~closed_form.is_closed_form(losses.select(short))]] = CHECKED
    rest = np.flatnonzero(np.isinf(upper) & ~_is_noiseless(losses))
    if len(rest):
        lower[rest], upper[rest] = _composed_brackets(losses.select(rest), delta)
        bracket[rest] = CERTIFIED
    return _reported(lower, upper, bracket, np.asarray(rdp_upper, np.float64))


@dataclass(frozen=True)
class Bounds:
    """Proven bounds of a quantity of each example, (n_examples,) or (n_examples, k); the exact one lies between them."""

    lower: FloatArray
    upper: FloatArray


def pld_delta(
    participations: Participations,
    epsilon: FloatArray,
    *,
    directions: tuple[Direction, ...] = DIRECTIONS,
) -> Bounds:
    """Bracket delta at given epsilons for every example of a block: the curve that belongs to `pld_epsilon`.

    Args:
        participations: as for `pld_epsilon`.
        epsilon: (n_examples, k) real numbers; brackets are tight at the middle one, and at the others as far as they
            lie near it (within a few standard deviations of the loss over 10). For a whole curve call it with k = 1 for
            each epsilon, or repeat the example.
        directions: neighbouring directions; delta is the larger one.

    Returns:
        the brackets.

    Raises:
        InputError: counts that are not whole numbers or negative, or an epsilon that is not finite.

    >>> one = np.ones(1)
    >>> run = Participations(one, 3 * one, 4096 / 50000 * one, np.array([[3660.0]]))
    >>> found = pld_delta(run, np.array([[8.2493771074]]))
    >>> bool(found.lower[0, 0] <= 1e-5 <= found.upper[0, 0] * (1 + 1e-9))
    True
    """
    _check_counts(participations.counts)
    if not np.all(np.isfinite(epsilon)):
        raise InputError("delta is asked at an epsilon that is not finite; pass real numbers")
    losses = LossSum.from_participations(participations)
    lower, upper = np.zeros(epsilon.shape), np.zeros(epsilon.shape)
    for direction in directions:
        low, high = _delta_bounds(losses, np.asarray(epsilon, np.float64), direction)
        high = np.where(
            _may_exceed(losses, epsilon, direction), np.maximum(high, _LEAST_DELTA), high
        )
        lower, upper = np.maximum(lower, low), np.maximum(upper, high)
    return Bounds(np.where(lower < _LEAST_DELTA, 0.0, lower), upper)


def _may_exceed(losses: LossSum, epsilon: FloatArray, direction: Direction) -> NDArray[np.bool_]:
    """(n, k) whether the loss may exceed epsilon, however rarely: else delta is 0 and not merely too small for a float."""
    costs = np.greater(losses.steps + losses.gaussian, 0)
    endless = costs if direction == "remove" else np.greater(losses.gaussian, 0)
    highest = losses.counts @ -np.log1p(-losses.sample_rate) * (1 + 1e-12)
    result: NDArray[np.bool_] = endless[:, None] | (costs[:, None] & (epsilon < highest[:, None]))
    return result


def _is_noiseless(losses: LossSum) -> NDArray[np.bool_]:
    """(n_examples,) whether a step has so little noise that only exact forms or the Renyi bound apply."""
    result: NDArray[np.bool_] = np.greater(
        losses.counts[:, losses.shift > _LARGEST_SHIFT].sum(axis=1), 0
    )
    return result


def _delta_bounds(
    losses: LossSum, epsilon: FloatArray, direction: Direction
) -> tuple[FloatArray, FloatArray]:
    """Bounds of delta (n, k) in one direction.

    Below 0 almost all of delta is 1 - exp(epsilon), whatever the loss; what remains is the other direction's delta:
    delta(epsilon) = 1 - exp(epsilon) + exp(epsilon) * other(-epsilon).
    """
    lower, upper = np.zeros(epsilon.shape), np.ones(epsilon.shape)
    turned = epsilon[:, epsilon.shape[1] // 2] < 0
    for side in (False, True):
        rows = np.flatnonzero(turned == side)
        if not len(rows):
            continue
        if side:
            low, high = _delta_above_0(losses.select(rows), -epsilon[rows], _OTHER[direction])
            certain, rest = -np.expm1(epsilon[rows]), np.exp(epsilon[rows])
            low, high = certain + rest * low, np.minimum(certain + rest * high, 1.0)
            low, high = (
                np.clip(low - _TURNED_ERROR, 0.0, 1.0),
                np.minimum(high + _TURNED_ERROR, 1.0),
            )
        else:
            low, high = _delta_above_0(losses.select(rows), epsilon[rows], direction)
        lower[rows], upper[rows] = low, high
    return lower, upper


def _delta_above_0(
    losses: LossSum, epsilon: FloatArray, direction: Direction
) -> tuple[FloatArray, FloatArray]:
    """Bounds of delta (n, k) by the first engine that settles it; meant for a middle epsilon of at least 0."""
    lower, upper = np.zeros(epsilon.shape), np.ones(epsilon.shape)
    short = np.flatnonzero(closed_form.has_exact_form(losses))
    if len(short):
        part, error = losses.select(short), np.full(len(short), closed_form.CLOSED_FORM_ERROR)
        error[~closed_form.is_closed_form(part)] = closed_form.QUADRATURE_ERROR
        for column in range(epsilon.shape[1]):
            found = closed_form.exact_delta(part, epsilon[short, column], direction)
            lower[short, column], upper[short, column] = (
                found * (1 - error),
                np.minimum(found * (1 + error), 1.0),
            )
    rest = np.flatnonzero(~closed_form.has_exact_form(losses) & ~_is_noiseless(losses))
    if not len(rest):
        return lower, upper
    lower[rest], upper[rest] = contour_deltas(losses.select(rest), epsilon[rest], direction)
    middle = epsilon.shape[1] // 2
    width = upper[rest, middle] - lower[rest, middle]
    open_ = rest[(width > _SETTLED * upper[rest, middle]) & (upper[rest, middle] > _NO_DELTA)]
    if len(open_):
        bound = np.log(upper[open_, middle])
        low, high = grid_deltas(losses.select(open_), epsilon[open_], direction, bound)
        lower[open_], upper[open_] = np.maximum(lower[open_], low), np.minimum(upper[open_], high)
    return np.minimum(lower, upper), upper


def _reported(
    lower: FloatArray, upper: FloatArray, bracket: NDArray[np.str_], rdp_upper: FloatArray
) -> PldResult:
    """The result, after every bound has been held against the others."""
    slack = 1e-9 * (1 + rdp_upper)  # rounding of the Renyi bound itself
    wrong = np.flatnonzero(
        (lower > upper) | (lower > rdp_upper + slack) | np.isnan(lower) | np.isnan(upper)
    )
    if len(wrong):
        example = wrong[0]
        raise ArithmeticError(
            f"bounds of epsilon contradict each other (example {example} of the block: lower {lower[example]}, upper "
            f"{upper[example]}, Renyi {rdp_upper[example]}); this is a defect of the accountant: please report it, and "
            'use accountant="rdp" meanwhile'
        )
    unproven = (lower <= 0) & (upper >= rdp_upper) & (rdp_upper > 0)
    bracket = np.where(unproven, FALLBACK, bracket)
    upper = np.minimum(upper, rdp_upper)
    lower = np.minimum(lower, upper)
    return PldResult(epsilon=upper, epsilon_lower=lower, epsilon_upper=upper, bracket=bracket)


def _check_counts(counts: FloatArray) -> None:
    values = np.asarray(counts, np.float64)
    if values.size and not (values.min() >= 0 and np.all(values == np.floor(values))):
        raise InputError(
            "counts of steps must be whole numbers of at least 0 for the tight accountant; a share of a step has a Renyi "
            'divergence but no loss distribution: round norms up, or use accountant="rdp"'
        )
    if values.size and values.sum(axis=1).max() > _MAX_STEPS:
        raise InputError(
            f'a run of more than {_MAX_STEPS:g} steps cannot be bracketed; use accountant="rdp"'
        )


def _distinct(losses: LossSum) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """One example of each distinct histogram, and which of them each example equals."""
    keys = np.column_stack([losses.counts, losses.gaussian])
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return first, inverse.ravel()


def _exact_brackets(
    losses: LossSum, delta: float
) -> tuple[FloatArray, FloatArray, NDArray[np.bool_]]:
    """Brackets of runs that have an exact form, and whether quadratures of two step widths agreed."""
    closed = closed_form.is_closed_form(losses)
    error = np.where(closed, closed_form.CLOSED_FORM_ERROR, closed_form.QUADRATURE_ERROR)
    lower, upper, agreed = np.zeros(len(losses)), np.zeros(len(losses)), np.ones(len(losses), bool)
    for direction in DIRECTIONS:

        def delta_of(epsilon: FloatArray, direction: Direction = direction) -> FloatArray:
            return closed_form.exact_delta(losses, epsilon, direction)

        low, _ = closed_form.invert_delta(delta_of, delta * (1 + error))
        _, high = closed_form.invert_delta(delta_of, delta * (1 - error))
        lower, upper = np.maximum(lower, low), np.maximum(upper, high)
        finer = closed_form.exact_delta(
            losses, high, direction, per_unit=3 * closed_form.PER_UNIT // 2
        )
        agreed &= closed | (np.abs(finer - delta_of(high)) <= _DISAGREEMENT * delta)
    return lower, upper, agreed


def _composed_brackets(losses: LossSum, delta: float) -> tuple[FloatArray, FloatArray]:
    """Brackets of composed runs: contours for all, grids for those that they leave open."""
    found = {direction: contour_brackets(losses, delta, direction) for direction in DIRECTIONS}
    lower = np.maximum(found["remove"].lower, found["add"].lower)
    upper = np.maximum(found["remove"].upper, found["add"].upper)
    open_ = np.flatnonzero(upper - lower > _SETTLED * upper)
    if not len(open_):
        return lower, upper
    first, inverse = _distinct(losses.select(open_))
    low, high = _with_grids(
        losses.select(open_[first]), delta, [found[d].select(open_[first]) for d in DIRECTIONS]
    )
    lower[open_], upper[open_] = low[inverse], high[inverse]
    return lower, upper


def _with_grids(
    losses: LossSum, delta: float, contours: list[Bracket]
) -> tuple[FloatArray, FloatArray]:
    """Ends of epsilon, where each direction that may be the larger one and is not settled is put on a grid."""
    lower = np.maximum(*(contour.lower for contour in contours))
    upper = np.zeros_like(lower)
    for direction, contour in zip(DIRECTIONS, contours, strict=True):
        low, high = contour.lower.copy(), contour.upper.copy()
        needed = np.flatnonzero((high - low > _SETTLED * high) & (high > lower))
        if len(needed):
            grid = grid_brackets(losses.select(needed), delta, direction)
            low[needed], high[needed] = (
                np.maximum(low[needed], grid.lower),
                np.minimum(high[needed], grid.upper),
            )
        if np.any(low > high * (1 + 1e-12)):
            raise ArithmeticError(
                f"a contour and a grid bracket epsilon in the {direction} direction without overlap; this is a defect of "
                'the accountant: please report it, and use accountant="rdp" meanwhile'
            )
        lower, upper = np.maximum(lower, np.minimum(low, high)), np.maximum(upper, high)
    return lower, upper
