"""The transform of every example's privacy loss at real tilts: Chernoff bounds and the best tilt.

Chernoff: delta(epsilon) <= exp(K(tilt) - tilt epsilon) max_x exp(-tilt x) (1 - exp(-x)), which is
the Renyi bound of Canonne, Kamath and Steinke 2020 (arXiv:2004.00010v3, Proposition 12) at order
tilt + 1. The tilt of the best bound is near the saddle point of the inversion integral, where a
contour must cross the real axis. Sensitive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.pld import transform
from indpriv.accountant.pld.chords import chord_terms, features
from indpriv.accountant.pld.loss_sum import Cells, Direction, LossSum, StepLaws

ROUNDING = 1e-9  # more than the rounding of K of any run that has a finite bound

# All tilts are places of one series, so that all blocks and threads share what is computed there
_LOWEST_TILT = 1e-5  # for an epsilon of about 1e6
_HIGHEST_TILT = 1e11  # where delta is wanted: for losses of about 1e-10
_RATIO = 1.25 ** (1 / 8)  # of neighbouring places
NEAR_TILTS = 8  # places between the tilts of a scan, before it is refined
FAR_TILTS = 2 * NEAR_TILTS  # the same where little is asked of a contour
_COARSE = 3 * FAR_TILTS  # between those of a first scan, which only finds the range
_AT_ONCE = 4  # tilts of the first scan that are tried together
_INFINITE = 1e250


@dataclass
class WorkBudget:
    """The work that one call may still do, in elementary operations.

    It is never counted in seconds, so that results do not depend on the machine.
    """

    left: float

    def affords(self, work: float) -> bool:
        """Spend the work if enough is left; else keep what is left for smaller tasks."""
        if work > self.left:
            return False
        self.left -= work
        return True


@dataclass(frozen=True)
class Problem:
    """Losses to bracket in one direction.

    Attributes:
        losses: of all examples.
        log_delta: (n_examples,) logarithm of the delta at which epsilon is wanted, or of an upper
            bound of delta where delta itself is wanted.
        direction: "remove" or "add".
        cut: share of delta that is given up: every step's law is cut off so that a whole run goes
            beyond the cuts with probability at most cut * delta. What is proven for the cut law
            holds for delta within that share.
        epsilon: (n_examples,) where delta is wanted, or None where epsilon is.
    """

    losses: LossSum
    log_delta: FloatArray
    direction: Direction
    cut: float = 0.0
    epsilon: FloatArray | None = None

    def select(self, examples: NDArray[np.intp]) -> Problem:
        """The problem of some examples."""
        return replace(
            self,
            losses=self.losses.rows(examples),
            log_delta=self.log_delta[examples],
            epsilon=None if self.epsilon is None else self.epsilon[examples],
        )

    def step_cut(self) -> float:
        """The probability with which one step may go beyond its cut: a power of 2."""
        if not self.cut:
            return 0.0
        steps = float(self.losses.steps.max(initial=1.0))
        probability = self.cut * float(np.exp(self.log_delta.min(initial=0.0))) / steps
        return float(np.exp2(np.floor(np.log2(probability))))

    def laws(self, step_cut: float) -> StepLaws:
        """The one-step laws, cut where a step goes beyond with this probability; 0: whole laws."""
        laws = StepLaws(self.losses.shift, self.losses.sample_rate)
        return laws.cut_at(step_cut, self.direction) if step_cut > 0 and len(laws) else laws

    def chord_terms(self, needed: NDArray[np.bool_], place: int) -> FloatArray:
        """(n_laws, 7) `chord_terms` at a tilt's place, of the laws that are needed."""
        laws, cells = self.losses.laws, cast(Cells, self.losses.laws.cells)
        tilt = float(tilt_at(np.asarray(place)))

        def make(missing: NDArray[np.intp]) -> tuple[FloatArray]:
            return (chord_terms(cells.select(missing), tilt, self.direction),)

        return np.asarray(laws.rows(("chord", self.direction, place), needed, make)[0])

    @property
    def upper_goal(self) -> FloatArray:
        """(n_examples,) the log delta of the cut law that proves delta to be at most the target."""
        return self.log_delta + float(np.log1p(-self.cut))


