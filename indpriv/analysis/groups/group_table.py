"""Who is worse off: epsilon, loss and accuracy by group. Sensitive.

A raw table alone misleads: if groups differ in their labels and labels differ in epsilon, the order
of the groups can reverse within a label (Simpson's paradox). A label-standardised mean is what a
group's mean epsilon would be with the label shares of the whole training set (direct
standardisation).

Intervals and tests treat the examples of the run as a sample: they show how much the composition of
a group matters, not how another training run of the same model would turn out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from indpriv._checks import check_positive_int
from indpriv._columns import (
    MOST_GROUPS,
    Grouping,
    Rows,
    as_rows,
    grouping_of,
    label_grouping,
)
from indpriv._plain import Count, Share
from indpriv.analysis.groups.cells import Cells, cells_of, sums_of_test
from indpriv.analysis.groups.group_rows import (
    MIN_GROUP,
    GroupRow,
    by_mean_epsilon,
    describe_groups,
)
from indpriv.analysis.groups.rates import positive_class, with_rates
from indpriv.analysis.groups.ratios import Ratio, Ratios, ratios_of, raw_ratio
from indpriv.analysis.groups.significance import (
    GroupTests,
    Reversal,
    Spread,
    accuracy_rank,
    corrected,
    find_reversals,
)
from indpriv.analysis.groups.standardised import with_standardised
from indpriv.analysis.statistics.bootstrap import (
    CONFIDENCE,
    Resampled,
    generator_of,
    resample_means,
)
from indpriv.analysis.statistics.permutation import permutation_test
from indpriv.epsilon_table import Epsilons
from indpriv.errors import InputError

_MAX_LABELS = 100  # more distinct labels than this are a regression target, not classes
_MAX_WITHIN_ROWS = 20_000  # rows of all tables within label together; no reader needs more

_RATIOS = {
    "raw": "ratio",
    "standardised": "standardised_ratio",
    "lowest_accuracy": "lowest_accuracy_ratio",
}


@dataclass(frozen=True)
class WithinLabel:
    """The same groups among the examples of one label; rows in the order of the raw table."""

    label: str
    rows: tuple[GroupRow, ...]
    ratio: Ratio | None


@dataclass(frozen=True)
class GroupTable:
    """Groups of one column, or of the combinations of several.

    Attributes:
        by: what was asked for, e.g. "race", "age:bins=10" or "race,sex".
        columns: the columns themselves.
        min_size: a group with fewer training examples is too small to read.
        rows: largest mean epsilon first; groups without training examples last.
        within_label: tables within each label; empty where by is the label, or labels are not
            classes.
        notes: what was left out, and why.
        confidence: of every interval by itself.
        resamples: number of resamples of the bootstrap.
        seed: of the resampling.
        positive_class: the label whose true- and false-positive rates the rows show; None where
            labels are not two classes.
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
    positive_class: str | None = None

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
    epsilons: Epsilons,
    train: pd.DataFrame | Rows,
    test: pd.DataFrame | Rows,
    columns: Sequence[str],
    *,
    min_size: int = MIN_GROUP,
    seed: int = 0,
) -> tuple[GroupTable, ...]:
    """One table for each of columns, with tests corrected for their number; see `group_table`."""
    tables = [
        group_table(epsilons, train, test, by, min_size=min_size, seed=seed) for by in columns
    ]
    tests = corrected([found.tests for found in tables])
    return tuple(replace(found, tests=own) for found, own in zip(tables, tests, strict=True))


def group_table(
    epsilons: Epsilons,
    train: pd.DataFrame | Rows,
    test: pd.DataFrame | Rows,
    by: str,
    *,
    min_size: int = MIN_GROUP,
    seed: int = 0,
) -> GroupTable:
    """Compare the groups of one column, or of the combinations of several.

    Args:
        epsilons: of the training examples.
        train: rows of the training examples in the same order; see `ExampleTable.train_rows`.
        test: rows of the test examples; may be empty.
        by: "label", "correct", "loss:bins=10" or a metadata column; "column:bins=10" cuts a numeric
            column at its deciles; "race,sex" takes every combination.
        min_size: groups with fewer training examples are marked as too small to read, and left out
            of ratios and tests.
        seed: of the resampling: an analysis seed, not one of training.

    Raises:
        InputError: no such column, or a numeric column with many values and no bins.
    """
    if len(train) != len(epsilons):
        raise InputError(
            f"train has {len(train)} rows for {len(epsilons)} epsilons; pass the aligned training "
            "rows"
        )
    check_positive_int("min_size", min_size)
    check_positive_int("seed", seed, minimum=0)
    rows, others = as_rows(train), as_rows(test)
    groups, every_label = grouping_of(rows, others, by), label_grouping(rows, others)
    labels, notes = _labels(every_label, groups)
    cells = cells_of(epsilons, rows, others, groups, labels)
    rng, top = generator_of(seed, by), epsilons.worst_case_epsilon
    label_names = None if labels is None else labels.names
    making = _Making(cells, groups, label_names, min_size, top, rng)
    table_of_groups = making.table(by, notes, seed)
    if every_label is None or len(every_label.names) > _MAX_LABELS:
        return table_of_groups
    return _with_rates(table_of_groups, groups, every_label, others)


