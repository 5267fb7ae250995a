"""Two audits of the same data: which groups are better off in the second? Sensitive.

Two runs also differ by chance: other noise and other batches give other individual epsilons. What
one example gains or loses between two runs is not a property of the settings; what a large group
gains or loses is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._columns import Partition, mean_of_known, partition, to_floats
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics.correlation import pearson, spearman
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

SAME = 0.01  # a smaller relative change of epsilon counts as no change


@dataclass(frozen=True)
class Change:
    """Epsilons of some examples in two audits; a change is second minus first.

    Attributes:
        name: of the group, or "all".
        n: number of examples.
        too_small: fewer than ten examples.
        mean_first, mean_second: mean epsilon.
        median_change: of the examples' own changes.
        share_better, share_worse: share of examples whose epsilon is smaller, or larger, by more
            than 1 % in the second.
        accuracy_first, accuracy_second: share of the group's test examples that are classified
            correctly; None where unknown.
    """

    name: str
    n: int
    too_small: bool
    mean_first: float
    mean_second: float
    median_change: float
    share_better: float
    share_worse: float
    accuracy_first: float | None
    accuracy_second: float | None


@dataclass(frozen=True)
class GroupChanges:
    """The groups of one column, the one with the largest increase first."""

    by: str
    rows: tuple[Change, ...]


@dataclass(frozen=True)
class Comparison:
    """Two audits of the same examples.

    Attributes:
        overall: all examples.
        groups: by column.
        spearman, pearson: correlation of both epsilons; None where undefined.
        largest_increase, largest_decrease: of one example, at least 0.
    """

    overall: Change
    groups: tuple[GroupChanges, ...]
    spearman: float | None
    pearson: float | None
    largest_increase: float
    largest_decrease: float


def compare_tables(
    first: tuple[EpsilonTable, ExampleTable],
    second: tuple[EpsilonTable, ExampleTable],
    by: Sequence[str],
) -> Comparison:
    """Compare two audits of the same data, matched by example id; each is (epsilons, examples).

    Raises:
        InputError: the audits differ in examples, labels, metadata or in what an epsilon means.
    """
    (table, examples), (other_table, other_examples) = first, second
    _check_meaning(table, other_table)
    train, other_train = _same_examples(table, examples, other_table, other_examples)
    order = pd.Index(other_table.example_ids).get_indexer(pd.Index(table.example_ids))
    epsilons = table.epsilon, other_table.epsilon[order]
    shift = epsilons[1] - epsilons[0]
    tests = examples.test, other_examples.test
    correct = tuple(to_floats(test["correct"]) for test in tests)
    groups = []
    for column in by:
        parts, other_parts = (
            partition(train, tests[0], column),
            partition(other_train, tests[1], column),
        )
        matching = _matching(parts, other_parts)
        rows = [
            _change(
                name,
                epsilons,
                parts.train_codes == code,
                (
                    correct[0][parts.test_codes == code],
                    correct[1][other_parts.test_codes == matching[code]],
                ),
            )
            for code, name in enumerate(parts.names)
            if (parts.train_codes == code).any()
        ]
        groups.append(
            GroupChanges(
                column, tuple(sorted(rows, key=lambda row: row.mean_first - row.mean_second))
            )
        )
    return Comparison(
        overall=_change("all", epsilons, np.ones(len(table), dtype=bool), (correct[0], correct[1])),
        groups=tuple(groups),
        spearman=spearman(*epsilons),
        pearson=pearson(*epsilons),
        largest_increase=float(max(0.0, shift.max())),
        largest_decrease=float(max(0.0, -shift.min())),
    )


def _matching(parts: Partition, others: Partition) -> IntArray:
    """(n_groups,) the other audit's code of each group; -1 where it has no training examples."""
    matching = np.full(len(parts.names), -1, dtype=np.int64)
    matching[parts.train_codes] = others.train_codes
    return matching


def _change(
    name: str,
    epsilons: tuple[FloatArray, FloatArray],
    members: NDArray[np.bool_],
    correct: tuple[FloatArray, FloatArray],
) -> Change:
    first, second = (values[members] for values in epsilons)
    return Change(
        name=name,
        n=len(first),
        too_small=len(first) < MIN_GROUP,
        mean_first=float(first.mean()),
        mean_second=float(second.mean()),
        median_change=float(np.median(second - first)),
        share_better=float((second < first * (1 - SAME)).mean()),
        share_worse=float((second > first * (1 + SAME)).mean()),
        accuracy_first=mean_of_known(correct[0]),
        accuracy_second=mean_of_known(correct[1]),
    )


def _check_meaning(first: EpsilonTable, second: EpsilonTable) -> None:
    for name in ("delta", "unit", "neighbouring", "participation", "accountant", "conversion"):
        ours, theirs = getattr(first.account, name), getattr(second.account, name)
        if ours != theirs:
            raise InputError(
                f"{name} is {ours!r} in the first audit and {theirs!r} in the second; audit both "
                "with one"
            )


def _same_examples(
    table: EpsilonTable,
    examples: ExampleTable,
    other_table: EpsilonTable,
    other_examples: ExampleTable,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training rows of both audits in the first one's order; refuse other examples."""
    ids, others = pd.Index(table.example_ids), pd.Index(other_table.example_ids)
    if len(ids) != len(others) or not ids.isin(others).all():
        only = ids[~ids.isin(others)]
        example = f", e.g. id {only.tolist()[0]!r} is in the first only" if len(only) else ""
        raise InputError(
            f"the audits have different examples: {len(ids)} in the first and {len(others)} in the "
            f"second{example}; compare audits of one data set"
        )
    train, other_train = (
        examples.aligned(table.example_ids),
        other_examples.aligned(table.example_ids),
    )
    for column in ["label", *examples.metadata_columns]:
        if column not in other_train:
            continue
        codes, other_codes = (pd.factorize(frame[column])[0] for frame in (train, other_train))
        # By group, not by name: one audit may know the names of the labels.
        different = int((codes != other_codes).sum())
        if different:
            raise InputError(
                f"{column} differs between the audits for {different} examples of the same id; "
                "compare audits of one data set in one order"
            )
    return train, other_train
