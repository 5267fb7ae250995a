"""Audits of the same data: who is better off in another one, and what is stable. Sensitive.

Two runs also differ by chance: other noise and other batches give other individual epsilons. What
one example gains or loses between two runs is not a property of the settings; what a large group
gains or loses is. What runs with the same settings share is a property of the data and the
settings, and the rest is chance.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from indpriv._columns import grouping_of, to_floats
from indpriv._facts import refused
from indpriv._plain import records
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.analysis.fidelity import check_same_meaning
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics import pearson, spearman
from indpriv.analysis.summary import CHANGES
from indpriv.epsilon_table import EpsilonTable
from indpriv.example_table import ExampleTable

SAME = 0.01  # a smaller relative change of epsilon counts as no change


def compare_tables(
    first: tuple[EpsilonTable, ExampleTable],
    second: tuple[EpsilonTable, ExampleTable],
    by: Sequence[str],
) -> dict[str, Any]:
    """Compare two audits of the same data, matched by example id; each is (epsilons, examples).

    The result: overall, a row of `CHANGES` of all examples; spearman and pearson of both epsilons,
    None where undefined; largest_increase and largest_decrease of one example, at least 0; groups,
    by column ("by"), whose "rows" have the group with the largest increase first. InputError if the
    audits differ in examples, labels, metadata or in what an epsilon means.
    """
    (table, examples), (other_table, other_examples) = first, second
    whose = ("in the first audit", "in the second; audit both with one")
    check_same_meaning(table, other_table, whose)
    train, other_train = _same_examples(table, examples, other_table, other_examples)
    order = pd.Index(other_table.example_ids).get_indexer(pd.Index(table.example_ids))
    epsilons = table.epsilon, other_table.epsilon[order]
    shift, tests = epsilons[1] - epsilons[0], (examples.test, other_examples.test)
    changes = pd.DataFrame({"first": epsilons[0], "second": epsilons[1], "change": shift})
    changes["better"] = changes["second"] < changes["first"] * (1 - SAME)
    changes["worse"] = changes["second"] > changes["first"] * (1 + SAME)
    groups = []
    for column in by:
        ours = grouping_of(train, tests[0], column)
        theirs = grouping_of(other_train, tests[1], column)
        own = ours.codes(train)
        matching = pd.Series(own, theirs.codes(other_train))  # their codes as ours
        matching = matching[~matching.index.duplicated()].reindex(theirs.codes(tests[1]))
        codes = (ours.codes(tests[0]), matching)
        rows = _by_group(changes, own, ours.names, codes, tests)
        groups.append({"by": column, "rows": rows})
    everyone = [np.zeros(len(part), np.int64) for part in (changes, *tests)]
    return {
        "overall": next(records(_by_group(changes, everyone[0], ["all"], everyone[1:], tests))),
        "groups": groups,
        "spearman": spearman(*epsilons),
        "pearson": pearson(*epsilons),
        "largest_increase": float(max(0.0, shift.max())),
        "largest_decrease": float(max(0.0, -shift.min())),
    }


def _by_group(
    changes: pd.DataFrame,
    codes: IntArray,
    names: Sequence[str],
    test_codes: Sequence[Any],
    tests: Sequence[pd.DataFrame],
) -> pd.DataFrame:
    """`CHANGES` by group of the training examples and of both test sets, the worst first."""
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
    found["name"] = np.array(names, object)[found.index]
    worst = (found["mean_first"] - found["mean_second"]).argsort(kind="stable")
    return CHANGES.of_rows(found.iloc[worst].to_dict("records"))


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
        said = {"n": len(ids), "others": len(others), "example": example}
        raise refused("refusal.compared", "examples", **said)
    train, other_train = (one.aligned(table.example_ids) for one in (examples, other_examples))
    for column in ["label", *examples.metadata_columns]:
        if column not in other_train:
            continue
        codes, other_codes = (pd.factorize(frame[column])[0] for frame in (train, other_train))
        # By group, not by name: one audit may know the names of the labels.
        different = int((codes != other_codes).sum())
        if different:
            raise refused("refusal.compared", "column", column=column, different=different)
    return train, other_train


def stability_of(
    tables: Sequence[EpsilonTable], train: pd.DataFrame, by: Sequence[str], *, same_settings: bool
) -> dict[str, Any]:
    """Stability of ranks and of the order of groups over two or more runs of the same examples.

    train: their rows, in the order of the first table; same_settings: whether noise, clipping,
    sampling, steps, records and rounding are equal, so that the runs differ only by chance.

    The result is n_audits and same_settings; mean_spearman and least_spearman, rank correlation of
    epsilon over all pairs of runs, None where undefined; median_range and p95_range over examples
    of the difference between the largest and the smallest epsilon; groups, by column as in
    `_group_order`.
    """
    ids = pd.Index(tables[0].example_ids)
    epsilons = [table.epsilon[pd.Index(table.example_ids).get_indexer(ids)] for table in tables]
    ranks = [spearman(*pair) for pair in itertools.combinations(epsilons, 2)]
    known = [value for value in ranks if value is not None]
    spread = np.ptp(np.stack(epsilons), axis=0)
    return {
        "n_audits": len(tables),
        "same_settings": same_settings,
        "mean_spearman": float(np.mean(known)) if known else None,
        "least_spearman": min(known, default=None),
        "median_range": float(np.median(spread)),
        "p95_range": float(np.quantile(spread, 0.95, method="higher")),
        "groups": [_group_order(epsilons, train, column) for column in by],
    }


def _group_order(epsilons: Sequence[FloatArray], train: pd.DataFrame, by: str) -> dict[str, Any]:
    """The order of the readable groups of one column by mean epsilon, over several runs.

    by, the column; n_groups; worst and best, the group with the largest, and with the smallest,
    mean in each run, None where several share it; pairs and pairs_kept, pairs of groups, and of
    those in the same order in every run; least_spearman, smallest rank correlation of the means
    between two runs, None where undefined.
    """
    groups = grouping_of(train, None, by)
    codes = groups.codes(train)
    counts = np.bincount(codes, minlength=len(groups.names))
    readable = np.flatnonzero(counts >= MIN_GROUP)
    sums = [np.bincount(codes, values, len(counts)) for values in epsilons]
    means = np.stack(sums)[:, readable] / counts[readable]
    names = [groups.names[code] for code in readable.tolist()]
    above = means[:, :, None] > means[:, None, :]
    ranks = [spearman(*pair) for pair in itertools.combinations(means, 2)] if names else []
    return {
        "by": by,
        "n_groups": len(names),
        "worst": [_only(names, row == row.max()) for row in means] if names else [],
        "best": [_only(names, row == row.min()) for row in means] if names else [],
        "pairs": len(names) * (len(names) - 1) // 2,
        "pairs_kept": int(above.all(axis=0).sum()),
        "least_spearman": min((value for value in ranks if value is not None), default=None),
    }


def _only(names: Sequence[str], chosen: NDArray[np.bool_]) -> str | None:
    """The chosen name; None if several are chosen."""
    return names[int(chosen.argmax())] if chosen.sum() == 1 else None
