"""Two audits of the same data: which groups are better off in the second? Sensitive.

Two runs also differ by chance: other noise and other batches give other individual epsilons. What
one example gains or loses between two runs is not a property of the settings; what a large group
gains or loses is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from indpriv._arrays import IntArray
from indpriv._columns import partition, to_floats
from indpriv._plain import records
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics.correlation import pearson, spearman
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

SAME = 0.01  # a smaller relative change of epsilon counts as no change


@dataclass(frozen=True, eq=False)
class GroupChanges:
    """Epsilons of the groups of one column in two audits; a change is second minus first.

    Attributes:
        by: the column.
        rows: the group with the largest increase first: its name; n examples; too_small, whether
            they are fewer than ten; mean_first and mean_second, of epsilon; median_change, of the
            examples' own changes; share_better and share_worse, of examples whose epsilon is
            smaller, or larger, by more than 1 % in the second; accuracy_first and accuracy_second,
            of its test examples, NaN where unknown.
    """

    by: str
    rows: pd.DataFrame


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two audits of the same examples.

    Attributes:
        overall: all examples, as a row of one group.
        groups: by column.
        spearman, pearson: correlation of both epsilons; None where undefined.
        largest_increase, largest_decrease: of one example, at least 0.
    """

    overall: Any
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
    shift, tests = epsilons[1] - epsilons[0], (examples.test, other_examples.test)
    changes = pd.DataFrame(
        {
            "first": epsilons[0],
            "second": epsilons[1],
            "change": shift,
            "better": epsilons[1] < epsilons[0] * (1 - SAME),
            "worse": epsilons[1] > epsilons[0] * (1 + SAME),
        }
    )
    groups = []
    for column in by:
        parts, others = partition(train, tests[0], column), partition(other_train, tests[1], column)
        matching = pd.Series(parts.train_codes, others.train_codes)  # others' codes as ours
        matching = matching[~matching.index.duplicated()].reindex(others.test_codes)
        found = _by_group(changes, parts.train_codes, (parts.test_codes, matching), tests)
        found.insert(0, "name", np.array(parts.names, object)[found.index])
        worst = (found["mean_first"] - found["mean_second"]).argsort(kind="stable")
        groups.append(GroupChanges(column, found.iloc[worst].reset_index(drop=True)))
    everyone = [np.zeros(len(part), np.int64) for part in (changes, *tests)]
    overall = _by_group(changes, everyone[0], everyone[1:], tests)
    overall.insert(0, "name", "all")
    return Comparison(
        overall=next(records(overall)),
        groups=tuple(groups),
        spearman=spearman(*epsilons),
        pearson=pearson(*epsilons),
        largest_increase=float(max(0.0, shift.max())),
        largest_decrease=float(max(0.0, -shift.min())),
    )


def _by_group(
    changes: pd.DataFrame,
    codes: IntArray,
    test_codes: Sequence[Any],
    tests: Sequence[pd.DataFrame],
) -> pd.DataFrame:
    """Columns of `GroupChanges`, by group of the training examples and of both test sets."""
    found = changes.groupby(codes).agg(
        n=("first", "size"),
        too_small=("first", lambda values: len(values) < MIN_GROUP),
        mean_first=("first", "mean"),
        mean_second=("second", "mean"),
        median_change=("change", "median"),
        share_better=("better", "mean"),
        share_worse=("worse", "mean"),
    )
    for name, own, test in zip(("first", "second"), test_codes, tests, strict=True):
        correct = pd.Series(to_floats(test["correct"]))
        found[f"accuracy_{name}"] = correct.groupby(np.asarray(own)).mean()
    return found


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
