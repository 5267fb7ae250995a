"""Advice from one recorded run: more noise, or a lower clipping norm. Sensitive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from indpriv._columns import grouping_of, known_columns
from indpriv._types import StageProgress, advancing, silent
from indpriv.analysis import disclosures, guarantee, recorded_run
from indpriv.analysis.advice import ALL, Advice, Group, advised, most_accounts, remedies
from indpriv.audit.pipeline import MethodOptions, accounted, method_of_run, read_run
from indpriv.errors import InputError
from indpriv.norm_log.fields import CONTRIBUTIONS

ACCOUNTING = "accounting under other settings"


def advise_on_run(
    path: Path,
    *,
    target: float,
    by: Sequence[str] = (),
    quantile: float = 0.95,
    progress: StageProgress | None = None,
    **method: Unpack[MethodOptions],
) -> Advice:
    """What more noise or a lower clipping norm would do for the groups of a recorded run.

    `target` is the largest epsilon that the quantile of a group is to have, of groups by columns
    such as "race" or "age:bins=10" (default those in run.json, else label and all metadata). The
    total that `progress` is told is the most that can be needed.

    Raises:
        InputError: a value out of range, a column that does not exist, or a run of which nothing
            can be said: federated, or with a privacy filter.
        EvidenceError: a log that is damaged or contradicts itself.
    """
    check_question(target, quantile)
    opened, log, recorded = read_run(path)
    tell = progress or silent
    if recorded.recorder.get("rounds"):
        raise InputError(
            f"{path} is a federated run, of which indpriv advise knows nothing; read its audit: "
            f"indpriv audit {path}"
        )
    if opened.state.header["privacy_filter"]:
        raise InputError(
            f"{path} was trained with a privacy filter, which caps every epsilon: with more noise "
            "it would have left others out; lower the cap, filter_epsilon, instead"
        )
    unclipped, clipping = "", recorded.recorder.get("clipping")
    if clipping in CONTRIBUTIONS:
        unclipped = (
            f'No clipping norm is advised: this run has clipping = "{clipping}", so that its log '
            f"holds {CONTRIBUTIONS[clipping]}."
        )
    chosen, _ = method_of_run(log, recorded, path, method)
    table, run = accounted(log, recorded, chosen, by)
    groups = groups_of_run(run)
    found = remedies(
        log,
        chosen,
        table,
        groups,
        target=target,
        quantile=quantile,
        clipping=not unclipped,
        advance=advancing(most_accounts(log), lambda done, total: tell(ACCOUNTING, done, total)),
    )
    return Advice(
        name=recorded.declared.name or path.resolve().name,
        meaning=table.account.describe(),
        plural=table.account.plural,
        claim=table.claim,
        claim_reason=table.claim_reason,
        target=target,
        quantile=quantile,
        guarantee=guarantee.guarantee_of_run(run),
        noise_multiplier=disclosures.Range.of(log.settings.noise_multiplier),
        max_grad_norm=disclosures.Range.of(log.settings.max_grad_norm),
        unclipped=unclipped,
        groups=advised(table, groups, quantile, found),
    )


def check_question(target: float, quantile: float) -> None:
    """Raise InputError unless target is positive and quantile in (0, 1)."""
    if not 0 < target < np.inf:
        raise InputError(f"target={target:g} is not a positive epsilon; pass e.g. 1.0")
    if not 0 < quantile < 1:
        raise InputError(f"quantile={quantile:g} is not in (0, 1); 0.95 is the 95th percentile")


def groups_of_run(run: recorded_run.AuditedRun) -> tuple[Group, ...]:
    """All examples, and those with each value of each column; positions are those of the table."""
    found = [Group(None, ALL, np.arange(len(run.epsilons)))]
    for column in run.grouping[0]:
        if (rows := run.train) is not None:
            groups = grouping_of(rows, None, column)
            codes = groups.codes(rows.read(0, len(rows), known_columns(rows, groups.columns)))
            found += [
                Group(column, name, own)
                for code, name in enumerate(groups.names)
                if len(own := np.flatnonzero(codes == code))
            ]
    return tuple(found)
