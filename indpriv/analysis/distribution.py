"""How individual epsilons are distributed: quantiles up to the maximum, and bins for a figure.

Epsilons in several parts are read twice: for a histogram in fine bins, and for those of the figure.
Sensitive.
"""

from dataclasses import dataclass

import numpy as np

from indpriv._plain import AtLeastZero, Count, Share
from indpriv.analysis.statistics.histogram import Histogram, merged, quantiles_by_cell
from indpriv.epsilon_table import Epsilons

_BINS = 40
_QUANTILES = (0.5, 0.75, 0.95, 0.99)
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
        wide: number whose bracket is wider than 1 %, so that only its upper end says something;
            None where the accountant takes no brackets.
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
    wide: Count | None = None


def top_of_range(epsilons: Epsilons) -> float:
    """Upper edge of bins of epsilon: the worst case, or 1 if every epsilon is almost 0.

    For units of several rows it is the largest epsilon: the worst case is that of the unit with the
    most rows, often far above all others.
    """
    largest = max(float(table.epsilon.max()) for table in epsilons.tables())
    several = (epsilons.account.rows_per_unit or 1) > 1
    top = max(0.0 if several else epsilons.worst_case_epsilon, largest)
    return top if top > _SMALLEST_RANGE else 1.0


def describe(epsilons: Epsilons) -> Distribution:
    """Quantiles (linear interpolation) and 40 equal bins of epsilons.

    Of epsilons in several parts, quantiles are those of bins of 0.1 %, and the mean is that of the
    means of bins.
    """
    top, n, at_worst_case, wide = top_of_range(epsilons), 0, 0, 0
    counts, fine = np.zeros(_BINS, np.int64), list[Histogram]()
    for table in epsilons.tables():
        epsilon = table.epsilon
        own, edges = np.histogram(epsilon, bins=_BINS, range=(0.0, top))
        counts, n = counts + own, n + len(table)
        at_worst_case += int(table.at_worst_case.sum())
        wide += int(table.wide.sum())
        if n < len(epsilons) or fine:
            fine = [merged([*fine, Histogram.of([epsilon])])]
    if fine:
        values, weights = fine[0].means(), fine[0].counts
        one = np.zeros(len(values), np.int64)
        quantiles = quantiles_by_cell(values, weights, one, 1, _QUANTILES)[0].tolist()
        mean, largest = float(np.average(values, weights=weights)), float(fine[0].largest.max())
    else:
        quantiles = np.quantile(epsilon, _QUANTILES).tolist()
        mean, largest = float(epsilon.mean()), float(epsilon.max())
    median, p75, p95, p99 = quantiles
    return Distribution(
        n=n,
        mean=mean,
        median=median,
        p75=p75,
        p95=p95,
        p99=p99,
        max=largest,
        share_at_worst_case=at_worst_case / n,
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        wide=wide if epsilons.account.accountant == "pld" else None,
    )
