"""How many more records would bring a quantile to a target, from runs on nested subsets. Sensitive.

A line is fitted to the logarithm of a group's quantile over the logarithm of the number of training
examples (least squares over all runs), and drawn on beyond the data that there are. Runs keep batch
size, epochs, noise multiplier and clipping norm, so that the sampling rate falls as examples are
added. The interval is where the 95 % prediction limits of one more run meet the target; it treats
the runs as independent, though subsets of one seed share records, and cannot know whether the line
goes on.

A group whose quantile is the worst case in every run has no such line: the worst case follows from
the settings alone, does not fall as a power of the number of examples, and is computed instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from indpriv._plain import AtLeastZero, Count, Epsilon, Percent, Share, figure
from indpriv._types import FloatArray, OneOf
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics import CONFIDENCE

MOST_DATA = 10.0  # times what there is; the line is not drawn further
LEAST_RUNS = 3  # that a line with an interval needs
FOUND, BEYOND, RISES, UNKNOWN = "found", "beyond", "rises", "unknown"
_RATIO = 1.01  # of neighbouring numbers of records


@dataclass(frozen=True)
class SubsetReading:
    """A group in one run.

    Attributes:
        share: of the data that the run was trained on. seed: of the run and of the subset.
        n_all: number of its training examples.
        n: of them in the group.
        quantile: of the group's epsilons; None if there is nobody in it.
        at_worst_case: whether that is the worst case of the run.
    """

    share: Percent
    seed: int
    n_all: Count
    n: Count
    quantile: Epsilon | None
    at_worst_case: bool = False


@dataclass(frozen=True)
class RecordsNeeded:
    """How many times the data, all groups in proportion, would bring a group to the target.

    Attributes:
        status: "found"; "beyond" (not within ten times the data); "rises" (the quantile does not
            fall with more data, so that no number follows); or "unknown" (too few runs have ten of
            the group).
        factor: number of training examples over that of the whole data set; 1 if these are enough.
            None unless found. Of a group that is at the worst case in every run, that at which the
            worst case itself reaches the target.
        factor_low, factor_high: of the interval; None if beyond ten times the data.
        exponent: the quantile falls as this power of the number of examples; None if unknown, or
            without a line.
        largest_error: of the line, relative, at one of the runs.
        readings: of the runs; those with fewer than ten of the group have no part in the line.
    """

    status: Annotated[str, OneOf(FOUND, BEYOND, RISES, UNKNOWN)]
    factor: AtLeastZero | None
    factor_low: AtLeastZero | None
    factor_high: AtLeastZero | None
    exponent: Annotated[float, figure("+.2f")] | None
    largest_error: Share | None
    readings: tuple[SubsetReading, ...]


def records_needed(
    readings: Sequence[SubsetReading],
    n_whole: int,
    target: float,
    worst_case_at: Callable[[float], float],
) -> RecordsNeeded:
    """Fit the line of a group, and follow it to the target.

    Args:
        readings: of the group in every run.
        n_whole: number of training examples of the whole data set.
        target: positive.
        worst_case_at: the worst case of a run on the whole data times a factor.
    """
    used = [one for one in readings if one.quantile and one.n >= MIN_GROUP]
    if len(used) < LEAST_RUNS or len({one.n_all for one in used}) < 2:
        return RecordsNeeded(UNKNOWN, None, None, None, None, None, tuple(readings))
    steps = np.arange(int(np.log(MOST_DATA) / np.log(_RATIO)) + 1)
    factors: FloatArray = _RATIO ** steps.astype(np.float64)
    if all(one.at_worst_case for one in used):
        tried = factors.tolist()
        place = bisect_left(tried, True, key=lambda factor: worst_case_at(factor) <= target)
        enough = tried[place] if place < len(tried) else None
        status = BEYOND if enough is None else FOUND
        return RecordsNeeded(status, enough, enough, enough, None, None, tuple(readings))
    n_all, quantiles = np.array([(one.n_all, one.quantile) for one in used]).T
    line = _Line.of(np.log(n_all / n_whole), np.log(quantiles))
    middle, width = line.at(np.log(factors))
    low, found, high = (
        _first(factors, middle + side * width <= np.log(target)) for side in (-1, 0, 1)
    )
    status = FOUND if found is not None else BEYOND if line.slope < 0 else RISES
    return RecordsNeeded(
        status=status,
        factor=found,
        factor_low=low,
        factor_high=high,
        exponent=line.slope,
        largest_error=float(np.max(np.abs(np.expm1(line.residuals)))),
        readings=tuple(readings),
    )


def _first(factors: FloatArray, reached: NDArray[np.bool_]) -> float | None:
    return float(factors[np.argmax(reached)]) if reached.any() else None


@dataclass(frozen=True)
class _Line:
    """A least-squares line; residuals: (n,) of its points."""

    centre: float
    height: float
    slope: float
    spread: float
    residuals: FloatArray

    @classmethod
    def of(cls, x: FloatArray, y: FloatArray) -> _Line:
        centre, spread = float(x.mean()), float(np.square(x - x.mean()).sum())
        slope = float((x - centre) @ (y - y.mean())) / spread
        residuals = y - y.mean() - slope * (x - centre)
        return cls(centre, float(y.mean()), slope, spread, residuals)

    def at(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Heights of the line, and half the width of the prediction interval of one more point."""
        n, away = len(self.residuals), x - self.centre
        error = np.sqrt(np.square(self.residuals).sum() / (n - 2))
        factor = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 2))
        width = factor * error * np.sqrt(1 + 1 / n + np.square(away) / self.spread)
        return self.height + self.slope * away, width
