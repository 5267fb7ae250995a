"""Are the ranks of examples and the order of groups stable between training runs? Sensitive.

Individual epsilon describes one run. Runs with the same settings differ by noise and batches: what
they share is a property of the data and the settings, and the rest is chance.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv._columns import partition
from indpriv._plain import AtLeastZero, Share
from indpriv.analysis.comparison import Comparison
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.schedule.readings import CurveReading
from indpriv.analysis.statistics.correlation import spearman
from indpriv.epsilon_table import EpsilonTable

TOP_SHARE = 0.05  # the most exposed examples, whose overlap is reported


@dataclass(frozen=True)
class GroupOrder:
    """The order of the readable groups of one column by mean epsilon, over several runs.

    Attributes:
        by: the column.
        n_groups: number of readable groups.
        worst, best: the group with the largest, and with the smallest, mean epsilon in each run;
            None where several share it.
        pairs, pairs_kept: number of pairs of groups, and of those in the same order in every run.
        least_spearman: smallest rank correlation of the groups' means between two runs; None where
            undefined.
    """

    by: str
    n_groups: int
    worst: tuple[str | None, ...]
    best: tuple[str | None, ...]
    pairs: int
    pairs_kept: int
    least_spearman: float | None


@dataclass(frozen=True)
class Stability:
    """Individual epsilons of the same examples in several runs.

    Attributes:
        n_audits: number of runs.
        same_settings: whether noise, clipping, sampling, steps, records and rounding are equal, so
            that the runs differ only by chance; otherwise the settings have an effect too.
        mean_spearman, least_spearman: rank correlation of epsilon, over all pairs of runs; None
            where undefined.
        least_top_overlap: share of the 5 % most exposed examples of one run that are among those of
            another; the smallest of all pairs; None where examples within and beyond these 5 %
            share an epsilon, e.g. the worst case.
        median_range, p95_range: median and 95th percentile over examples of the difference between
            the largest and the smallest epsilon.
        groups: by column.
    """

    n_audits: int
    same_settings: bool
    mean_spearman: float | None
    least_spearman: float | None
    least_top_overlap: float | None
    median_range: float
    p95_range: float
    groups: tuple[GroupOrder, ...]


@dataclass(frozen=True)
class AuditComparison:
    """Two or more audits of the same data.

    Attributes:
        summaries: what audit.json says of each.
        comparisons: of the first with each other one.
        stability: what holds over all of them.
        at_epsilon, at_accuracy: where `readings` were taken; None where not asked for.
        readings: of each audit, in their order; None for a run without a curve. Empty where nothing
            was asked for.
    """

    summaries: tuple[Mapping[str, Any], ...]
    comparisons: tuple[Comparison, ...]
    stability: Stability
    at_epsilon: AtLeastZero | None = None
    at_accuracy: Share | None = None
    readings: tuple[CurveReading | None, ...] = ()


def stability_of(
    tables: Sequence[EpsilonTable], train: pd.DataFrame, by: Sequence[str], *, same_settings: bool
) -> Stability:
    """Stability of ranks and of the order of groups over two or more runs.

    Args:
        tables: epsilons of the same examples, in any order.
        train: rows of the training examples in the order of the first table.
        by: columns to group by, see `indpriv._columns.partition`.
        same_settings: whether the runs differ by chance alone.
    """
    ids = pd.Index(tables[0].example_ids)
    epsilons = [table.epsilon[pd.Index(table.example_ids).get_indexer(ids)] for table in tables]
    pairs = list(itertools.combinations(epsilons, 2))
    ranks = [spearman(first, second) for first, second in pairs]
    known = [value for value in ranks if value is not None]
    spread = np.ptp(np.stack(epsilons), axis=0)
    return Stability(
        n_audits=len(tables),
        same_settings=same_settings,
        mean_spearman=float(np.mean(known)) if known else None,
        least_spearman=min(known, default=None),
        least_top_overlap=_least_overlap(epsilons),
        median_range=float(np.median(spread)),
        p95_range=float(np.quantile(spread, 0.95)),
        groups=tuple(_group_order(epsilons, train, column) for column in by),
    )


def _least_overlap(epsilons: Sequence[FloatArray]) -> float | None:
    """Smallest share of the most exposed examples of one run that are among those of another."""
    count = max(1, round(TOP_SHARE * len(epsilons[0])))
    tops = []
    for values in epsilons:
        order = np.argsort(-values, kind="stable")
        if count < len(values) and values[order[count - 1]] == values[order[count]]:
            return None
        tops.append(set(order[:count].tolist()))
    return min(len(first & second) / count for first, second in itertools.combinations(tops, 2))


def _group_order(epsilons: Sequence[FloatArray], train: pd.DataFrame, by: str) -> GroupOrder:
    groups = partition(train, train.iloc[:0], by)
    counts = np.bincount(groups.train_codes, minlength=len(groups.names))
    readable = np.flatnonzero(counts >= MIN_GROUP)
    means = np.stack(
        [
            np.bincount(groups.train_codes, values, len(groups.names))[readable] / counts[readable]
            for values in epsilons
        ]
    )
    names = [groups.names[code] for code in readable.tolist()]
    above = means[:, :, None] > means[:, None, :]
    kept = above.all(axis=0)
    ranks = [spearman(*pair) for pair in itertools.combinations(means, 2)] if len(names) else []
    return GroupOrder(
        by=by,
        n_groups=len(names),
        worst=tuple(_only(names, row == row.max()) for row in means) if names else (),
        best=tuple(_only(names, row == row.min()) for row in means) if names else (),
        pairs=len(names) * (len(names) - 1) // 2,
        pairs_kept=int(kept.sum()),
        least_spearman=min((value for value in ranks if value is not None), default=None),
    )


def _only(names: Sequence[str], chosen: NDArray[np.bool_]) -> str | None:
    """The chosen name; None if several are chosen."""
    return names[int(chosen.argmax())] if chosen.sum() == 1 else None
