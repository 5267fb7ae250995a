"""How individual epsilons are distributed: quantiles up to the maximum, and bins for a figure.

Sensitive.
"""

from dataclasses import dataclass

import numpy as np

from indpriv._plain import AtLeastZero, Count, Share
from indpriv.epsilon_table import EpsilonTable

_BINS = 40
_SMALLEST_RANGE = 1e-9  # smaller epsilons do not matter, and bins cannot separate them


@dataclass(frozen=True)
class Distribution:
    """Quantiles and a histogram of individual epsilon; the tail is always part of it.

    Attributes:
        n: number of examples, or of units.
        mean, median, p75, p95, p99, max: of epsilon.
        share_at_worst_case: share whose epsilon is the worst case; for a unit, the worst case of
            its number of rows.
        edges: (n_bins + 1,) of the bins, from 0 to top_of_range.
        counts: (n_bins,) number in each bin, right edge included.
    """

    n: Count
    mean: AtLeastZero
    median: AtLeastZero
    p75: AtLeastZero
    p95: AtLeastZero
    p99: AtLeastZero
    max: AtLeastZero
    share_at_worst_case: Share
    edges: tuple[float, ...]
    counts: tuple[int, ...]


def top_of_range(table: EpsilonTable) -> float:
    """Upper edge of bins of epsilon: the worst case, or 1 if every epsilon is almost 0.

    For units of several rows it is the largest epsilon: the worst case is that of the unit with the
    most rows, often far above all others.
    """
    several = (table.account.rows_per_unit or 1) > 1
    top = max(0.0 if several else table.worst_case_epsilon, float(table.epsilon.max()))
    return top if top > _SMALLEST_RANGE else 1.0


def describe(table: EpsilonTable) -> Distribution:
    """Quantiles (linear interpolation) and 40 equal bins of the epsilons of a table."""
    epsilon = table.epsilon
    median, p75, p95, p99 = (
        float(value) for value in np.quantile(epsilon, (0.5, 0.75, 0.95, 0.99))
    )
    largest = float(epsilon.max())
    counts, edges = np.histogram(epsilon, bins=_BINS, range=(0.0, top_of_range(table)))
    return Distribution(
        n=len(table),
        mean=float(epsilon.mean()),
        median=median,
        p75=p75,
        p95=p95,
        p99=p99,
        max=largest,
        share_at_worst_case=float(table.at_worst_case.mean()),
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )
