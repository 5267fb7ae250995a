"""Runs with and without some records, compared. Sensitive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from indpriv._arrays import IntArray
from indpriv._progress import StageProgress, silent
from indpriv.analysis.advice.deletion import Deletion, compare_without
from indpriv.audit.advice.of_run import account_run, groups_of_run
from indpriv.audit.method_of_run import MethodOptions
from indpriv.epsilon_table import EpsilonTable

READING = "reading runs with and without the records"


@dataclass(frozen=True)
class DeletionRun:
    """A finished run, and the ids that its examples have in the whole data set.

    ids: (n,) by the run's own ids 0, 1, ...
    """

    path: Path
    ids: IntArray

    def with_whole_ids(self, table: EpsilonTable) -> EpsilonTable:
        """A table of this run with these ids; units keep their own."""
        if table.account.rows_per_unit is not None:
            return table
        return replace(table, example_ids=self.ids[table.example_ids])


def compare_deletion(
    before: Sequence[DeletionRun],
    after: Sequence[DeletionRun],
    *,
    name: str,
    deleted: str,
    by: Sequence[str] = (),
    quantile: float = 0.95,
    progress: StageProgress | None = None,
    **method: Unpack[MethodOptions],
) -> Deletion:
    """Whose epsilon rises without some records.

    Args:
        before: runs with them, one for each seed.
        after: runs without them, likewise.
        name: of the audit.
        deleted: which records, in words.
        by: columns such as "race"; default those of the audit file.
        quantile: of a group's epsilons, in (0, 1).
        progress: called as progress(stage, done, total).
        method: how epsilons are computed, see `MethodOptions`.

    Raises:
        InputError: as `compare_without`.
        EvidenceError: a log that is damaged or contradicts itself.
    """
    tell, tables = progress or silent, []
    for number, run in enumerate((*before, *after), 1):
        table, recorded = account_run(run.path, method)
        if number == 1:
            groups = groups_of_run(table, recorded, by)
        tables.append(run.with_whole_ids(table))
        tell(READING, number, len(before) + len(after))
    return compare_without(
        tables[: len(before)],
        tables[len(before) :],
        groups,
        name=name,
        deleted=deleted,
        quantile=quantile,
    )
