"""Recorded runs on the same people, accounted together. Sensitive."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from indpriv._files import write_json
from indpriv._folders import make_folder
from indpriv._progress import StageProgress, silent
from indpriv.accountant.account import table_for
from indpriv.accountant.method import Method
from indpriv.accountant.runs import Tuning, compose, methods_of
from indpriv.analysis.guarantee import (
    STATUSES,
    Composition,
    Guarantee,
    composed_statement,
    divisor_of_run,
    guarantee_of,
    usual_participation,
    usual_relation,
)
from indpriv.analysis.recorded_run import RecordedRun, recorded_run, with_units
from indpriv.audit.audit_directory import EPSILON
from indpriv.audit.method_of_run import as_checked
from indpriv.epsilon_table import EpsilonTable, write_epsilons
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
) -> Composition:
    """Account for recorded runs together; see `indpriv.accountant.compose`.

    Args:
        paths: run directories.
        by: "example_id", "unit_id", or a metadata column that names the owner of each row.
        delta: of the bound; default that of the runs.
        accountant: see there.
        conversion: see there.
        between_records: see there.
        participation: of all runs; default for each run that of its audit.
        neighbouring: of all runs; default the one that they declare, or "zero_out" where the
            updates of one tell the number of examples or its participation is known.
        tuning: see there.
        same_run: take a run that is given twice for two runs.
        progress: called as progress(stage, done, total).

    Raises:
        InputError: as `compose`; a run given twice; runs of different deltas without delta.
        EvidenceError: a log that is damaged or contradicts itself.
    """
    opened = _opened(paths, by, same_run)
    logs, every = [log for log, _ in opened], [recorded for _, recorded in opened]
    delta, tell = _common_delta(paths, every) if delta is None else delta, progress or silent
    each = [participation or _usual(log, own) for log, own in opened]
    method = Method(
        delta=delta,
        accountant=accountant,
        conversion=conversion,
        between_records=between_records,
        neighbouring=neighbouring or _common_relation(paths, opened),
    )
    table = compose(
        logs,
        delta=delta,
        by="example_id" if by == "example_id" else "unit_id",
        accountant=accountant,
        conversion=conversion,
        between_records=between_records,
        participation=each,
        neighbouring=method.neighbouring,
        tuning=tuning,
        progress=lambda done, total: tell(COMPOSING, done, total),
    )
    return _composition(paths, opened, table, methods_of(logs, method, each), tuning)


def _composition(
    paths: Sequence[Path],
    opened: Sequence[tuple[NormLog, RecordedRun]],
    table: EpsilonTable,
    methods: Sequence[Method],
    tuning: Tuning | None,
) -> Composition:
    """What the accounts of runs, together and alone by these methods, come to with their checks."""
    alone, guarantees = [], []
    for (log, recorded), method in zip(opened, methods, strict=True):
        own, checks = table_for(log, method), tuple(recorded.checks)
        alone.append(own)
        if own.account.participation == "known":
            checks = if_known(checks)
            table = as_checked(table, checks)
        divisor = divisor_of_run(log, own, recorded.recorder)
        guarantees.append(guarantee_of(own, checks, recorded.recorder, divisor=divisor))
    status, reasons = _weakest(paths, guarantees)
    return Composition(
        table=table,
        runs=tuple(_of_run(path, own) for path, own in zip(paths, alone, strict=True)),
        status=status,
        statement=composed_statement(table, status, len(paths), tuning),
        reasons=reasons,
    )


def write_composition(found: Composition, output_dir: Path) -> None:
    """Write epsilon.parquet and composition.json, readable by their owner only."""
    make_folder(output_dir)
    write_epsilons(found.table, output_dir / EPSILON)
    write_json(output_dir / COMPOSITION, found.to_json())


def _opened(paths: Sequence[Path], by: str, same_run: bool) -> list[tuple[NormLog, RecordedRun]]:
    opened = [_run(path, by) for path in paths]
    if not same_run:
        _check_distinct(paths, [recorded for _, recorded in opened])
    return opened


def _run(path: Path, by: str) -> tuple[NormLog, RecordedRun]:
    check_holds_log(path)
    run = open_run(path)
    recorded = recorded_run(run)
    if by in ("example_id", "unit_id"):
        return run.log, recorded
    return with_units(run.log, recorded, by)


def _usual(log: NormLog, recorded: RecordedRun) -> str:
    return recorded.declared.participation or usual_participation(log, None)


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


def _common_delta(paths: Sequence[Path], recorded: Sequence[RecordedRun]) -> float:
    """The delta of all runs; InputError where one has none, or they differ."""
    found = {path: run.declared.delta for path, run in zip(paths, recorded, strict=True)}
    named = ", ".join(f"{path}: {delta}" for path, delta in found.items())
    if None in found.values() or len(set(found.values())) > 1:
        raise InputError(f"the runs do not name one delta ({named}); pass --set delta=...")
    return float(next(iter(found.values())) or 0.0)


def _common_relation(
    paths: Sequence[Path], opened: Sequence[tuple[NormLog, RecordedRun]]
) -> str | None:
    """The relation that all runs declare; None if they declare none, and any will do.

    InputError where they differ.
    """
    declared = [recorded.declared.neighbouring or log.neighbouring for log, recorded in opened]
    if len(set(declared)) > 1:
        named = ", ".join(f"{path}: {one}" for path, one in zip(paths, declared, strict=True))
        raise InputError(
            f"the runs differ in their relation ({named}); pass --set neighbouring=..."
        )
    if declared[0] != "add_remove" or any(one.declared.neighbouring for _, one in opened):
        return declared[0]
    usual = [usual_relation(log, recorded.recorder) for log, recorded in opened]
    return next((relation for relation in usual if relation is not None), None)


def _of_run(path: Path, table: EpsilonTable) -> dict[str, Any]:
    return {
        "path": str(path),
        "sampling": table.account.sampling,
        "steps": table.account.total_steps,
        "n": len(table),
        "worst_case_epsilon": table.worst_case_epsilon,
        "median_epsilon": float(np.median(table.epsilon)),
    }


def _weakest(paths: Sequence[Path], guarantees: Sequence[Guarantee]) -> tuple[str, tuple[str, ...]]:
    """The weakest status of the runs, and why it is not better."""
    weakest = max(guarantees, key=lambda guarantee: STATUSES.index(guarantee.status)).status
    reasons = [
        f"{path}: {reason}"
        for path, guarantee in zip(paths, guarantees, strict=True)
        for reason in guarantee.reasons
    ]
    return weakest, tuple(reasons)
