"""Accounts of recorded runs, without an audit: under other settings, and of several together.

All that is made is sensitive.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from scipy.special import i0e

from indpriv import _facts, _files, _folders, epsilon_table
from indpriv._checks import check_number
from indpriv._columns import grouping_of, known_columns
from indpriv._types import StageProgress, silent
from indpriv.accountant.method import ESTIMATE, Method, usual_participation
from indpriv.accountant.runs import Tuning, compose, methods_of
from indpriv.analysis import disclosures, recorded_run
from indpriv.analysis import guarantee as guarantees
from indpriv.analysis.advice import ALL, Advice, Group, advised, remedies
from indpriv.audit import audit_directory, pipeline
from indpriv.errors import InputError
from indpriv.norm_log import evidence, fields, run_files
from indpriv.norm_log.norm_log import NormLog, OpenedRun

ACCOUNTING, COMPOSING = "accounting under other settings", "accounting for all runs"
COMPOSITION = "composition.json"


def advise_on_run(
    path: Path,
    *,
    target: float,
    by: Sequence[str] = (),
    quantile: float = 0.95,
    progress: StageProgress | None = None,
    **method: Unpack[pipeline.MethodOptions],
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
    opened, log, recorded = pipeline.read_run(path)
    tell = progress or silent
    if recorded.recorder.get("rounds"):
        raise _facts.refused("refusal.audits", "advise_federated", path=path)
    if opened.header["privacy_filter"]:
        raise _facts.refused("refusal.audits", "advise_filtered", path=path)
    unclipped, clipping = "", recorded.recorder.get("clipping")
    if clipping in fields.CONTRIBUTIONS:
        said = {"clipping": clipping, "holds": fields.CONTRIBUTIONS[clipping]}
        unclipped = _facts.text("sentence.advice", "unclipped", **said)
    chosen, _ = pipeline.method_of_run(log, recorded, path, method)
    table, run = pipeline.accounted(log, recorded, chosen, by)
    groups = groups_of_run(run)
    found = remedies(
        log,
        chosen,
        table,
        groups,
        target=target,
        quantile=quantile,
        clipping=not unclipped,
        progress=partial(tell, ACCOUNTING),
    )
    return Advice(
        name=recorded.declared.name or path.resolve().name,
        meaning=table.account.describe(),
        plural=table.account.plural,
        claim=table.claim,
        claim_reason=table.claim_reason,
        target=target,
        quantile=quantile,
        guarantee=guarantees.guarantee_of_run(run),
        noise_multiplier=disclosures.Range.of(log.settings.noise_multiplier),
        max_grad_norm=disclosures.Range.of(log.settings.max_grad_norm),
        unclipped=unclipped,
        groups=advised(table, groups, quantile, found),
    )


def check_question(target: float, quantile: float) -> None:
    """Raise InputError unless target is positive and quantile in (0, 1)."""
    check_number("target", target, "(0, inf)", "it is an epsilon; pass e.g. 1.0")
    check_number("quantile", quantile, "(0, 1)", "0.95 is the 95th percentile")


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


# --- several runs on the same people


def compose_runs(
    paths: Sequence[Path],
    *,
    by: str = "example_id",
    tuning: Tuning | None = None,
    same_run: bool = False,
    progress: StageProgress | None = None,
    **method: Unpack[pipeline.MethodOptions],
) -> guarantees.Composition:
    """Account for recorded runs together; tuning and method as of `accountant.compose`.

    `by` is "example_id", "unit_id", or a metadata column that names the owner of each row. Default
    are the delta of the runs, the participation of each run's audit, and the neighbouring relation
    that they declare, or "zero_out" where the updates of one tell the number of examples or its
    participation is known. same_run: take a run that is given twice for two runs.

    Raises:
        InputError: as `compose`; a run given twice; runs of different deltas without delta.
        EvidenceError: a log that is damaged or contradicts itself.
    """
    column = None if by in ("example_id", "unit_id") else by
    runs = [pipeline.read_run(path, unit_column=column) for path in paths]
    opened = [run[1:] for run in runs]
    repeated, others = ("", "") if same_run else _compared(paths, runs)
    logs, tell = [log for log, _ in opened], progress or silent
    participation, delta = method.pop("participation", None), method.get("delta")
    if delta is None:
        deltas = [recorded.declared.delta for _, recorded in opened]
        if None in deltas or len(set(deltas)) > 1:
            named = ", ".join(map("{}: {}".format, paths, deltas))
            raise InputError(f"the runs do not name one delta ({named}); pass --set delta=...")
        delta = float(deltas[0] or 0.0)
    each = [
        participation or own.declared.participation or usual_participation(log)
        for log, own in opened
    ]
    relation = method.get("neighbouring") or _common_relation(paths, opened)
    shared: dict[str, Any] = {**method, "delta": delta, "neighbouring": relation}
    table = compose(
        logs,
        by="example_id" if by == "example_id" else "unit_id",
        participation=each,
        tuning=tuning,
        progress=partial(tell, COMPOSING),
        **shared,
    )
    if others and by == "example_id":
        table = replace(table, claim=ESTIMATE, claim_reason=others)
    alone, reasons = [], [repeated] * bool(repeated)
    statuses = [guarantees.UNPROVEN] * bool(repeated)
    methods = methods_of(logs, Method(**shared), each)
    for path, (log, recorded), alike in zip(paths, opened, methods, strict=True):
        own, run = pipeline.accounted(log, recorded, alike)
        if own.account.participation == "known":
            table = pipeline.as_checked(table, run.recorded.checks)
        guarantee = guarantees.guarantee_of_run(run)
        statuses.append(guarantee.status)
        reasons += [f"{path}: {reason}" for reason in guarantee.reasons]
        of_run: dict[str, Any] = {"path": str(path), "sampling": own.account.sampling}
        of_run |= {"steps": own.account.total_steps, "n": len(own)}
        of_run |= {"worst_case_epsilon": own.worst_case_epsilon}
        alone.append(of_run | {"median_epsilon": float(np.median(own.epsilon))})
    weakest = max(statuses, key=guarantees.STATUSES.index)
    return guarantees.Composition(
        table=table,
        runs=tuple(alone),
        status=weakest,
        statement=guarantees.composed_statement(table, weakest, len(paths), tuning),
        reasons=tuple(reasons),
    )


def write_composition(found: guarantees.Composition, output_dir: Path) -> None:
    """Write epsilon.parquet and composition.json, readable by their owner only."""
    _folders.make_folder(output_dir)
    epsilon_table.write_epsilons(found.table, output_dir / audit_directory.EPSILON)
    _files.write_json(output_dir / COMPOSITION, found.to_json())


def _compared(
    paths: Sequence[Path], runs: Sequence[tuple[OpenedRun, NormLog, recorded_run.RecordedRun]]
) -> tuple[str, str]:
    """Why runs are not independent, and why equal ids may be of other people; else "".

    InputError for a run that is given twice: of one id, or of one journal if it was converted.
    """
    first, labels, repeated, others = dict[str, Path](), dict[str, Path](), "", ""
    for path, (run, log, recorded) in zip(paths, runs, strict=True):
        run_id = str(recorded.recorder.get("id") or _files.sha256(path / run_files.JOURNAL))
        if run_id in first:
            raise _facts.refused("refusal.audits", "same_run", path=path, first=first[run_id])
        first[run_id] = path
        for one in run.sessions:
            # Two sums of coins of variance v are equal with probability at most exp(-2 v) I0(2 v),
            # by their characteristic function. Beyond chance the coins, and noise, are the same.
            chance = i0e(2 * one.draws.participations_variance) if one.draws else 1.0
            told = one.sampler == "poisson" and chance**log.n_examples < evidence.FALSE_ALARM
            took_part = getattr(one.training or one.rounds, "took_part", None)
            if told and took_part and (same := first.setdefault(took_part, path)) != path:
                repeated = _facts.text("sentence.composition", "drawn", one=same, other=path)
        if np.array_equal(log.example_ids, np.arange(log.n_examples)):  # which name nobody
            for line in run.lines["record"][:1]:
                labels.setdefault(f"{log.n_examples} {line['targets_fingerprint']}", path)
    if len(labels) > 1:
        some, other = list(labels.values())[:2]
        others = _facts.text("sentence.composition", "labels", one=some, other=other)
    return repeated, others


def _common_relation(
    paths: Sequence[Path], opened: Sequence[tuple[NormLog, recorded_run.RecordedRun]]
) -> str | None:
    """The relation that all runs declare; None if they declare none, and any will do.

    InputError where they differ.
    """
    declared = [recorded.declared.neighbouring or log.neighbouring for log, recorded in opened]
    if len(set(declared)) > 1:
        named = ", ".join(map("{}: {}".format, paths, declared))
        raise _facts.refused("refusal.audits", "relations", named=named)
    if declared[0] != "add_remove" or any(one.declared.neighbouring for _, one in opened):
        return declared[0]
    usual = [guarantees.usual_relation(log, recorded.recorder) for log, recorded in opened]
    return next((relation for relation in usual if relation is not None), None)
