"""Mean epsilon of groups at the label shares of the whole training set. Sensitive."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.analysis.groups.group_rows import GroupRow, Standardised
from indpriv.analysis.statistics.bootstrap import Interval


def with_standardised(
    rows: Sequence[GroupRow],
    counts: IntArray,
    labels: Sequence[str],
    means: FloatArray,
    intervals: Sequence[Interval | None],
    min_size: int,
) -> list[GroupRow]:
    """Rows with label-standardised means (n_groups,) and their intervals, in the order of codes.

    counts: (n_groups, n_labels) training examples; labels: names.
    """
    present = np.flatnonzero(counts.sum(axis=0))

    def of(row: GroupRow, index: int) -> Standardised:
        own = counts[index, present]
        smallest = int(own.min())
        return Standardised(
            mean=float(means[index]) if smallest else None,
            interval=intervals[index] if smallest >= min_size else None,
            p_value=row.standardised.p_value,
            lacks_labels=tuple(labels[present[j]] for j in np.flatnonzero(own == 0)),
            smallest_label_count=smallest,
        )

    return [replace(row, standardised=of(row, index)) for index, row in enumerate(rows)]
