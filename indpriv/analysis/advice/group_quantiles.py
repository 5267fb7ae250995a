"""A quantile of epsilon for each of several groups, with its interval. Sensitive.

The interval treats the examples of a group as a sample and assumes no law of epsilon: its ends are
order statistics, whose ranks follow from the binomial law (David and Nagaraja 2003, section 7.1).
Of a small group the upper end can lie beyond its largest epsilon; the worst case is then the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from indpriv._arrays import FloatArray, IntArray
from indpriv.analysis.statistics.bootstrap import CONFIDENCE
from indpriv.epsilon_table import EpsilonTable

ALL = "all"  # name of the group of all examples
LOW, MIDDLE, HIGH = range(3)  # columns of a reading


@dataclass(frozen=True)
class Group:
    """Some examples of a table: all of them, or those with one value in a column.

    Attributes:
        by: the column; None for all examples.
        name: the value, or "all".
        members: (n,) their positions in the table.
    """

    by: str | None
    name: str
    members: IntArray


def ranks(n: int, quantile: float) -> tuple[int, int, int]:
    """Ranks of a quantile of n values and of the ends of its interval; 0 and n + 1 are beyond.

    The quantile is the smallest value that at least this share of the values do not exceed.

    >>> ranks(1000, 0.95), ranks(20, 0.95)
    ((936, 950, 964), (17, 19, 21))
    """
    tail = (1 - CONFIDENCE) / 2
    low, high = (int(stats.binom.ppf(p, n, quantile)) for p in (tail, 1 - tail))
    return low, int(np.ceil(n * quantile - 1e-9)), high + 1


def read_quantiles(table: EpsilonTable, groups: Sequence[Group], quantile: float) -> FloatArray:
    """(n_groups, 3): lower end of the interval, quantile, upper end."""
    found = np.empty((len(groups), 3))
    for row, group in enumerate(groups):
        values = np.sort(table.epsilon[group.members])
        ordered = np.concatenate([[0.0], values, [table.worst_case_epsilon]])
        found[row] = ordered[list(ranks(len(values), quantile))]
    return found
