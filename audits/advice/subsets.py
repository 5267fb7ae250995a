"""Advice from runs on nested subsets of the data: also more records. Sensitive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from audits.advice.new_runs import account_run
from audits.advice.records import (
    LEAST_RUNS,
    MOST_DATA,
    RecordsNeeded,
    SubsetReading,
    records_needed,
)
from indpriv._types import StageProgress, silent
from indpriv.analysis.advice import ALL, MIDDLE, Advice, GroupAdvice, read_quantiles
from indpriv.audit.accounts import advise_on_run, groups_of_run
from indpriv.audit.pipeline import MethodOptions
from indpriv.errors import InputError

READING = "reading runs on subsets"
LINE_GOES_ON = (
    "Records: a straight line through the logarithms of a group's figure and of the number of "
    "training examples, over runs on nested random subsets, drawn on to at most "
    f"{MOST_DATA:g} times the data. That assumes that the line goes on, that new records are like "
    "those there are, in all groups alike, and that batch size, epochs, noise multiplier and "
    "clipping norm stay. Its interval (95 %) is that of one more run, and treats runs as "
    "independent, though those of one seed share records. A group whose figure is the worst case "
    "in every run has no line (a dash): its number is that at which the worst case of such a run, "
    "which follows from the settings alone, reaches the target."
)
_OF_EACH_RUN = ("correct", "loss")  # columns that differ from run to run


@dataclass(frozen=True)
class GroupOnRecords(GroupAdvice):
    """What would bring one group to the target, more records too.

    records: the data, as a multiple of what there is.
    """

    records: RecordsNeeded


@dataclass(frozen=True)
class AdviceOnRecords(Advice):
    """What a curator is advised of one run and of runs on subsets of its data."""

    groups: tuple[GroupOnRecords, ...]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What all figures assume, in sentences."""
        return (*self.of_settings, LINE_GOES_ON)


@dataclass(frozen=True)
class SubsetRun:
    """A finished run on a share of the data; runs of one seed are on nested shares."""

    path: Path
    share: float
    seed: int


def check_subsets(shares: Sequence[float], seeds: int) -> tuple[float, ...]:
    """The shares in ascending order.

    Raises:
        InputError: a share out of (0, 1] or given twice, the whole data not among them, or too few
            runs for a line.
    """
    for share in shares:
        if not 0 < share <= 1:
            raise InputError(f"subsets: {share:g} is not in (0, 1]; 0.25 is a quarter of the data")
    if len(set(shares)) < len(shares):
        raise InputError("subsets has a share twice; list each once")
    if len(shares) < 2 or max(shares) < 1:
        raise InputError("subsets needs 1, the whole data, and a smaller share: pass 0.25,0.5,1")
    if len(shares) * seeds < LEAST_RUNS:
        raise InputError(
            f"{len(shares)} subsets with {seeds} seed are {len(shares) * seeds} runs, too few for "
            f"a line with an interval; pass --seeds 2, or {LEAST_RUNS} subsets"
        )
    return tuple(sorted(shares))


def check_groups(by: Sequence[str], columns: Sequence[str]) -> None:
    """Raise InputError unless groups are the same in every subset; columns: of the data set."""
    for one in by:
        for column in map(str.strip, one.split(",")):
            if ":bins=" in column or column in _OF_EACH_RUN:
                raise InputError(
                    f"--by {one}: these groups differ from run to run, so that runs on subsets "
                    f"cannot be compared; choose among {', '.join(columns)}"
                )
            if column not in columns:
                raise InputError(
                    f"there is no column {column!r} to group by; choose among {', '.join(columns)}"
                )


def advise_over_subsets(
    runs: Sequence[SubsetRun],
    *,
    target: float,
    planned_worst_case: Callable[[float], float],
    by: Sequence[str] = (),
    quantile: float = 0.95,
    progress: StageProgress | None = None,
    **method: Unpack[MethodOptions],
) -> AdviceOnRecords:
    """What more noise, a lower clipping norm or more records would do for the groups of a run.

    Settings are advised from the run of the first seed on the whole data.

    Args:
        runs: of the same audit file but for their data; two sizes or more, the whole among them.
        target: as `advise_on_run` has it.
        planned_worst_case: of such a run on the whole data times a factor, by any accountant: it is
            scaled to that of the run on the whole data.
        by: likewise; groups that are the same in every subset.
        quantile: likewise.
        progress: called as progress(stage, done, total).
        method: as `advise_on_run` has it.

    Raises:
        InputError: as `advise_on_run`.
        EvidenceError: a log that is damaged or contradicts itself.
    """
    tell = progress or silent
    whole = min((one for one in runs if one.share == 1), key=lambda one: one.seed)
    found = advise_on_run(
        whole.path, target=target, by=by, quantile=quantile, progress=progress, **method
    )
    quantiles = []
    for number, one in enumerate(runs, 1):
        quantiles.append(_quantiles(one, by, quantile, method))
        tell(READING, number, len(runs))
    n_whole = found.groups[0].n
    scale = found.guarantee.worst_case_epsilon / planned_worst_case(1.0)
    groups = tuple(
        GroupOnRecords(
            **_fields(group),
            records=records_needed(
                [
                    _reading(one, read, (group.by, group.name))
                    for one, read in zip(runs, quantiles, strict=True)
                ],
                n_whole,
                target,
                lambda factor: scale * planned_worst_case(factor),
            ),
        )
        for group in found.groups
    )
    return AdviceOnRecords(**{**_fields(found), "groups": groups})


def _fields(found: Advice | GroupAdvice) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}


# Of each group its size, its quantile, and whether that is the worst case
_Quantiles = Mapping[tuple[str | None, str], tuple[int, float | None, bool]]


def _quantiles(
    one: SubsetRun, by: Sequence[str], quantile: float, method: MethodOptions
) -> _Quantiles:
    table, run = account_run(one.path, method, by)
    groups = groups_of_run(run)
    one_row = (table.account.rows_per_unit or 1) == 1  # else the worst case is of other units, too
    worst = table.worst_case_epsilon * (1 - 1e-9) if one_row else np.inf
    return {
        (group.by, group.name): (
            len(group.members),
            float(ends[MIDDLE]),
            bool(ends[MIDDLE] >= worst),
        )
        for group, ends in zip(groups, read_quantiles(table, groups, quantile), strict=True)
    }


def _reading(one: SubsetRun, found: _Quantiles, group: tuple[str | None, str]) -> SubsetReading:
    n_all, (n, quantile, worst) = found[(None, ALL)][0], found.get(group, (0, None, False))
    return SubsetReading(one.share, one.seed, n_all, n, quantile, worst)