@dataclass(frozen=True)
class Scan:
    """The real axis of all examples of a problem.

    Attributes:
        place: (n_tilts,) places of the tilts in the series of all tilts, rising.
        step_cut: the probability at which each step's law is cut.
        transform: (n_examples, n_tilts) K at each tilt; inf where it is too large to matter. Where
            steps are shared between laws, with what K may be larger by.
        best: (n_examples,) index of the tilt with the smallest Chernoff bound.
        epsilon: (n_examples,) the smallest Chernoff bound of epsilon, or the problem's epsilon.
    """

    place: IntArray
    step_cut: float
    transform: FloatArray
    best: NDArray[np.intp]
    epsilon: FloatArray

    @property
    def start(self) -> int:
        """Where to look for the best tilts of similar problems: somewhat below the lowest one."""
        return max(int(self.place[self.best].min()) // _COARSE - 1, 0) * _COARSE

    @property
    def tilts(self) -> FloatArray:
        """(n_tilts,) rising."""
        return tilt_at(self.place)

    def select(self, examples: NDArray[np.intp]) -> Scan:
        """The scan of some examples."""
        return replace(
            self,
            transform=self.transform[examples],
            best=self.best[examples],
            epsilon=self.epsilon[examples],
        )

    def exponents(self) -> FloatArray:
        """(n_examples, n_tilts) logarithm of the Chernoff bound of delta at epsilon."""
        with np.errstate(over="ignore"):
            shifted = self.transform - np.outer(self.epsilon, self.tilts)
        return np.asarray(shifted + log_largest_weight(self.tilts))

    def shared_columns(
        self, problem: Problem, slack: float, *, own: bool = False
    ) -> NDArray[np.int64]:
        """(n,) index of a tilt for each example, few different ones in all; -1 where none will do.

        A tilt will do if its Chernoff exponent at the example's epsilon is within `slack` nepers of
        the best one's, and if that of a neighbour of the best one is as well: else the grid is too
        coarse to know the best one. Those that all blocks try are taken first, unless the best ones
        of these examples are to be found (own).
        """
        excess = self.exponents() - problem.upper_goal[:, None]
        good = excess <= slack
        rows = np.arange(len(self.best))
        padded = np.pad(good, ((0, 0), (1, 1)))
        columns = np.full(len(rows), -1)
        remaining = rows[padded[rows, self.best] | padded[rows, self.best + 2]]
        preferred = (self.place % FAR_TILTS == 0) & (not own)
        while len(remaining):
            covers = good[remaining].sum(axis=0)
            if covers[preferred].any():  # so that all blocks take the same ones
                covers = np.where(preferred, covers, 0)
            total = np.where(good[remaining], excess[remaining], 0.0).sum(axis=0)
            mean = total / np.maximum(covers, 1)
            column = int(np.where(covers == covers.max(), mean, np.inf).argmin())
            covered = good[remaining, column]
            columns[remaining[covered]] = column
            remaining = remaining[~covered]
        return columns


def log_largest_weight(tilts: FloatArray) -> FloatArray:
    """Log of max over x of exp(-tilt x) (1 - exp(-x))."""
    return -tilts * np.log1p(1 / tilts) - np.log1p(tilts)


def tilt_at(place: IntArray) -> FloatArray:
    """Tilts at places of the series."""
    return np.asarray(_LOWEST_TILT * np.power(_RATIO, place))


def _place_above(tilt: float) -> int:
    return int(np.ceil(np.log(tilt / _LOWEST_TILT) / np.log(_RATIO)))


def scan(problem: Problem, *, beyond: float = 8.0, start: int = 0, apart: int = NEAR_TILTS) -> Scan:
    """K of every example on a geometric grid of tilts around the best ones.

    Args:
        problem: of the examples.
        beyond: the factor by which the grid goes beyond the largest of them.
        start: place in the series of all tilts from which they are looked for.
        apart: places between the tilts of the grid, NEAR_TILTS or FAR_TILTS.
    """
    highest = _HIGHEST_TILT
    if problem.epsilon is None:
        highest = 100 * float(np.exp(-problem.log_delta.min()))
    places = np.arange(start, _place_above(highest) + _COARSE, _COARSE)
    coarse = _scan_at(problem, places[:_AT_ONCE])
    for first in range(_AT_ONCE, len(places), _AT_ONCE):
        if np.all(coarse.best < first - 2):  # every example's bound has been rising for a while
            break
        more = _composed(problem, places[first : first + _AT_ONCE], coarse.step_cut)
        composed = np.hstack([coarse.transform, more])
        coarse = _bounded(problem, places[: first + _AT_ONCE], composed, coarse.step_cut)
    low, high = np.clip([coarse.best.min() - 1, coarse.best.max() + 1], 0, len(coarse.place) - 1)
    last = coarse.place[high] + _place_above(beyond * _LOWEST_TILT)
    return _scan_at(problem, np.arange(coarse.place[low], last + apart, apart))


def refine(old: Scan, problem: Problem, apart: int = 1) -> Scan:
    """The scan with more tilts around the best ones: K may climb decades between coarse tilts.

    apart: places between the new ones.
    """
    best = np.unique(old.best)
    beside = np.clip([best - 1, best + 1], 0, len(old.place) - 1)
    around = [np.arange(low, high + 1) for low, high in old.place[beside].T]
    added = np.setdiff1d(np.concatenate(around), old.place)
    added = added[added % apart == 0]
    place = np.concatenate([old.place, added])
    composed = np.hstack([old.transform, _composed(problem, added, old.step_cut)])
    order = np.argsort(place)
    return _bounded(problem, place[order], composed[:, order], old.step_cut)


def _scan_at(problem: Problem, place: IntArray) -> Scan:
    step_cut = problem.step_cut()
    return _bounded(problem, place, _composed(problem, place, step_cut), step_cut)


def _composed(problem: Problem, place: IntArray, step_cut: float) -> FloatArray:
    """(n_examples, n_tilts) K of the whole run."""
    losses, tilts = problem.losses, tilt_at(place)
    composed = np.outer(losses.gaussian / 2, tilts * (tilts + 1))
    needed = losses.used
    if needed.any():
        laws, direction = problem.laws(step_cut), problem.direction

        def make(missing: NDArray[np.intp], tilt: float, at: int) -> tuple[FloatArray]:
            found = np.full(len(missing), _INFINITE)
            usable = transform.is_representable(laws.select(missing), tilt, direction)
            found[usable] = transform.log_transforms(laws.select(missing[usable]), tilt, direction)
            if losses.laws.cells is not None:
                known = np.isin(np.arange(len(laws)), missing[usable])
                terms = problem.chord_terms(known, at)[missing[usable]]
                # No matrix product: its last bits would depend on the number of laws
                at_tilt = features(np.array(tilt + 0j), direction, 1.0)
                found[usable] += (terms[:, :5] * at_tilt).sum(axis=1)
            return (found,)

        table = np.empty((len(laws), len(tilts)))
        for column, tilt in enumerate(tilts):
            key = ("real", direction, step_cut, int(place[column]))
            work = partial(make, tilt=tilt, at=int(place[column]))
            made = losses.laws.rows(key, needed, work)
            table[:, column] = made[0]
        composed += losses.counts @ table
    composed[composed > _INFINITE / 2] = np.inf
    return composed


def _bounded(problem: Problem, place: IntArray, composed: FloatArray, step_cut: float) -> Scan:
    """The scan with the best Chernoff bound of each example."""
    rows, tilts = np.arange(len(composed)), tilt_at(place)
    if problem.epsilon is not None:
        unbound = Scan(place, step_cut, composed, rows, problem.epsilon)
        return replace(unbound, best=unbound.exponents().argmin(axis=1))
    weight = log_largest_weight(tilts)
    epsilon = (composed + weight - problem.upper_goal[:, None] + ROUNDING) / tilts
    best = epsilon.argmin(axis=1)
    return Scan(place, step_cut, composed, best, epsilon[rows, best])
