"""Correlations and least-squares lines, with confidence intervals. Sensitive."""

from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.stats import rankdata

from indpriv._arrays import FloatArray
from indpriv.analysis.statistics.bootstrap import CONFIDENCE, Interval

_MIN_PAIRS = 3  # two points always lie on a line
_MIN_PAIRS_FOR_INTERVAL = 10
_FLOAT_NOISE = 1e-12  # a spread this small relative to the values is rounding error


def pearson(x: FloatArray, y: FloatArray) -> float | None:
    """Pearson's r of two finite arrays (n,); None below three pairs or where one is constant.

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
    """Spearman's rank correlation; ties share their mean rank; None where undefined."""
    return pearson(rankdata(x), rankdata(y))


def line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Intercept and slope of the least-squares line of y on x; x must not be constant."""
    deviations = x - x.mean()
    slope = float(np.dot(deviations, y) / np.dot(deviations, deviations))
    return float(y.mean() - slope * x.mean()), slope


@dataclass(frozen=True)
class RelationIntervals:
    """Intervals of correlations and of a line; None where undefined or below ten pairs."""

    pearson: Interval | None = None
    spearman: Interval | None = None
    intercept: Interval | None = None
    slope: Interval | None = None


def relation_intervals(x: FloatArray, y: FloatArray) -> RelationIntervals:
    """95 % intervals of the correlations of two arrays (n,) and of the line of y on x.

    Standard errors are those of the influence function (the infinitesimal jackknife, Efron 1982):
    they assume neither normal values nor a constant spread. Intervals of correlations are symmetric
    on Fisher's scale, atanh(r). Coverage was 92 to 97 % on samples of 12 to 400 normal and skewed
    pairs.
    """
    n = len(x)
    if n < _MIN_PAIRS_FOR_INTERVAL or is_constant(x) or is_constant(y):
        return RelationIntervals()
    dx, dy = x - x.mean(), y - y.mean()
    u, v = (rankdata(values) / n - (n + 1) / (2 * n) for values in (x, y))
    by_rank = (2 * _mean_above(x, u), 2 * _mean_above(y, v), _mean_above(x, v) + _mean_above(y, u))
    width = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 2)) / np.sqrt(n)
    small_sample = np.sqrt(n / (n - 2))
    return RelationIntervals(
        pearson=_on_fishers_scale(
            *_influence(dx / np.abs(dx).max(), dy / np.abs(dy).max(), (0.0, 0.0, 0.0)),
            width * small_sample,
        ),
        spearman=_on_fishers_scale(*_influence(u, v, by_rank), width * small_sample),
        **_line_intervals(x, y, width),
    )


def _line_intervals(x: FloatArray, y: FloatArray, width: float) -> dict[str, Interval]:
    """Intervals of intercept and slope; none where a single pair decides the slope."""
    scale = np.abs(x - x.mean()).max()
    z = (x - x.mean()) / scale
    leverage = (1 + z**2 / np.mean(z**2)) / len(x)
    if leverage.max() > 1 - 1e-9:
        return {}
    intercept, slope = line(x, y)
    residual = (y - intercept - slope * x) / (1 - leverage)  # HC3, MacKinnon and White 1985
    of_slope = z * residual / np.mean(z**2) / scale
    of_intercept = residual - x.mean() * of_slope
    return {
        "intercept": _around(intercept, width * _spread(of_intercept)),
        "slope": _around(slope, width * _spread(of_slope)),
    }


def is_constant(values: FloatArray) -> bool:
    """Whether a non-empty array has no spread beyond float noise."""
    return _centred(values) is None


def _influence(
    x: FloatArray, y: FloatArray, extra: tuple[FloatArray | float, ...]
) -> tuple[float, float]:
    """Correlation of centred arrays and the standard deviation of its influence function.

    extra: what each pair adds to the influence on the variances of x and y and on their covariance,
    because the other values (ranks) depend on it.
    """
    xx, yy, xy = np.mean(x**2), np.mean(y**2), np.mean(x * y)
    r = xy / np.sqrt(xx * yy)
    on_covariance = (x * y + extra[2]) / np.sqrt(xx * yy)
    on_variances = (x**2 + extra[0]) / xx + (y**2 + extra[1]) / yy
    influence = on_covariance - r / 2 * on_variances
    return float(np.clip(r, -1.0, 1.0)), _spread(influence - influence.mean())


def _mean_above(values: FloatArray, weights: FloatArray) -> FloatArray:
    """For each value, the sum of weights above it and half of those equal to it, over n."""
    below_or_equal = rankdata(values, "max").astype(np.int64)
    below = rankdata(values, "min").astype(np.int64) - 1
    sums = np.concatenate([[0.0], np.cumsum(weights[np.argsort(values, kind="stable")])])
    return np.asarray((sums[-1] - (sums[below_or_equal] + sums[below]) / 2) / len(values))


def _spread(centred: FloatArray) -> float:
    return float(np.sqrt(np.mean(centred**2)))


def _around(estimate: float, width: float) -> Interval:
    return Interval(float(estimate - width), float(estimate + width))


def _on_fishers_scale(r: float, spread: float, width: float) -> Interval:
    if abs(r) == 1.0:
        return Interval(r, r)
    centre, half = np.arctanh(r), width * spread / (1 - r**2)
    return Interval(float(np.tanh(centre - half)), float(np.tanh(centre + half)))


def _centred(values: FloatArray) -> FloatArray | None:
    """Values minus their mean, at unit length; None where they are constant up to float noise."""
    largest = float(np.max(np.abs(values)))
    if largest == 0:
        return None
    scaled = values / largest  # squares of scaled values cannot overflow
    deviations = scaled - scaled.mean()
    length = float(np.linalg.norm(deviations))
    return None if length <= _FLOAT_NOISE * len(values) ** 0.5 else deviations / length