def _with_rates(table: GroupTable, groups: Grouping, labels: Grouping, test: Rows) -> GroupTable:
    """The table with true- and false-positive rates in each row."""
    rows = {row.name: row for row in table.rows}
    ordered = with_rates(
        [rows[name] for name in groups.names],
        labels.names,
        sums_of_test(test, groups, labels),
    )
    rated = {row.name: row for row in ordered}
    return replace(
        table,
        rows=tuple(rated[row.name] for row in table.rows),
        positive_class=positive_class(labels.names),
    )


def _labels(labels: Grouping | None, groups: Grouping) -> tuple[Grouping | None, tuple[str, ...]]:
    """The labels to compare within, or why there are none."""
    if "label" in groups.columns:
        return None, ()
    if labels is None or len(labels.names) > _MAX_LABELS:
        n = f"More than {MOST_GROUPS:,}" if labels is None else len(labels.names)
        return None, (f"{n} distinct labels are too many for classes: no table within label",)
    return labels, ()


@dataclass(frozen=True)
class _Making:
    """What a group table is made of.

    labels: names; None where there are none to compare within. top: the largest epsilon that a mean
    can have.
    """

    cells: Cells
    groups: Grouping
    labels: tuple[str, ...] | None
    min_size: int
    top: float
    rng: np.random.Generator

    def table(self, by: str, notes: tuple[str, ...], seed: int) -> GroupTable:
        names, labels, counts = self.groups.names, self.labels, self.cells.sums.n
        n_labels = counts.shape[1]
        few = n_labels * len(names) <= _MAX_WITHIN_ROWS
        means = resample_means(
            self.cells.epsilon,
            self.cells.groups,
            self.cells.labels,
            n_groups=len(names),
            shares=counts.sum(axis=0) / counts.sum(),
            with_cells=labels is not None and few,
            rng=self.rng,
            weights=self.cells.weights,
        )
        rows = describe_groups(self.cells, names, min_size=self.min_size)
        rows, spread, spread_within = self._tested(rows)
        rows = self._with_intervals(rows, means.groups)
        order = by_mean_epsilon(rows)
        within: tuple[WithinLabel, ...] = ()
        if labels is not None:
            intervals = means.standardised.intervals(0.0, self.top)
            rows = with_standardised(
                rows, counts, labels, means.standardised.estimate, intervals, self.min_size
            )
        if labels is not None and means.cells is not None:
            within = tuple(
                self._within(name, code, order, means.cells.every(n_labels, code))
                for code, name in enumerate(labels)
            )
        elif labels is not None:
            notes += (
                f"{len(names)} groups and {n_labels} labels are too many for tables within label",
            )
        ratios = ratios_of(rows, order, means, standardised=labels is not None)
        rows = [rows[index] for index in order]
        tests = GroupTests(
            accuracy_rank=accuracy_rank(rows, self.rng),
            spread=spread,
            spread_within_label=spread_within,
            reversals=self._reversals(ratios.raw) if within else (),
        )
        return GroupTable(
            by=by,
            columns=self.groups.columns,
            min_size=self.min_size,
            rows=tuple(rows),
            ratios=ratios,
            tests=tests,
            within_label=within,
            notes=notes,
            confidence=CONFIDENCE,
            resamples=means.draws,
            seed=seed,
        )

    def _tested(self, rows: list[GroupRow]) -> tuple[list[GroupRow], Spread | None, Spread | None]:
        """Rows with p-values, the test of the raw means, and that of the means within label."""
        cells, readable = self.cells, np.array([not row.too_small for row in rows])
        strata = [np.zeros_like(cells.groups)] + ([] if self.labels is None else [cells.labels])
        tests = [
            permutation_test(
                cells.epsilon,
                cells.groups,
                own,
                tested=readable,
                rng=self.rng,
                weights=cells.weights,
            )
            for own in strata
        ]
        raw, within = tests[0], tests[1] if self.labels is not None else None
        if raw is not None:
            rows = [
                replace(row, epsilon=replace(row.epsilon, p_value=p_value))
                for row, p_value in zip(rows, raw.adjusted, strict=True)
            ]
        if within is not None:
            rows = [
                replace(row, standardised=replace(row.standardised, p_value=p_value))
                for row, p_value in zip(rows, within.adjusted, strict=True)
            ]
        return rows, Spread.of(raw), Spread.of(within)

    def _with_intervals(self, rows: Sequence[GroupRow], means: Resampled) -> list[GroupRow]:
        """Rows with bootstrap intervals of their means, except groups that are too small."""
        return [
            row
            if row.too_small
            else replace(row, epsilon=replace(row.epsilon, mean_interval=interval))
            for row, interval in zip(rows, means.intervals(0.0, self.top), strict=True)
        ]

    def _within(self, name: str, code: int, order: Sequence[int], means: Resampled) -> WithinLabel:
        """The table of one label."""
        own = self.cells.of_label(code)
        rows = describe_groups(own, self.groups.names, min_size=self.min_size)
        rows = self._with_intervals(rows, means)
        positions = {row.name: index for index, row in enumerate(rows)}
        ordered = tuple(rows[index] for index in order)
        return WithinLabel(name, ordered, raw_ratio(ordered, means, positions))

    def _reversals(self, ratio: Ratio | None) -> tuple[Reversal, ...]:
        """Labels within which the order of the two extreme groups of the raw table reverses."""
        if ratio is None or self.labels is None:
            return ()
        return find_reversals(
            self.cells.epsilon,
            self.cells.groups,
            self.cells.labels,
            names=self.labels,
            worst=self.groups.names.index(ratio.worst),
            best=self.groups.names.index(ratio.best),
            min_size=self.min_size,
            rng=self.rng,
            weights=self.cells.weights,
        )
