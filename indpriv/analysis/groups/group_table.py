"""Who is worse off: epsilon, loss and accuracy by group, raw, within label and label-standardised. Sensitive.

A raw table alone misleads: where groups differ in their labels and labels differ in epsilon, the
order of the groups can reverse within a label (Simpson's paradox). Label-standardised means ask
what a group's mean epsilon would be if it had the label shares of the whole training set (direct
standardisation).

Intervals and tests take the examples of the run as a sample: they say how much the composition of a
group matters, not how another training run of the same model would come out.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from indpriv._arrays import FloatArray
from indpriv._checks import check_positive_int
from indpriv._columns import Partition, partition, to_floats
from indpriv._plain import Count, Share
from indpriv.analysis.groups.group_rows import MIN_GROUP, GroupRow, Values, describe_groups
from indpriv.analysis.groups.reversal import Reversal, find_reversals
from indpriv.analysis.statistics.correlation import spearman
from indpriv.analysis.statistics.resampling import (
    CONFIDENCE,
    Interval,
    Resampled,
    ResampledMeans,
    SpreadTest,
    holm,
    permutation_test,
    resample_means,
)
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError

_MAX_LABELS = 100  # more distinct labels than this is a regression target, not a class
_MAX_WITHIN_ROWS = 20_000  # rows of all tables within label together; nobody reads more
_ORDERS = (
    9_999  # random orders that a rank correlation is held against; every order up to seven groups
)


@dataclass(frozen=True)
class Ratio:
    """Mean epsilon of one group over that of another.

    Attributes:
        worst, best: the two groups.
        value: None where undefined; reason says why.
        interval: bootstrap interval for these two groups; that they were picked as the extremes is
            not in it.
    """

    worst: str
    best: str
    value: float | None
    reason: str = ""
    interval: Interval | None = None


@dataclass(frozen=True)
class Spread:
    """Permutation test of whether groups differ by more than chance.

    Attributes:
        p_value: of the farthest group of the table, corrected for the number of its groups (maxT).
        corrected: the same corrected also for the number of groupings looked at (Holm).
        permutations: drawn.
    """

    p_value: float
    corrected: float
    permutations: int


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's correlation of test accuracy and mean epsilon over readable groups: below 0, the worse served are worse off.

    p_value: two-sided, against every order of the groups, or against 9,999 random ones.
    """

    value: float
    n_groups: int
    p_value: float


@dataclass(frozen=True)
class WithinLabel:
    """The same groups among the examples of one label; rows in the order of the raw table."""

    label: str
    rows: tuple[GroupRow, ...]
    ratio: Ratio | None


