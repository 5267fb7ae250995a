"""Do groups differ by more than chance, and does their order reverse within a label? Sensitive.

In a small group any order can arise by chance. Two groups that were chosen as the extremes of the
raw table tend to have the same order within each label too, so a test of the reverse order errs on
the side of finding nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from indpriv._arrays import FloatArray, IntArray
from indpriv._plain import Count, Share
from indpriv.analysis.groups.group_rows import GroupRow
from indpriv.analysis.groups.ratios import with_accuracy
from indpriv.analysis.statistics.bootstrap import CONFIDENCE
from indpriv.analysis.statistics.correlation import spearman
from indpriv.analysis.statistics.permutation import SpreadTest, holm, permutation_test

# A rank correlation is compared with this many random orders; with every order up to seven groups.
_ORDERS = 9_999


@dataclass(frozen=True)
class Spread:
    """Permutation test of whether groups differ by more than chance.

    Attributes:
        p_value: of the most extreme group of the table, corrected for the number of its groups
            (maxT).
        corrected: the same, corrected also for the number of groupings (Holm).
        permutations: number of permutations drawn.
    """

    p_value: Share
    corrected: Share
    permutations: Count

    @classmethod
    def of(cls, test: SpreadTest | None) -> "Spread | None":
        """The result of a test before it is corrected for other groupings."""
        return None if test is None else cls(test.p_value, test.p_value, test.permutations)


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's correlation of test accuracy and mean epsilon over readable groups.

    Attributes:
        value: below 0, groups with worse accuracy have larger epsilons.
        n_groups: number of groups.
        p_value: two-sided, from every order of the groups or from 9,999 random ones.
    """

    value: float
    n_groups: Count
    p_value: Share


@dataclass(frozen=True)
class Reversal:
    """A label within which the order of the raw table's worst and best group reverses.

    Attributes:
        label: the label.
        p_value: two-sided, by permutation within labels, corrected for all labels tested (maxT) and
            for the number of groupings (Bonferroni).
    """

    label: str
    p_value: Share

    @property
    def beyond_chance(self) -> bool:
        """Whether the test supports it at 95 % confidence."""
        return self.p_value <= 1 - CONFIDENCE + 1e-12  # 1 - 0.95 is not exactly 0.05


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


def corrected(tests: Sequence[GroupTests]) -> list[GroupTests]:
    """The tests of several groupings, corrected for the number of groupings."""
    found = list(tests)
    for name in ("spread", "spread_within_label"):
        spreads = {index: getattr(each, name) for index, each in enumerate(found)}
        spreads = {index: spread for index, spread in spreads.items() if spread is not None}
        p_values = holm([spread.p_value for spread in spreads.values()])
        for (index, spread), p_value in zip(spreads.items(), p_values, strict=True):
            found[index] = replace(found[index], **{name: replace(spread, corrected=p_value)})
    return [
        replace(
            each,
            reversals=tuple(
                replace(reversal, p_value=min(1.0, reversal.p_value * len(found)))
                for reversal in each.reversals
            ),
        )
        for each in found
    ]


def accuracy_rank(rows: Sequence[GroupRow], rng: np.random.Generator) -> RankCorrelation | None:
    """Correlate test accuracy and mean epsilon over the readable groups; None where undefined."""
    ordered = with_accuracy(rows)
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


def find_reversals(
    epsilon: FloatArray,
    groups: IntArray,
    labels: IntArray,
    *,
    names: tuple[str, ...],
    worst: int,
    best: int,
    min_size: int,
    rng: np.random.Generator,
    weights: IntArray | None = None,
) -> tuple[Reversal, ...]:
    """Find the labels within which the order of two groups reverses, and test each.

    Args:
        epsilon: (n,) of all examples.
        groups: (n,) codes.
        labels: (n,) codes into names.
        names: of the labels.
        worst: code of the group with the larger mean over all labels.
        best: code of the other group.
        min_size: labels with fewer examples of either group are too small to read.
        rng: a generator of the analysis, not of training.
        weights: (n,) number of examples that have each epsilon; default one each.
    """
    weights = np.ones(len(epsilon), np.int64) if weights is None else weights
    chosen = (groups == worst) | (groups == best)
    values, weights = epsilon[chosen], weights[chosen]
    cells = 2 * labels[chosen] + (groups[chosen] == best)
    counts, sums = (
        np.bincount(cells, weights=each, minlength=2 * len(names)).reshape(-1, 2)
        for each in (weights, weights * values)
    )
    readable = counts.min(axis=1) >= min_size
    reversed_order = np.zeros(len(names), dtype=bool)
    reversed_order[readable] = np.less(*(sums[readable] / counts[readable]).T)
    if not reversed_order.any():
        return ()
    test = permutation_test(
        values,
        cells,
        labels[chosen],
        tested=np.repeat(readable, 2),
        rng=rng,
        weights=weights,
    )
    p_values = [None] * 2 * len(names) if test is None else test.adjusted
    found = [(names[code], p_values[2 * code]) for code in np.flatnonzero(reversed_order).tolist()]
    return tuple(Reversal(label, 1.0 if p_value is None else p_value) for label, p_value in found)
