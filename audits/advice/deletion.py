"""Whose epsilon rises if some people's records are deleted: runs with and without them. Sensitive.

The broader-impact question of Yu, Kamath, Kulkarni, Liu, Yin and Zhang (arXiv 2206.02617v7): to
delete the records of some people can leave those who are like them more exposed.

Two runs also differ by chance. What a group gains or loses is therefore given with Student's
interval over seeds, and the share of its members whose epsilon rises beside the share of whom it
rises between two runs that have the same data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audits.advice.new_runs import account_run
from audits.intervals import student_interval
from audits.words import attributed
from indpriv._plain import Count, Epsilon, Percent, RoundShare, to_json
from indpriv._types import FloatArray, IntArray, StageProgress, silent
from indpriv.analysis.advice import Group
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics import Interval
from indpriv.analysis.summary import SENSITIVE
from indpriv.audit.accounts import groups_of_run
from indpriv.audit.pipeline import MethodOptions
from indpriv.epsilon_table import DISCLAIMER, EpsilonTable
from indpriv.errors import InputError

READING = "reading runs with and without the records"
RISE = 0.1  # relative; a larger change of one epsilon counts as a rise or a fall
COMPARED = (
    "Runs with and without these records have the same batch size, length, noise multiplier and "
    "clipping norm. Where fewer records make fewer batches, the sampling rate is higher, which "
    "raises the worst case and with it most epsilons. Where the mean of a group rises by clearly "
    "more than the worst case, the gradient norms of its members have risen as well: without these"
    " records the model fits them less well. Intervals (95 %) are Student's over seeds, of the "
    "change of the mean; they do not say what other data would show."
)
BY_CHANCE = (
    "By chance: the share of whom epsilon differs as much between two runs with all records, which "
    "differ in their seed alone."
)


@dataclass(frozen=True)
class GroupChange:
    """The members of a group who stay, in runs with and without the deleted records.

    Attributes:
        by: the column; None for all who stay. name: of the group, or "all".
        n: number of members who stay. n_deleted: of those who do not.
        too_small: fewer than ten stay.
        mean_with, mean_without: mean epsilon, over members and seeds.
        relative_change: of the mean.
        interval: of the relative change, over seeds; None for one seed.
        quantile_with, quantile_without: of epsilon, mean over seeds.
        share_rises, share_falls: share of members whose epsilon rises, or falls, by more than 10 %;
            mean over seeds.
        rises_by_chance: share of whom it rises as much between two runs of other seeds with all
            records; None for one seed.
    """

    by: str | None
    name: str
    n: Count
    n_deleted: Count
    too_small: bool
    mean_with: Epsilon
    mean_without: Epsilon
    relative_change: float
    interval: Interval | None
    quantile_with: Epsilon
    quantile_without: Epsilon
    share_rises: RoundShare
    share_falls: RoundShare
    rises_by_chance: RoundShare | None


@dataclass(frozen=True)
class Deletion:
    """What deleting some records changes for those who stay.

    Attributes:
        name: of the audit.
        deleted: which records, in words. n_deleted, n_left: numbers of examples, or units.
        meaning: what every epsilon here means, with and without them. plural: what they are of.
        claims: of the individual epsilons, each once.
        n_seeds: number of runs with and of runs without them.
        quantile: which one the groups show.
        worst_case_with, worst_case_without: the guarantee that such a run would have.
        groups: all who stay first; then by column, the largest rise first.
    """

    name: str
    deleted: str
    n_deleted: Count
    n_left: Count
    meaning: str
    plural: str
    claims: tuple[str, ...]
    n_seeds: Count
    quantile: Percent
    worst_case_with: Epsilon
    worst_case_without: Epsilon
    groups: tuple[GroupChange, ...]

    def to_json(self) -> dict[str, Any]:
        """The content of deletion.json."""
        fixed = {"sensitive": SENSITIVE, "disclaimer": DISCLAIMER}
        return {**fixed, **to_json(self), "assumptions": [COMPARED, BY_CHANCE]}


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
        table, accounted = account_run(run.path, method, by)
        if number == 1:
            groups = groups_of_run(accounted)
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


def compare_without(
    before: Sequence[EpsilonTable],
    after: Sequence[EpsilonTable],
    groups: Sequence[Group],
    *,
    name: str,
    deleted: str,
    quantile: float,
) -> Deletion:
    """Compare runs with some records and runs without them.

    Args:
        before: epsilons with them, one table for each seed, of the same ids in one order.
        after: epsilons without them, with the ids that these examples have in `before`.
        groups: positions are those of the tables of `before`; all examples first.
        name: of the audit.
        deleted: which records, in words.
        quantile: in (0, 1).

    Raises:
        InputError: nobody is deleted, or nobody stays.
    """
    ids = pd.Index(before[0].example_ids)
    places = [ids.get_indexer(pd.Index(table.example_ids)) for table in after]
    stays = np.zeros(len(ids), dtype=bool)
    stays[places[0]] = True
    if stays.all() or not stays.any():
        raise InputError(f"{deleted}: {int(stays.sum())} of {len(ids)} would stay; delete some")
    new = np.full((len(after), len(ids)), np.nan)
    for row, (table, place) in enumerate(zip(after, places, strict=True)):
        new[row, place] = table.epsilon
    old = np.stack([table.epsilon for table in before])
    changes = [
        _change(group, old, new, stays, quantile) for group in groups if stays[group.members].any()
    ]
    columns = list(dict.fromkeys(group.by for group in groups))
    changes.sort(key=lambda one: (columns.index(one.by), -one.relative_change))
    account = before[0].account
    return Deletion(
        name=name,
        deleted=deleted,
        n_deleted=int((~stays).sum()),
        n_left=int(stays.sum()),
        meaning=attributed(
            [(table.account.describe(), "with them") for table in before]
            + [(table.account.describe(), "without them") for table in after]
        ),
        plural=account.plural,
        claims=tuple(sorted({table.claim for table in (*before, *after)})),
        n_seeds=len(before),
        quantile=quantile,
        worst_case_with=max(table.worst_case_epsilon for table in before),
        worst_case_without=max(table.worst_case_epsilon for table in after),
        groups=tuple(changes),
    )


def _change(
    group: Group, old: FloatArray, new: FloatArray, stays: NDArray[np.bool_], quantile: float
) -> GroupChange:
    """One group; old, new: (n_seeds, n_examples), NaN where deleted."""
    members = group.members[stays[group.members]]
    first, second = old[:, members], new[:, members]
    relative = second.mean(axis=1) / first.mean(axis=1) - 1
    pairs = list(permutations(range(len(first)), 2))
    return GroupChange(
        by=group.by,
        name=group.name,
        n=len(members),
        n_deleted=len(group.members) - len(members),
        too_small=len(members) < MIN_GROUP,
        mean_with=float(first.mean()),
        mean_without=float(second.mean()),
        relative_change=float(second.mean() / first.mean() - 1),
        interval=student_interval(relative, low=-1.0),
        quantile_with=_quantile(first, quantile),
        quantile_without=_quantile(second, quantile),
        share_rises=_share_rises(zip(first, second, strict=True)),
        share_falls=_share_rises(zip(second, first, strict=True)),
        rises_by_chance=_share_rises((first[i], first[j]) for i, j in pairs) if pairs else None,
    )


def _quantile(epsilons: FloatArray, quantile: float) -> float:
    """Of (n_seeds, n) epsilons; mean over seeds."""
    return float(np.quantile(epsilons, quantile, axis=1, method="inverted_cdf").mean())


def _share_rises(pairs: Iterable[tuple[FloatArray, FloatArray]]) -> float:
    """Share of epsilons that are larger by RISE in the second run; mean over pairs of runs."""
    return float(np.mean([(second > first * (1 + RISE)).mean() for first, second in pairs]))