@dataclass(frozen=True)
class Ratios:
    """Ratios of mean epsilons between groups that are large enough to read.

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


@dataclass(frozen=True)
class GroupTests:
    """Do the groups differ by more than chance?

    Attributes:
        accuracy_rank: do groups with worse accuracy have larger epsilon; None with fewer than three
            readable groups.
        spread: test of the raw means; None where nothing can be tested.
        spread_within_label: of the means within label; None where nothing can be tested.
        reversals: labels within which the order of the worst and the best group reverses, by chance
            or not.
    """

    accuracy_rank: RankCorrelation | None
    spread: Spread | None
    spread_within_label: Spread | None
    reversals: tuple[Reversal, ...]


_RATIOS = {
    "raw": "ratio",
    "standardised": "standardised_ratio",
    "lowest_accuracy": "lowest_accuracy_ratio",
}


@dataclass(frozen=True)
class GroupTable:
    """Groups of one column, or of the combinations of several.

    Attributes:
        by: what was asked for, e.g. "race", "age:bins=10" or "race,sex".
        columns: the columns themselves.
        min_size: training examples below which a group is too small to read.
        rows: sorted by mean epsilon, largest first; groups without training examples last.
        within_label: tables within each label; empty where by is the label, or labels are not
            classes.
        notes: what was left out, and why.
        confidence: of every interval by itself; resamples: of the bootstrap; seed: of the
            resampling.
    """

    by: str
    columns: tuple[str, ...]
    min_size: Count
    rows: tuple[GroupRow, ...]
    ratios: Ratios = field(metadata={"flatten": _RATIOS})
    tests: GroupTests = field(metadata={"flatten": True})
    within_label: tuple[WithinLabel, ...]
    notes: tuple[str, ...]
    confidence: Share
    resamples: Count
    seed: int

    @property
    def too_small(self) -> int:
        """Number of groups with too few training examples to read."""
        return sum(row.too_small for row in self.rows)

    @property
    def reversed_labels(self) -> tuple[str, ...]:
        """Labels within which the order reverses by more than chance."""
        return tuple(found.label for found in self.tests.reversals if found.beyond_chance)

    @property
    def unsure_reversals(self) -> tuple[str, ...]:
        """Labels within which the order reverses, but not by more than chance."""
        return tuple(found.label for found in self.tests.reversals if not found.beyond_chance)


def group_tables(
    table: EpsilonTable,
    train: pd.DataFrame,
    test: pd.DataFrame,
    columns: Sequence[str],
    *,
    min_size: int = MIN_GROUP,
    seed: int = 0,
) -> tuple[GroupTable, ...]:
    """One table for each entry of columns, their tests corrected for the number of groupings; see `group_table`."""
    tables = [group_table(table, train, test, by, min_size=min_size, seed=seed) for by in columns]
    tests = [found.tests for found in tables]
    for name in ("spread", "spread_within_label"):
        spreads = {index: getattr(found, name) for index, found in enumerate(tests)}
        spreads = {index: spread for index, spread in spreads.items() if spread is not None}
        corrected = holm([spread.p_value for spread in spreads.values()])
        for (index, spread), p_value in zip(spreads.items(), corrected, strict=True):
            tests[index] = replace(tests[index], **{name: replace(spread, corrected=p_value)})
    return tuple(
        replace(found, tests=replace(each, reversals=_corrected(each.reversals, len(tables))))
        for found, each in zip(tables, tests, strict=True)
    )


def _corrected(reversals: Sequence[Reversal], n_tables: int) -> tuple[Reversal, ...]:
    return tuple(replace(each, p_value=min(1.0, each.p_value * n_tables)) for each in reversals)


def group_table(
    table: EpsilonTable,
    train: pd.DataFrame,
    test: pd.DataFrame,
    by: str,
    *,
    min_size: int = MIN_GROUP,
    seed: int = 0,
) -> GroupTable:
    """Compare the groups of one column, or of the combinations of several.

    Args:
        table: epsilons of the training examples.
        train: rows of the training examples in the table's order, as `ExampleTable.aligned` gives
            them.
        test: rows of the test examples; may be empty.
        by: "label" or a metadata column; "column:bins=10" cuts a numeric column at its deciles;
            "race,sex" takes every combination.
        min_size: groups with fewer training examples are marked as too small to read, and left out
            of ratios and tests.
        seed: of the resampling: an analysis seed, not one of training.

    Raises:
        InputError: no such column, or a numeric column with many values and no bins.
    """
    if len(train) != len(table):
        raise InputError(
            f"train has {len(train)} rows for {len(table)} epsilons; pass the aligned training rows"
        )
    check_positive_int("min_size", min_size)
    check_positive_int("seed", seed, minimum=0)
    groups = partition(train, test, by)
    values = Values(
        epsilon=table.epsilon,
        at_worst_case=table.at_worst_case,
        loss=to_floats(train["loss"]),
        train_correct=to_floats(train["correct"]),
        test_correct=to_floats(test["correct"]),
    )
    labels, notes = _labels(train, test, groups)
    rng = np.random.default_rng([seed, zlib.crc32(by.encode("utf-8", "surrogatepass"))])
    means = _resampled(values.epsilon, groups, labels, rng)
    rows = describe_groups(
        values, groups.train_codes, groups.test_codes, groups.names, min_size=min_size
    )
    rows, tested, tested_within = _with_tests(rows, values.epsilon, groups, labels, rng)
    top = table.worst_case_epsilon
    rows = _with_intervals(rows, means.groups, top)
    within: tuple[WithinLabel, ...] = ()
    order = _order(rows)
    if labels is not None:
        rows = _standardised(rows, groups, labels, means.standardised, min_size, top)
        if means.cells is not None:
            within = _within_labels(values, groups, labels, order, means.cells, min_size, top)
        else:
            notes += (
                f"{len(groups.names)} groups and {len(labels.names)} labels are too many for "
                "tables within label",
            )
    ratios = _ratios(rows, order, means, standardised=labels is not None)
    rows = [rows[index] for index in order]
    return GroupTable(
        by=by,
        columns=groups.columns,
        min_size=min_size,
        rows=tuple(rows),
        ratios=ratios,
        tests=GroupTests(
            accuracy_rank=_accuracy_rank(rows, rng),
            spread=_spread(tested),
            spread_within_label=_spread(tested_within),
            reversals=_reversals(values.epsilon, groups, labels, ratios.raw, min_size, rng)
            if within
            else (),
        ),
        within_label=within,
        notes=notes,
        confidence=CONFIDENCE,
        resamples=means.draws,
        seed=seed,
    )


def _labels(
    train: pd.DataFrame, test: pd.DataFrame, groups: Partition
) -> tuple[Partition | None, tuple[str, ...]]:
    """The labels to compare within, and why there are none."""
    if "label" in groups.columns:
        return None, ()
    labels = partition(train, test, "label", max_values=None)
    if len(labels.names) > _MAX_LABELS:
        return None, (
            f"{len(labels.names)} distinct labels are too many for classes: no table within label",
        )
    return labels, ()


def _resampled(
    epsilon: FloatArray, groups: Partition, labels: Partition | None, rng: np.random.Generator
) -> ResampledMeans:
    """The bootstrap of all means: by group, at the label shares of everybody, and, unless too many, within label."""
    strata = np.zeros_like(groups.train_codes) if labels is None else labels.train_codes
    return resample_means(
        epsilon,
        groups.train_codes,
        strata,
        n_groups=len(groups.names),
        shares=np.bincount(strata, minlength=1 if labels is None else len(labels.names))
        / len(epsilon),
        with_cells=labels is not None and len(labels.names) * len(groups.names) <= _MAX_WITHIN_ROWS,
        rng=rng,
    )


def _with_epsilon(row: GroupRow, **changes: Any) -> GroupRow:
    return replace(row, epsilon=replace(row.epsilon, **changes))


def _with_intervals(rows: Sequence[GroupRow], means: Resampled, top: float) -> list[GroupRow]:
    """Rows with bootstrap intervals of their means, which lie between 0 and the worst case; none where too small."""
    return [
        row if row.too_small else _with_epsilon(row, mean_interval=interval)
        for row, interval in zip(rows, means.intervals(0.0, top), strict=True)
    ]


def _with_tests(
    rows: list[GroupRow],
    epsilon: FloatArray,
    groups: Partition,
    labels: Partition | None,
    rng: np.random.Generator,
) -> tuple[list[GroupRow], SpreadTest | None, SpreadTest | None]:
    """Rows with p-values, the test of the raw means, and that of the means within label."""
    readable = np.array([not row.too_small for row in rows])
    raw = permutation_test(
        epsilon, groups.train_codes, np.zeros_like(groups.train_codes), tested=readable, rng=rng
    )
    if raw is not None:
        rows = [
            _with_epsilon(row, p_value=p_value)
            for row, p_value in zip(rows, raw.adjusted, strict=True)
        ]
    if labels is None:
        return rows, raw, None
    within = permutation_test(
        epsilon, groups.train_codes, labels.train_codes, tested=readable, rng=rng
    )
    if within is not None:
        rows = [
            replace(row, standardised=replace(row.standardised, p_value=p_value))
            for row, p_value in zip(rows, within.adjusted, strict=True)
        ]
    return rows, raw, within


def _spread(test: SpreadTest | None) -> Spread | None:
    return None if test is None else Spread(test.p_value, test.p_value, test.permutations)


def _with_interval(
    ratio: Ratio | None, means: Resampled, positions: dict[str, int]
) -> Ratio | None:
    if ratio is None or ratio.value is None or not {ratio.worst, ratio.best} <= positions.keys():
        return ratio
    return replace(ratio, interval=means.ratio(positions[ratio.worst], positions[ratio.best]))


def _order(rows: Sequence[GroupRow]) -> list[int]:
    """Positions by mean epsilon, worst first, ties by name; groups without training examples last."""

    def key(index: int) -> tuple[float, str]:
        mean = rows[index].epsilon.mean
        return (1.0 if mean is None else -mean, rows[index].name)

    return sorted(range(len(rows)), key=key)


def _ratios(
    rows: Sequence[GroupRow], order: Sequence[int], means: ResampledMeans, *, standardised: bool
) -> Ratios:
    """Ratios of rows in the order of the codes; order is that of the table."""
    positions = {rows[index].name: index for index in order}
    resampled = {
        name: index for name, index in positions.items() if rows[index].standardised.interval
    }
    rows = [rows[index] for index in order]
    raw = _with_interval(_ratio(rows, [row.epsilon.mean for row in rows]), means.groups, positions)
    pair = _standardised_pair(rows, raw) if standardised else None
    spread = _ratio(rows, [row.standardised.mean for row in rows]) if standardised else None
    return Ratios(
        raw=raw,
        standardised=_with_interval(pair, means.standardised, resampled),
        standardised_spread=_with_interval(spread, means.standardised, resampled),
        lowest_accuracy=_with_interval(_lowest_accuracy_ratio(rows), means.groups, positions),
    )


def _ratio(rows: Sequence[GroupRow], means: Sequence[float | None]) -> Ratio | None:
    """Largest over smallest mean among readable groups; None with fewer than two of them."""
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


def _standardised(
    rows: Sequence[GroupRow],
    groups: Partition,
    labels: Partition,
    means: Resampled,
    min_size: int,
    top: float,
) -> list[GroupRow]:
    """Rows with label-standardised means, at the label shares of the whole training set."""
    n_groups, n_labels = len(groups.names), len(labels.names)
    cells = groups.train_codes * n_labels + labels.train_codes
    counts = np.bincount(cells, minlength=n_groups * n_labels).reshape(n_groups, n_labels)
    present = np.flatnonzero(counts.sum(axis=0))
    counts = counts[:, present]
    smallest = counts.min(axis=1)
    intervals = means.intervals(0.0, top)
    return [
        replace(
            row,
            standardised=replace(
                row.standardised,
                mean=float(means.estimate[index]) if smallest[index] else None,
                interval=intervals[index] if smallest[index] >= min_size else None,
                lacks_labels=tuple(
                    labels.names[present[j]] for j in np.flatnonzero(counts[index] == 0)
                ),
                smallest_label_count=int(smallest[index]),
            ),
        )
        for index, row in enumerate(rows)
    ]


def _within_labels(
    values: Values,
    groups: Partition,
    labels: Partition,
    order: Sequence[int],
    cells: Resampled,
    min_size: int,
    top: float,
) -> tuple[WithinLabel, ...]:
    tables = []
    n_labels = len(labels.names)
    for code, label in enumerate(labels.names):
        train, test = labels.train_codes == code, labels.test_codes == code
        rows = describe_groups(
            values.select(train, test),
            groups.train_codes[train],
            groups.test_codes[test],
            groups.names,
            min_size=min_size,
        )
        own = Resampled(
            cells.estimate[code::n_labels],
            cells.error[code::n_labels],
            cells.draws[:, code::n_labels],
            cells.draw_errors[:, code::n_labels],
        )
        rows = _with_intervals(rows, own, top)
        positions = {row.name: index for index, row in enumerate(rows)}
        ordered = tuple(rows[index] for index in order)
        ratio = _with_interval(
            _ratio(ordered, [row.epsilon.mean for row in ordered]), own, positions
        )
        tables.append(WithinLabel(label, ordered, ratio))
    return tuple(tables)


def _standardised_pair(rows: Sequence[GroupRow], ratio: Ratio | None) -> Ratio | None:
    if ratio is None:
        return None
    means = {row.name: row.standardised.mean for row in rows}
    return _quotient(ratio.worst, ratio.best, means[ratio.worst], means[ratio.best])


def _with_accuracy(rows: Sequence[GroupRow]) -> list[GroupRow]:
    """Groups large enough to read in training and test, by test accuracy, lowest first."""
    readable = [
        row
        for row in rows
        if not row.too_small and row.test_accuracy.share is not None and row.n_test >= MIN_GROUP
    ]
    return sorted(readable, key=lambda row: (row.test_accuracy.share or 0.0, row.name))


def _lowest_accuracy_ratio(rows: Sequence[GroupRow]) -> Ratio | None:
    """The paper's headline: do groups with worse accuracy have worse privacy?"""
    ordered = _with_accuracy(rows)
    if len(ordered) < 2:
        return None
    low, high = ordered[0], ordered[-1]
    return _quotient(low.name, high.name, low.epsilon.mean, high.epsilon.mean)


