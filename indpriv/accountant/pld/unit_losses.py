"""Epsilon of units of several rows by their privacy loss distributions: proven upper bounds.

The laws of mixture_law.py are composed on grids, as in grid_composition.py, in both neighbouring
directions. There is no lower bound: norms do not say how the gradients of a unit's rows point, and
if they cancel out the unit leaves no trace. Sensitive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.governing_norms import AT_CLIPPING_NORM, GoverningNorms
from indpriv.accountant.pld.grid_composition import Composer, GridLaws, Window
from indpriv.accountant.pld.loss_distribution import (
    LOG_TOLERANCE,
    MARGIN,
    may_tilt,
    window_lengths,
)
from indpriv.accountant.pld.loss_sum import DIRECTIONS, Direction
from indpriv.accountant.pld.mixture_law import MixtureLoss, SumLaw
from indpriv.accountant.pld.real_axis import log_largest_weight
from indpriv.norm_log.norm_log import NormLog

UPPER = "upper"  # a bracket whose upper end is certified, and whose lower end says little

_TAIL = 1e-8  # share of delta that is given to what the laws of a run leave out
_MOST_MISSED = 1e-6  # share of delta, three times _TAIL with a wide margin
_TILTS = np.geomspace(1e-4, 1e5, 120)
_POINTS = tuple(2**k for k in (14, 16, 18, 20))
_MOST_LAWS = 200  # of one unit; more are summarised
_MOST_BUCKETS = 1 << 22  # of the grid of one law


@dataclass(frozen=True)
class UnitSteps:
    """The steps of one unit.

    Attributes:
        shifts: (n_kinds, n_rows) contributions of its rows over the noise, by kind of step.
        sample_rate: (n_kinds,).
        counts: (n_kinds,) number of steps of each kind, whole numbers.
    """

    shifts: FloatArray
    sample_rate: FloatArray
    counts: FloatArray

    @classmethod
    def summarised(
        cls, shifts: FloatArray, sample_rate: FloatArray, counts: FloatArray
    ) -> UnitSteps:
        """Equal kinds of step are put together, and free ones are left out.

        More than _MOST_LAWS are put together by similar cost: each then counts at the largest
        shifts and the largest rate among its neighbours.
        """
        rows = np.column_stack([sample_rate, np.sort(shifts, axis=1)])[shifts.max(axis=1) > 0]
        steps = counts[shifts.max(axis=1) > 0]
        kinds, place = np.unique(rows, axis=0, return_inverse=True)
        steps = np.bincount(place.ravel(), weights=steps, minlength=len(kinds))
        if len(kinds) > _MOST_LAWS:
            order = np.argsort(kinds[:, 0] * kinds[:, 1:].sum(axis=1), kind="stable")
            parts = np.array_split(order, _MOST_LAWS)
            kinds = np.stack([kinds[part].max(axis=0) for part in parts])
            steps = np.array([steps[part].sum() for part in parts])
        return cls(kinds[:, 1:], kinds[:, 0], steps)


def unit_steps(norms: GoverningNorms, block: NormLog, starts: IntArray) -> Iterator[UnitSteps]:
    """The steps of the units whose rows are consecutive examples of a block.

    starts: (n_units,) position of each unit's first example.
    """
    values, settings = norms.read(block), norms.settings
    clip = settings.max_grad_norm[norms.setting][:, None]
    known = norms.record != AT_CLIPPING_NORM
    noise = settings.noise_multiplier[norms.setting][:, None]
    rate, steps = settings.sample_rate[norms.setting], norms.steps.astype(np.float64)
    for first, last in zip(starts, np.append(starts[1:], block.n_examples), strict=True):
        relative = np.ones((len(steps), last - first))
        own = values[norms.record[known], first:last]
        relative[known] = norms.codes.relative(own, np.broadcast_to(clip[known], own.shape))
        yield UnitSteps.summarised(relative / noise, rate, steps)


def unit_epsilon(unit: UnitSteps, delta: float, limit: float, tolerance: float) -> float:
    """Upper bound of a unit's epsilon.

    Args:
        unit: its steps.
        delta: in (0, 1).
        limit: another upper bound, which is never exceeded.
        tolerance: relative; no finer grid is tried where it would lower the bound by less.
    """
    if not len(unit.counts):
        return 0.0
    tail = tail_of(unit.counts, delta)
    laws = (
        [
            _loss(shifts.tobytes(), float(rate), tail, direction)
            for shifts, rate in zip(unit.shifts, unit.sample_rate, strict=True)
        ]
        for direction in DIRECTIONS
    )
    return composed_epsilon(laws, unit.counts, delta, limit, tolerance)


def tail_of(counts: FloatArray, delta: float) -> float:
    """Probability that the law of one of these numbers of steps may leave out."""
    return _TAIL * delta / float(counts.sum())


def composed_epsilon(
    directions: Iterable[Sequence[MixtureLoss | None]],
    counts: FloatArray,
    delta: float,
    limit: float,
    tolerance: float,
) -> float:
    """Upper bound of epsilon, the larger one of both directions.

    Args:
        directions: the laws of the kinds of step in each; None where there is none.
        counts: (n_kinds,) number of steps of each kind.
        delta: in (0, 1).
        limit: another upper bound, which is never exceeded.
        tolerance: see `unit_epsilon`.
    """
    found = 0.0
    for laws in directions:
        known = [law for law in laws if law is not None]
        if len(known) < len(laws):
            return limit
        found = max(found, _epsilon(known, counts, delta, found, tolerance))
    return min(found, limit)


@lru_cache(maxsize=512)
def _loss(shifts: bytes, rate: float, tail: float, direction: Direction) -> MixtureLoss | None:
    return MixtureLoss.of(SumLaw.of(np.frombuffer(shifts), rate, tail), tail, direction)


def _epsilon(
    laws: list[MixtureLoss],
    counts: FloatArray,
    delta: float,
    enough: float,
    tolerance: float,
) -> float:
    """Upper bound in one direction, but not below `enough`, a bound of the other direction."""
    missed = np.array([law.missed for law in laws])
    transform = counts @ np.stack([law.transforms(_TILTS) for law in laws])
    chernoff = transform + log_largest_weight(_TILTS)
    at_enough = float((chernoff - _TILTS * enough).min())
    if enough and np.exp(min(at_enough, 0.0)) * (1 + 1e-6) + counts @ missed <= delta:
        return enough
    log_delta = np.array([np.log(delta)])
    high = max(float(((chernoff - log_delta - np.log1p(-_MOST_MISSED)) / _TILTS).min()), 0.0)
    chernoff_end = high  # the Chernoff bound, which the first grids of a long run may not reach
    for n_points in _POINTS:
        window = _window(transform, high, log_delta)
        if window is None:
            break
        spacing = window.length / n_points
        if max(float(law.loss[-1] - law.loss[0]) for law in laws) > _MOST_BUCKETS * spacing:
            break
        grids = [law.grid(spacing) for law in laws]
        steps = GridLaws(
            laws[0].direction, log_delta, counts[None], missed, np.zeros(len(laws)), grids, []
        )
        before, high = high, min(high, Composer(steps, window, n_points).upper_end(0, high))
        if before - high <= tolerance * high and high < chernoff_end:
            break  # a finer one would gain less than a tenth of it
    return high


def _window(transform: FloatArray, epsilon: float, log_delta: FloatArray) -> Window | None:
    """The shortest window of all losses that matter near an epsilon; None if there is none."""
    exponent = (transform - _TILTS * epsilon)[None]
    goal = log_delta + LOG_TOLERANCE
    length = window_lengths(exponent, _TILTS, goal)
    allowed = may_tilt(exponent, log_delta)
    allowed[0, np.argmin(exponent[0] + log_largest_weight(_TILTS))] = True
    column = int(np.where(allowed, length, np.inf).argmin())
    if not np.isfinite(length[0, column]):
        return None
    tilt = float(_TILTS[column])
    left = -MARGIN * float(goal[0]) / tilt
    return Window(np.zeros(1, np.intp), tilt, left, float(length[0, column]))
