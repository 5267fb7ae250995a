"""The transform of every example's privacy loss at real tilts: its Chernoff bounds, and the tilt that is best. Sensitive.

Chernoff: delta(epsilon) <= exp(K(tilt) - tilt epsilon) max_x exp(-tilt x) (1 - exp(-x)), which is the Renyi bound of
Canonne, Kamath and Steinke 2020 (arXiv:2004.00010v3, Proposition 12) at order tilt + 1. The tilt of the best bound is
near the saddle point of the inversion integral, where a contour must cross the real axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import transform
from indpriv.accountant.pld.loss_sum import Direction, LossSum
from indpriv.accountant.pld.transform import Kinds

_TILT_RATIO = 1.25  # of neighbouring tilts in a first scan
_COARSE = 6  # every so many of them a scan for their range looks
_LOWEST_TILT = 1e-5  # for an epsilon of about 1e6
_HIGHEST_TILT = 1e11  # where delta is wanted: for losses of about 1e-10
_REFINEMENT = 8  # times as many tilts around the best ones, when refined
ROUNDING = 1e-9  # more than the rounding of K of any run that has a finite bound
_INFINITE = 1e250


@dataclass(frozen=True)
class Problem:
    """Losses to bracket in one direction.

    Attributes:
        losses: of all examples.
        log_delta: (n_examples,) logarithm of the delta at which epsilon is wanted; where delta itself is wanted, of an
            upper bound of it.
        direction: "remove" or "add".
        cut: share of delta given up: every step's law is cut off so that a whole run goes beyond the cuts with
            probability at most cut * delta. What is proven for the cut law is proven for delta within that share.
        epsilon: (n_examples,) where delta is wanted, or None where epsilon is.
    """

    losses: LossSum
    log_delta: FloatArray
    direction: Direction
    cut: float = 0.0
    epsilon: FloatArray | None = None

    def select(self, examples: NDArray[np.intp] | NDArray[np.bool_]) -> Problem:
        """The problem of some examples only."""
        indices = np.flatnonzero(examples) if examples.dtype == np.bool_ else examples
        indices = indices.astype(np.intp)
        epsilon = None if self.epsilon is None else self.epsilon[indices]
        return Problem(
            self.losses.select(indices), self.log_delta[indices], self.direction, self.cut, epsilon
        )

    def step_cut(self) -> float:
        """The probability of going beyond the cut that one step may have."""
        steps = float(self.losses.steps.max(initial=1.0))
        return self.cut * float(np.exp(self.log_delta.min(initial=0.0))) / steps

    def kinds(self, step_cut: float) -> Kinds:
        """The one-step laws, cut where a step goes with this probability; 0 is nowhere."""
        kinds = Kinds(self.losses.shift, self.losses.sample_rate)
        return kinds.cut_at(step_cut, self.direction) if step_cut > 0 and len(kinds) else kinds

    @property
    def upper_goal(self) -> FloatArray:
        """(n_examples,) the log delta of the cut law below which delta itself is below the target."""
        return self.log_delta + float(np.log1p(-self.cut))


@dataclass(frozen=True)
class Scan:
    """The real axis of all examples of a problem.

    Attributes:
        tilts: (n_tilts,) rising.
        step_cut: the probability at which each step's law is cut.
        transform: (n_examples, n_tilts) K at each tilt; inf where it is too large to matter.
        best: (n_examples,) index of the tilt with the smallest Chernoff bound.
        epsilon: (n_examples,) the smallest Chernoff epsilon, an upper bound; or the problem's epsilon.
    """

    tilts: FloatArray
    step_cut: float
    transform: FloatArray
    best: NDArray[np.intp]
    epsilon: FloatArray

    def select(self, examples: NDArray[np.intp] | NDArray[np.bool_]) -> Scan:
        """The scan of some examples only."""
        return Scan(
            self.tilts,
            self.step_cut,
            self.transform[examples],
            self.best[examples],
            self.epsilon[examples],
        )

    def exponents(self) -> FloatArray:
        """(n_examples, n_tilts) logarithm of the Chernoff bound of delta at epsilon."""
        with np.errstate(over="ignore"):
            bound: FloatArray = (
                self.transform - np.outer(self.epsilon, self.tilts) + log_largest_weight(self.tilts)
            )
        return bound

    def shared_columns(self, problem: Problem, slack: float) -> NDArray[np.int64]:
        """(n,) index of a tilt for each example, few different ones in all; -1 where no grid point will do.

        A tilt will do if its Chernoff exponent at the example's epsilon is within `slack` nepers of the best one's, and
        if a neighbour of the best one is as well: else the grid is too coarse to know the best one.
        """
        excess = self.exponents() - problem.upper_goal[:, None]
        good = excess <= slack
        rows = np.arange(len(self.best))
        padded = np.pad(good, ((0, 0), (1, 1)))
        columns = np.full(len(rows), -1)
        remaining = rows[padded[rows, self.best] | padded[rows, self.best + 2]]
        while len(remaining):
            covers = good[remaining].sum(axis=0)
            mean = np.where(good[remaining], excess[remaining], 0.0).sum(axis=0) / np.maximum(
                covers, 1
            )
            column = int(np.where(covers == covers.max(), mean, np.inf).argmin())
            covered = good[remaining, column]
            columns[remaining[covered]] = column
            remaining = remaining[~covered]
        return columns


def log_largest_weight(tilts: FloatArray) -> FloatArray:
    """Log of max over x of exp(-tilt x) (1 - exp(-x))."""
    result: FloatArray = -tilts * np.log1p(1 / tilts) - np.log1p(tilts)
    return result


def scan(problem: Problem, *, beyond: float = 8.0) -> Scan:
    """K of every example on a geometric grid of tilts that holds its best Chernoff bound, and reaches beyond it."""
    highest = (
        _HIGHEST_TILT
        if problem.epsilon is not None
        else 100 * float(np.exp(-problem.log_delta.min()))
    )
    tilts = np.geomspace(
        _LOWEST_TILT, highest, int(np.log(highest / _LOWEST_TILT) / np.log(_TILT_RATIO) / _COARSE)
    )
    coarse = _scan_at(problem, tilts)
    low = tilts[max(int(coarse.best.min()) - 1, 0)]
    high = tilts[min(int(coarse.best.max()) + 1, len(tilts) - 1)] * beyond
    return _scan_at(
        problem,
        low * _TILT_RATIO ** np.arange(np.ceil(np.log(high / low) / np.log(_TILT_RATIO)) + 1),
    )


def refine(old: Scan, problem: Problem) -> Scan:
    """The scan with more tilts around every example's best one: K may climb decades between two coarse tilts."""
    between = np.arange(1, _REFINEMENT) / _REFINEMENT
    best = np.unique(old.best)
    lower = np.unique(np.concatenate([best[best > 0] - 1, best[best < len(old.tilts) - 1]]))
    low, high = old.tilts[lower, None], old.tilts[lower + 1, None]
    added = (low * (high / low) ** between).ravel()
    tilts = np.concatenate([old.tilts, added])
    order = np.argsort(tilts)
    composed = np.concatenate([old.transform, _composed(problem, added, old.step_cut)], axis=1)[
        :, order
    ]
    return _bounded(problem, tilts[order], composed, old.step_cut)


