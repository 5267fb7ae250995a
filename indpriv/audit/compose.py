"""Recorded runs on the same people, accounted together. Sensitive."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from indpriv._files import write_json
from indpriv._folders import make_folder
from indpriv._types import StageProgress, silent
from indpriv.accountant.account import table_for
from indpriv.accountant.method import Method
from indpriv.accountant.runs import Tuning, compose, methods_of
from indpriv.analysis import guarantee as guarantees
from indpriv.analysis.recorded_run import RecordedRun, recorded_run, with_units
from indpriv.audit.audit_directory import EPSILON
from indpriv.audit.pipeline import as_checked
from indpriv.epsilon_table import write_epsilons
from indpriv.errors import InputError
from indpriv.norm_log.evidence import if_known
from indpriv.norm_log.norm_log import NormLog, open_run
from indpriv.norm_log.run_files import JOURNAL, check_holds_log

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
    opened = [_run(path, by) for path in paths]
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
    relation = neighbouring or _common_relation(paths, opened)
    table = compose(
        logs,
        delta=delta,
        by="example_id" if by == "example_id" else "unit_id",
        accountant=accountant,
        conversion=conversion,
        between_records=between_records,
        participation=each,
        neighbouring=relation,
        tuning=tuning,
        progress=lambda done, total: tell(COMPOSING, done, total),
    )
    method = Method(
        delta=delta,
        accountant=accountant,
        conversion=conversion,
        between_records=between_records,
        neighbouring=relation,
    )
    alone, statuses, reasons = [], [], list[str]()
    for path, (log, recorded), own_method in zip(
        paths, opened, methods_of(logs, method, each), strict=True
    ):
        own, checks = table_for(log, own_method), tuple(recorded.checks)
        if own.account.participation == "known":
            checks = if_known(checks)
            table = as_checked(table, checks)
        rows = own.account.rows_per_unit or 1
        divisor = guarantees.divisor_of(
            log.n_examples, log.total_steps, recorded.recorder, rows=rows
        )
        guarantee = guarantees.guarantee_of(own, checks, recorded.recorder, divisor=divisor)
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
    make_folder(output_dir)
    write_epsilons(found.table, output_dir / EPSILON)
    write_json(output_dir / COMPOSITION, found.to_json())


def _run(path: Path, by: str) -> tuple[NormLog, RecordedRun]:
    check_holds_log(path)
    run = open_run(path)
    recorded = recorded_run(run)
    if by in ("example_id", "unit_id"):
        return run.log, recorded
    return with_units(run.log, recorded, by)


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
