"""Ratios of mean epsilon between groups that are large enough to read. Sensitive."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from indpriv.analysis.groups.group_rows import MIN_GROUP, GroupRow
from indpriv.analysis.statistics.bootstrap import Interval, Resampled, ResampledMeans


@dataclass(frozen=True)
class Ratio:
    """Mean epsilon of one group over that of another.

    Attributes:
        worst, best: the two groups.
        value: None where undefined; reason says why.
        interval: bootstrap interval for these two groups. It does not account for choosing them as
            the extremes.
    """

    worst: str
    best: str
    value: float | None
    reason: str = ""
    interval: Interval | None = None


@dataclass(frozen=True)
class Ratios:
    """Ratios of mean epsilon between groups that are large enough to read.

    Attributes:
        raw: of the group with the largest mean to the one with the smallest.
        standardised: label-standardised, of the same two groups; below 1 the order reverses.
        standardised_spread: the largest label-standardised ratio of any two groups.
        lowest_accuracy: of the group with the lowest test accuracy to the one with the highest.
    """

    raw: Ratio | None
    standardised: Ratio | None
    standardised_spread: Ratio | None
    lowest_accuracy: Ratio | None


def ratios_of(
    rows: Sequence[GroupRow], order: Sequence[int], means: ResampledMeans, *, standardised: bool
) -> Ratios:
    """All ratios of a table; rows and means in the order of the group codes.

    `order` are the positions of the rows in the order of the table; `standardised` says whether
    there are label-standardised means.
    """
    positions = {rows[index].name: index for index in order}
    resampled = {
        name: index for name, index in positions.items() if rows[index].standardised.interval
    }
    rows = [rows[index] for index in order]
    raw = raw_ratio(rows, means.groups, positions)
    pair = spread = None
    if standardised:
        own = [row.standardised.mean for row in rows]
        spread = _with_interval(_extremes(rows, own), means.standardised, resampled)
    if standardised and raw is not None:
        by_name = {row.name: row.standardised.mean for row in rows}
        pair = _quotient(raw.worst, raw.best, by_name[raw.worst], by_name[raw.best])
        pair = _with_interval(pair, means.standardised, resampled)
    return Ratios(
        raw=raw,
        standardised=pair,
        standardised_spread=spread,
        lowest_accuracy=_with_interval(_lowest_accuracy(rows), means.groups, positions),
    )


def raw_ratio(
    rows: Sequence[GroupRow], means: Resampled, positions: dict[str, int]
) -> Ratio | None:
    """Largest over smallest raw mean; positions: of the groups among the resampled means."""
    return _with_interval(_extremes(rows, [row.epsilon.mean for row in rows]), means, positions)


def with_accuracy(rows: Sequence[GroupRow]) -> list[GroupRow]:
    """Groups that are large enough in training and test, lowest test accuracy first."""
    readable = [
        row
        for row in rows
        if not row.too_small and row.test_accuracy.share is not None and row.n_test >= MIN_GROUP
    ]
    return sorted(readable, key=lambda row: (row.test_accuracy.share or 0.0, row.name))


def _lowest_accuracy(rows: Sequence[GroupRow]) -> Ratio | None:
    """The paper's headline: do groups with worse accuracy have worse privacy?"""
    ordered = with_accuracy(rows)
    if len(ordered) < 2:
        return None
    low, high = ordered[0], ordered[-1]
    return _quotient(low.name, high.name, low.epsilon.mean, high.epsilon.mean)


def _extremes(rows: Sequence[GroupRow], means: Sequence[float | None]) -> Ratio | None:
    """Largest over smallest mean of the readable groups; None with fewer than two."""
    pairs = zip(rows, means, strict=True)
    readable = [(mean, row.name) for row, mean in pairs if mean is not None and not row.too_small]
    if len(readable) < 2:
        return None
    (low, best), (high, worst) = min(readable), max(readable)
    return _quotient(worst, best, high, low)


def _quotient(worst: str, best: str, high: float | None, low: float | None) -> Ratio:
    if high is None or low is None:
        return Ratio(worst, best, None, f"{worst if high is None else best} lacks a label")
    if low == 0:
        return Ratio(worst, best, None, f"the mean epsilon of {best} is 0")
    return Ratio(worst, best, high / low)


def _with_interval(
    ratio: Ratio | None, means: Resampled, positions: dict[str, int]
) -> Ratio | None:
    if ratio is None or ratio.value is None or not {ratio.worst, ratio.best} <= positions.keys():
        return ratio
    return replace(ratio, interval=means.ratio(positions[ratio.worst], positions[ratio.best]))
