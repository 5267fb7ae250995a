"""What a report says of one example: its epsilon, groups and norms over training. Sensitive."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._columns import partition
from indpriv.analysis.norms_over_training import evenly_spaced_records, read_one
from indpriv.analysis.summary import Finding
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.norm_log import NormLog

MOST_EXAMPLES = 100_000  # a page with more would take too long to open
CLIPPED = 101  # the code of a norm above max_grad_norm
_MOST_RECORDS = 16  # norms kept of each example


@dataclass(frozen=True)
class Grouping:
    """The group of each example: names, and codes (n_examples,) that index them."""

    by: str
    names: tuple[str, ...]
    codes: NDArray[np.integer]


@dataclass(frozen=True)
class Lookup:
    """Single examples, or units, in the order of the epsilon table.

    Attributes:
        table: their epsilons.
        groupings: one for each grouping of the report.
        steps: (n_steps,) of the records whose norms are kept; empty for units of several rows.
        norms: (n_examples, n_steps) in per cent of max_grad_norm, rounded up; CLIPPED above it.
    """

    table: EpsilonTable
    groupings: tuple[Grouping, ...]
    steps: tuple[int, ...]
    norms: NDArray[np.uint8]


def look_up(
    log: NormLog, table: EpsilonTable, train: pd.DataFrame | None, by: Sequence[str]
) -> Lookup | None:
    """Collect what is known of each example; None for more than MOST_EXAMPLES.

    Args:
        log: what the table was made of.
        table: its account.
        train: one row for each row of the table, in its order; None where groups are unknown.
        by: the groupings of the report.
    """
    if len(table) > MOST_EXAMPLES:
        return None
    groupings = []
    if train is not None:
        for name in by:
            found = partition(train, train.iloc[:0], name, max_values=None)
            groupings.append(Grouping(name, found.names, found.train_codes))
    several = table.account.rows_per_unit is not None
    rows = [] if several else evenly_spaced_records(log, _MOST_RECORDS)
    norms = np.zeros((len(table), len(rows)), np.uint8)
    for column, row in enumerate(rows):
        record = read_one(log, row)
        percent = np.ceil(100 * record.norms[record.codes] * (1 - 1e-9))
        norms[:, column] = np.where(record.clipped, CLIPPED, np.minimum(percent, 100))
    return Lookup(table, tuple(groupings), tuple(log.recorded_steps[rows].tolist()), norms)


# The report has single examples where the page can be searched; audit.json has none.
FINDING = Finding("lookup", 65, lambda run: {})
