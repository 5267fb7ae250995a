"""True- and false-positive rates of the final model by group. Sensitive."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv._columns import MISSING
from indpriv.analysis.groups.cells import Sums
from indpriv.analysis.groups.group_rows import GroupRates, GroupRow
from indpriv.analysis.statistics.binomial import clopper_pearson
from indpriv.analysis.statistics.bootstrap import Interval


def positive_class(names: Sequence[str]) -> str | None:
    """The second of two classes in sorted order; None of another number of classes."""
    classes = [name for name in names if name != MISSING]
    return classes[1] if len(classes) == 2 else None


def with_rates(
    rows: Sequence[GroupRow],
    label_names: Sequence[str],
    test: Sums,
) -> list[GroupRow]:
    """Rows with the rates of their test examples; see `GroupRates`.

    Args:
        rows: in the order of the group codes.
        label_names: of the classes.
        test: sums (n_groups, n_labels) of the test examples.
    """
    classes = [code for code, name in enumerate(label_names) if name != MISSING]
    if len(classes) < 2:
        return list(rows)
    trials, hits = test.n_test_known[:, classes], test.test_correct[:, classes]
    return [
        replace(row, test_rates=_rates(own_trials, own_hits))
        for row, own_trials, own_hits in zip(rows, trials, hits, strict=True)
    ]


def _rates(trials: IntArray, hits: FloatArray) -> GroupRates:
    """From the number of a group's test examples of each class, and of those that are right."""
    n, right = trials.tolist(), hits.tolist()
    if len(n) == 2:
        positive = _rate(right[1], n[1])
        return GroupRates(*positive, *_rate(n[0] - right[0], n[0]))
    recall = float(np.mean(hits / trials)) if all(n) else None
    wrong, interval = _rate(sum(n) - sum(right), sum(n))
    others = len(n) - 1  # classes of which an example is a negative
    return GroupRates(
        true_positive=recall,
        false_positive=None if wrong is None else wrong / others,
        false_positive_interval=interval
        and Interval(interval.low / others, interval.high / others),
    )


def _rate(successes: float, trials: float) -> tuple[float | None, Interval | None]:
    return (successes / trials, clopper_pearson(successes, trials)) if trials else (None, None)
