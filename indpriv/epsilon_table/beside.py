"""Epsilons in memory or in parts, each beside what else is known of its examples. Sensitive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from indpriv._columns import Rows
from indpriv.epsilon_table.parts import EpsilonParts
from indpriv.epsilon_table.table import EpsilonTable

Epsilons = EpsilonTable | EpsilonParts


def beside(
    epsilons: Epsilons, rows: Rows, columns: Sequence[str] | None = None
) -> Iterator[tuple[EpsilonTable, pd.DataFrame]]:
    """Yield each part of the epsilons with the rows of its examples.

    Args:
        epsilons: one part if they are in memory.
        rows: of the same examples in the same order.
        columns: those that are read, by default all.
    """
    start = 0
    for table in epsilons.tables():
        stop = start + len(table)
        yield table, rows.read(start, stop, columns)
        start = stop
