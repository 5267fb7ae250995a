"""Correlations and lines that say when they are undefined, with bootstrap intervals. Output is sensitive."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from indpriv._arrays import FloatArray, IntArray
from indpriv.analysis.statistics.resampling import CONFIDENCE, Interval

_MIN_PAIRS = 3  # two points always lie on a line
_LEAST_PAIRS = 10  # below, resampling says nothing
_DRAWS = 1000
_EXACT = 4096  # up to so many pairs each is resampled by itself; beyond, cells of a grid of quantiles are
_BINS = 128  # quantiles on each axis of that grid; ranks within a bin differ by less than 1 % of n
_CHUNK = 2_000_000  # weights held at once
_FLOAT_NOISE = 1e-12  # a spread this small beside the values themselves is rounding, not signal


def pearson(x: FloatArray, y: FloatArray) -> float | None:
    """Pearson's r of two finite arrays of shape (n,); None with fewer than three pairs or where one is constant.

    >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    1.0
    >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([5.0, 5.0, 5.0])) is None
    True
    """
    if len(x) < _MIN_PAIRS:
        return None
    centred = [_centred(values) for values in (x, y)]
    if centred[0] is None or centred[1] is None:
        return None
    return float(np.clip(np.dot(centred[0], centred[1]), -1.0, 1.0))


def spearman(x: FloatArray, y: FloatArray) -> float | None:
    """Spearman's rank correlation (ties share their mean rank); None where `pearson` of the ranks is undefined."""
    return pearson(rankdata(x), rankdata(y))


@dataclass(frozen=True)
class RelationIntervals:
    """Percentile intervals of a Poisson bootstrap of pairs (x, y); each None where undefined or with fewer than ten pairs."""

    pearson: Interval | None = None
    spearman: Interval | None = None
    intercept: Interval | None = None
    slope: Interval | None = None


def relation_intervals(x: FloatArray, y: FloatArray, rng: np.random.Generator) -> RelationIntervals:
    """Intervals of the correlations of two finite arrays (n,) and of the least-squares line y = intercept + slope x.

    Every pair weighs a Poisson(1) variable in each of 1,000 draws (Hanley and MacGibbon 2006). More than 4,096 pairs are
    resampled as cells of a grid of quantiles, and the intervals moved by what the grid changes in the estimate.
    """
    if len(x) < _LEAST_PAIRS or is_constant(x) or is_constant(y):
        return RelationIntervals()
    x_mean, y_mean = float(x.mean()), float(y.mean())
    cells = _cells(x - x_mean, y - y_mean)
    at_once = max(1, _CHUNK // len(cells.sizes))
    draws = np.concatenate(
        [
            cells.statistics(
                rng.poisson(cells.sizes, (min(at_once, _DRAWS - start), len(cells.sizes))).astype(
                    np.float64
                )
            )
            for start in range(0, _DRAWS, at_once)
        ]
    )
    binned = cells.statistics(cells.sizes[None].astype(np.float64))[0]
    slope = float(np.dot(x - x_mean, y - y_mean) / np.dot(x - x_mean, x - x_mean))
    exact = np.array([pearson(x, y) or 0.0, spearman(x, y) or 0.0, y_mean - slope * x_mean, slope])
    draws[:, 2] += y_mean - draws[:, 3] * x_mean
    binned[2] += y_mean - binned[3] * x_mean
    tail = (1 - CONFIDENCE) / 2
    found: list[Interval | None] = []
    for column, shift in zip(draws.T, exact - binned, strict=True):
        kept = column[np.isfinite(column)]
        if len(kept) < _DRAWS // 2:
            found.append(None)
            continue
        low, high = (float(value + shift) for value in np.quantile(kept, (tail, 1 - tail)))
        found.append(Interval(low, high))
    return RelationIntervals(_within_one(found[0]), _within_one(found[1]), found[2], found[3])


def _within_one(interval: Interval | None) -> Interval | None:
    return None if interval is None else Interval(max(-1.0, interval.low), min(1.0, interval.high))


@dataclass(frozen=True)
class _Cells:
    """Pairs taken together: how many, their mean moments, and the bin of each axis they lie in.

    moments: (n_cells, 5) means of x, y, x^2, y^2 and x y; bins: for x and y, the bin of each cell.
    """

    sizes: IntArray
    moments: FloatArray
    bins: tuple[IntArray, IntArray]

    def statistics(self, weights: FloatArray) -> FloatArray:
        """Pearson, Spearman, intercept and slope of every row of weights (n_draws, n_cells)."""
        total = weights.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            x, y, xx, yy, xy = (weights @ self.moments / total[:, None]).T
            slope = (xy - x * y) / (xx - x**2)
            linear = (xy - x * y) / np.sqrt((xx - x**2) * (yy - y**2))
            ranks = [_ranks(weights, bins) for bins in self.bins]
            centred = [rank - total[:, None] / 2 for rank in ranks]
            products = [
                np.einsum("ij,ij,ij->i", weights, centred[i], centred[j])
                for i, j in ((0, 1), (0, 0), (1, 1))
            ]
            ranked = products[0] / np.sqrt(products[1] * products[2])
            found = np.stack([linear, ranked, y - slope * x, slope], axis=1)
        return np.where(np.isfinite(found), found, np.nan)


def _ranks(weights: FloatArray, bins: IntArray) -> FloatArray:
    """Mean rank of the bin of each cell under each row of weights, up to a constant."""
    order = np.argsort(bins, kind="stable")
    starts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    sums = np.add.reduceat(weights[:, order], starts, axis=1)
    middle = np.cumsum(sums, axis=1) - sums / 2
    return np.asarray(middle[:, np.searchsorted(bins[order][starts], bins)], dtype=np.float64)


def _cells(x: FloatArray, y: FloatArray) -> _Cells:
    x_bins, y_bins = (_bins_of(values) for values in (x, y))
    if len(x) <= _EXACT:
        codes = np.arange(len(x))
    else:
        codes = np.unique(x_bins * (y_bins.max() + 1) + y_bins, return_inverse=True)[1]
    sizes = np.bincount(codes)
    moments = np.stack(
        [np.bincount(codes, weights=part) / sizes for part in (x, y, x * x, y * y, x * y)], axis=1
    )
    first = np.zeros(len(sizes), dtype=np.int64)
    first[codes] = np.arange(len(codes))
    return _Cells(sizes, moments, (x_bins[first], y_bins[first]))


def _bins_of(values: FloatArray) -> IntArray:
    """Bin of each value: its place among the distinct values, or its quantile where there are many; ties share one."""
    if len(values) <= _EXACT:
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    inner = np.unique(np.quantile(values, np.linspace(0, 1, _BINS + 1)[1:-1]))
    return np.searchsorted(inner, values, side="right").astype(np.int64)


def is_constant(values: FloatArray) -> bool:
    """Whether a non-empty array has no spread beyond float noise."""
    return _centred(values) is None


def _centred(values: FloatArray) -> FloatArray | None:
    """Values minus their mean, at unit length; None where they are constant up to float noise."""
    largest = float(np.max(np.abs(values)))
    if largest == 0:
        return None
    scaled = values / largest  # squares of scaled values cannot overflow
    deviations = scaled - scaled.mean()
    length = float(np.linalg.norm(deviations))
    return None if length <= _FLOAT_NOISE * len(values) ** 0.5 else deviations / length
