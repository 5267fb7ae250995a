"""Does the order of two groups reverse within a label, and by more than chance? Sensitive.

In a small group any order comes up by chance. Two groups that were picked as the ends of the raw
table lie, if anything, in the raw order within each label too, so that a test of the reverse order
errs on the side of saying nothing.
"""

from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv._plain import Share
from indpriv.analysis.statistics.resampling import CONFIDENCE, permutation_test


@dataclass(frozen=True)
class Reversal:
    """A label within which the raw table's worst group is better off than its best one.

    Attributes:
        label: the label.
        p_value: two-sided, by permutation within labels, corrected for all labels tested (maxT) and
            for the number of groupings looked at (Bonferroni).
    """

    label: str
    p_value: Share

    @property
    def beyond_chance(self) -> bool:
        """Whether the test supports it at 95 % confidence."""
        return self.p_value <= 1 - CONFIDENCE + 1e-12  # 1 - 0.95 is a hair off 0.05


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
) -> tuple[Reversal, ...]:
    """Labels within which the mean epsilon of one group lies below that of another, each with a test.

    Args:
        epsilon: (n,) of all examples.
        groups: (n,) codes; worst and best are those of the two groups, worst having the larger mean
            over all labels.
        labels: (n,) codes into names.
        names: of the labels.
        worst: see groups.
        best: see groups.
        min_size: labels with fewer examples of either group are too small to read.
        rng: an analysis generator.
    """
    chosen = (groups == worst) | (groups == best)
    values = epsilon[chosen]
    cells = 2 * labels[chosen] + (groups[chosen] == best)
    counts = np.bincount(cells, minlength=2 * len(names)).reshape(-1, 2)
    sums = np.bincount(cells, weights=values, minlength=2 * len(names)).reshape(-1, 2)
    readable = counts.min(axis=1) >= min_size
    reversed_order = np.zeros(len(names), dtype=bool)
    reversed_order[readable] = np.less(*(sums[readable] / counts[readable]).T)
    if not reversed_order.any():
        return ()
    test = permutation_test(values, cells, labels[chosen], tested=np.repeat(readable, 2), rng=rng)
    p_values = [None] * 2 * len(names) if test is None else test.adjusted
    found = [(names[code], p_values[2 * code]) for code in np.flatnonzero(reversed_order).tolist()]
    return tuple(Reversal(label, 1.0 if p_value is None else p_value) for label, p_value in found)
