"""Recorded runs on the same people, accounted together. Sensitive."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from indpriv import _files, _folders, epsilon_table
from indpriv._types import StageProgress, silent
from indpriv.accountant.method import Method
from indpriv.accountant.runs import Tuning, compose, methods_of
from indpriv.analysis import guarantee as guarantees
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.audit import audit_directory, pipeline
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import JOURNAL

COMPOSITION = "composition.json"
COMPOSING = "accounting for all runs"


def compose_runs(
    paths: Sequence[Path],
    *,
    by: str = "example_id",
    delta: float | None = None,
    accountant: str = "rdp",
    conversion: str = "canonne2020",
    between_records: str = "last",
    participation: str | None = None,
    neighbouring: str | None = None,
    tuning: Tuning | None = None,
    same_run: bool = False,
    progress: StageProgress | None = None,
) -> guarantees.Composition:
    """Account for recorded runs together; arguments not named here as of `accountant.compose`.

    `by` is "example_id", "unit_id", or a metadata column that names the owner of each row. Default
    are the delta of the runs, the participation of each run's audit, and the neighbouring relation
    that they declare, or "zero_out" where the updates of one tell the number of examples or its
    participation is known. same_run: take a run that is given twice for two runs.

    Raises:
        InputError: as `compose`; a run given twice; runs of different deltas without delta.
        EvidenceError: a log that is damaged or contradicts itself.
    """
    column = None if by in ("example_id", "unit_id") else by
    opened = [pipeline.read_run(path, unit_column=column)[1:] for path in paths]
    if not same_run:
        _check_distinct(paths, [recorded for _, recorded in opened])
    logs, tell = [log for log, _ in opened], progress or silent
    if delta is None:
        deltas = [recorded.declared.delta for _, recorded in opened]
        if None in deltas or len(set(deltas)) > 1:
            named = ", ".join(map("{}: {}".format, paths, deltas))
            raise InputError(f"the runs do not name one delta ({named}); pass --set delta=...")
        delta = float(deltas[0] or 0.0)
    each = [
        participation or own.declared.participation or guarantees.usual_participation(log, None)
        for log, own in opened
    ]
    shared: dict[str, Any] = {
        "delta": delta,
        "accountant": accountant,
        "conversion": conversion,
        "between_records": between_records,
        "neighbouring": neighbouring or _common_relation(paths, opened),
    }
    table = compose(
        logs,
        by="example_id" if by == "example_id" else "unit_id",
        participation=each,
        tuning=tuning,
        progress=lambda done, total: tell(COMPOSING, done, total),
        **shared,
    )
    alone, statuses, reasons = [], [], list[str]()
    methods = methods_of(logs, Method(**shared), each)
    for path, (log, recorded), method in zip(paths, opened, methods, strict=True):
        own, run = pipeline.accounted(log, recorded, method)
        if own.account.participation == "known":
            table = pipeline.as_checked(table, run.recorded.checks)
        guarantee = guarantees.guarantee_of_run(run)
        statuses.append(guarantee.status)
        reasons += [f"{path}: {reason}" for reason in guarantee.reasons]
        alone.append(
            {
                "path": str(path),
                "sampling": own.account.sampling,
                "steps": own.account.total_steps,
                "n": len(own),
                "worst_case_epsilon": own.worst_case_epsilon,
                "median_epsilon": float(np.median(own.epsilon)),
            }
        )
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


def _check_distinct(paths: Sequence[Path], recorded: Sequence[RecordedRun]) -> None:
    first: dict[str, Path] = {}
    for path, run in zip(paths, recorded, strict=True):
        journal = (path / JOURNAL).read_bytes()  # of a converted run, which has no id
        run_id = str(run.recorder.get("id") or hashlib.sha256(journal).hexdigest())
        if run_id in first:
            raise InputError(
                f"{path} and {first[run_id]} are the same run; leave one out, or say that it "
                "stands for two runs like it: --set same_run"
            )
        first[run_id] = path


def _common_relation(
    paths: Sequence[Path], opened: Sequence[tuple[NormLog, RecordedRun]]
) -> str | None:
    """The relation that all runs declare; None if they declare none, and any will do.

    InputError where they differ.
    """
    declared = [recorded.declared.neighbouring or log.neighbouring for log, recorded in opened]
    if len(set(declared)) > 1:
        named = ", ".join(map("{}: {}".format, paths, declared))
        raise InputError(
            f"the runs differ in their relation ({named}); pass --set neighbouring=..."
        )
    if declared[0] != "add_remove" or any(one.declared.neighbouring for _, one in opened):
        return declared[0]
    usual = [guarantees.usual_relation(log, recorded.recorder) for log, recorded in opened]
    return next((relation for relation in usual if relation is not None), None)