def _scan_at(problem: Problem, tilts: FloatArray) -> Scan:
    step_cut = problem.step_cut()
    return _bounded(problem, tilts, _composed(problem, tilts, step_cut), step_cut)


def _composed(problem: Problem, tilts: FloatArray, step_cut: float) -> FloatArray:
    """(n_examples, n_tilts) K of the whole run."""
    losses = problem.losses
    composed = np.outer(losses.gaussian / 2, tilts * (tilts + 1))
    kinds = problem.kinds(step_cut)
    if len(kinds):
        table = np.full((len(kinds), len(tilts)), _INFINITE)
        for column, tilt in enumerate(tilts):
            usable = transform.is_representable(kinds, tilt, problem.direction)
            if usable.any():
                part = kinds.select(usable)
                table[usable, column] = transform.tilted_law(
                    part, tilt, problem.direction
                ).log_transform
        composed += losses.counts @ table
    composed[composed > _INFINITE / 2] = np.inf
    return composed


def _bounded(problem: Problem, tilts: FloatArray, composed: FloatArray, step_cut: float) -> Scan:
    """The scan with the best Chernoff bound of each example."""
    if problem.epsilon is not None:
        unbound = Scan(tilts, step_cut, composed, np.zeros(len(composed), np.intp), problem.epsilon)
        return Scan(tilts, step_cut, composed, unbound.exponents().argmin(axis=1), problem.epsilon)
    epsilon = (
        composed + log_largest_weight(tilts) - problem.upper_goal[:, None] + ROUNDING
    ) / tilts
    best = epsilon.argmin(axis=1)
    return Scan(
        tilts, step_cut, composed, best, np.take_along_axis(epsilon, best[:, None], axis=1)[:, 0]
    )