def _accuracy_rank(rows: Sequence[GroupRow], rng: np.random.Generator) -> RankCorrelation | None:
    ordered = _with_accuracy(rows)
    accuracy = np.array([row.test_accuracy.share for row in ordered], dtype=np.float64)
    epsilon = np.array([row.epsilon.mean for row in ordered], dtype=np.float64)
    value = spearman(accuracy, epsilon) if len(ordered) else None
    if value is None:
        return None
    ranks = stats.rankdata(accuracy)
    centred = stats.rankdata(epsilon) - (len(ordered) + 1) / 2
    found = stats.permutation_test(
        (ranks,),
        lambda order, axis: np.sum(order * centred, axis=axis),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=_ORDERS,
        batch=max(1, int(1e6) // len(ordered)),
        rng=rng,
    )
    return RankCorrelation(value, len(ordered), float(found.pvalue))


def _reversals(
    epsilon: FloatArray,
    groups: Partition,
    labels: Partition | None,
    ratio: Ratio | None,
    min_size: int,
    rng: np.random.Generator,
) -> tuple[Reversal, ...]:
    """Labels among which the raw table's worst group is better off than its best one, both large enough to read."""
    if ratio is None or labels is None:
        return ()
    return find_reversals(
        epsilon,
        groups.train_codes,
        labels.train_codes,
        names=labels.names,
        worst=groups.names.index(ratio.worst),
        best=groups.names.index(ratio.best),
        min_size=min_size,
        rng=rng,
    )
