"""From a run directory to an audit directory: how the run is accounted, and what is written."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from indpriv import _facts, _storage
from indpriv._formatting import format_delta, sentence
from indpriv._types import NDArray, StageProgress, silent
from indpriv.accountant.account import account_parts, table_for
from indpriv.accountant.blocks import versions, workers_of
from indpriv.accountant.method import ESTIMATE, Method, usual_participation, warn_of
from indpriv.analysis import guarantee, summary
from indpriv.analysis import recorded_run as recorded_runs
from indpriv.analysis.recorded_run import AuditedRun, Declared, RecordedRun, find_all
from indpriv.audit.audit_directory import in_progress, write_audit
from indpriv.epsilon_table import LARGEST_FILE, EpsilonTable
from indpriv.errors import ChainError, EvidenceError, InputError
from indpriv.norm_log import verify, writer
from indpriv.norm_log.evidence import ANY_CHOICE, CHECKS, OF_SECRECY, if_known, lines_of
from indpriv.norm_log.norm_log import NormLog, OpenedRun, open_run
from indpriv.norm_log.run_files import EXAMPLES, read_run_json, why_no_run
from indpriv.report.figures import check_images

READING, CHECKING, ACCOUNTING = "reading the log", "checking the run", "accounting"
WRITING = "writing"


class MethodOptions(TypedDict, total=False):
    """Arguments of `indpriv.account` that an audit hands on; left out or None, as beside it."""

    delta: float | None  # the one in run.json
    # accountant, conversion, between_records, preset: those in run.json, else as `indpriv.account`
    # has them
    accountant: str
    conversion: str
    between_records: str
    preset: str | None
    # the one in run.json, else "known" if batches were no Poisson samples and the log says who took
    # part
    participation: str | None
    # the one in run.json, else that of the log, or "zero_out" where updates tell the number of
    # examples
    neighbouring: str | None


def method_of_run(
    log: NormLog, recorded: RecordedRun, path: Path, options: MethodOptions
) -> tuple[Method, list[str]]:
    """How to account the log of a run, and the words that say so.

    InputError without a delta; PrivacyWarning as of `indpriv.account`.
    """
    declared = recorded.declared
    given = {**declared.account, **{key: one for key, one in options.items() if one is not None}}
    if given.get("delta") is None:
        n = log.n_examples
        example = format_delta(10.0 ** -len(str(10 * n)))  # below 1 / (10 n)
        raise _facts.refused("refusal.audits", "delta", n=n, path=path, example=example)
    participation = usual_participation(log, given.get("preset"))
    relation = guarantee.usual_relation(log, recorded.recorder)
    usual: dict[str, Any] = {"participation": participation, "neighbouring": relation}
    method = Method(**usual | given)
    warn_of(log, method)
    words = ["--delta", repr(float(method.delta))]  # with all digits
    if method.preset is not None:
        words += ["--set", f"preset={method.preset}"]
    elif method.participation == "secret":
        names = ["accountant", "conversion", "between_records"]
        words += [word for name in names for word in ("--set", f"{name}={getattr(method, name)}")]
    if method.participation != participation:
        words += ["--participation", method.participation]
    if method.neighbouring is not None and method.neighbouring != relation:
        words += ["--set", f"neighbouring={method.neighbouring}"]
    return method, words


@contextmanager
def _stage(tell: StageProgress, name: str) -> Iterator[None]:
    """A stage whose progress is not known while it lasts."""
    tell(name, 0, 1)
    yield
    tell(name, 1, 1)


def read_run(
    path: Path,
    unreadable: str = "refuse",
    unit_column: str | None = None,
    tell: StageProgress = silent,
) -> tuple[OpenedRun, NormLog, RecordedRun]:
    """A run, its log with the units that a column names, and what else is known of the run."""
    with _stage(tell, READING):
        if wrong := why_no_run(path):
            raise InputError(wrong)
        run = open_run(path, unreadable=unreadable)
    with _stage(tell, CHECKING):
        log, recorded = run.log, recorded_runs.recorded_run(run)
    if unit_column is not None:
        log, recorded = recorded_runs.with_units(log, recorded, unit_column)
    return run, log, recorded


def accounted(
    log: NormLog, recorded: RecordedRun, method: Method, by: Sequence[str] = ()
) -> tuple[EpsilonTable, AuditedRun]:
    """The account of a run, in memory, and the run with it."""
    recorded = _read_by(method, recorded)
    table = as_checked(table_for(log, method), recorded.checks)
    return table, AuditedRun(log, table, recorded, by=by)


def _read_by(method: Method, recorded: RecordedRun) -> RecordedRun:
    """The same with its checks as an account by this method reads them."""
    known = method.participation == "known"
    return replace(recorded, checks=if_known(recorded.checks)) if known else recorded


def as_checked(table: EpsilonTable, checks: Sequence[_facts.Fact]) -> EpsilonTable:
    """The account of a run as an estimate, if it rests on who took part and a check refutes that.

    With known participation, checks are those of `if_known`.
    """
    refuted = [one for one in checks if (one.key, one.status) == ("took_part", _facts.FAILED)]
    if not refuted or table.account.participation == "secret":
        return table
    return replace(table, claim=ESTIMATE, claim_reason=sentence(refuted[0].detail))


def evidence_of_run(
    open_it: Callable[[], OpenedRun], signed_by: Path | None
) -> tuple[Sequence[_facts.Fact], Sequence[_facts.Fact]]:
    """Checks and lines as an audit of the run has them: fewer if participation counts as known.

    open_it: opens the run, with all of its files hashed.
    """
    try:
        opened = replace(open_it(), unreadable="refuse")
        checks, known = verify.verify(opened, signed_by), False
    except ChainError as error:
        checks = [CHECKS["journal"].fact("failed", str(error))]
        return checks, lines_of(checks, {})
    with suppress(EvidenceError):  # as a check says
        known = usual_participation(opened.log) == "known"
    if known:
        checks = [*if_known(checks), *([ANY_CHOICE] if opened.sampler == "other" else [])]
    declared = Declared(read_run_json(opened.run_dir))
    recorder = {**opened.header["run"], "seeded": opened.seeded}
    left_out = OF_SECRECY if known else frozenset[str]()
    return checks, lines_of(checks, recorder, declared.of_lines, left_out)


def audit(
    path: Path,
    output_dir: Path,
    *,
    by: Sequence[str] = (),
    unit_column: str | None = None,
    unreadable: str = "refuse",
    seed: int = 0,
    images: NDArray[np.float32] | None = None,
    signals: Path | None = None,
    baseline_signals: Path | None = None,
    engine: str = "local",
    upload_to: str | Path | None = None,
    bucket_is_private: bool = False,
    since: summary.Audit | None = None,
    progress: StageProgress | None = None,
    **method: Unpack[MethodOptions],
) -> summary.Audit:
    """Account, analyse and attack a recorded run, and write an audit directory.

    Args:
        path: a run directory, or its address, e.g. s3://bucket/runs/adult.
        output_dir: a directory for epsilon.parquet, audit.json, report.html and copies of the
            example tables.
        by: columns such as "race" or "age:bins=10"; default those in run.json, else label and all
            metadata.
        unit_column: metadata column that names the owner of each row; epsilons are then of owners.
        unreadable: "refuse" a log with damaged or missing records, or count those at "worst_case".
        seed: of the random choices of attacks and group tables, not of training.
        images: (n_examples, channels, height, width) inputs by id, some of which the report shows.
        signals: folder of `train_references` for this run; attacks that need one are then run.
        baseline_signals: the same for the non-private baseline.
        engine: "local", or "ray" to account on a Ray cluster that reads the same `path`.
        upload_to: address to which the audit is sent once it is whole, e.g. s3://bucket/audit.
        bucket_is_private: say that only those who may see the audit can read that bucket.
        since: an earlier audit, with which the report compares this one.
        progress: called as progress(stage, done, total).
        method: how epsilons are computed, see `MethodOptions`.

    Returns:
        what audit.json holds.

    Raises:
        InputError: no run directory, or output_dir is it; no delta; a column that does not exist.
        EvidenceError: a log that is damaged or contradicts itself.
    """
    path, output_dir = _storage.location(path), _storage.location_on_disk(output_dir, "an audit is")
    by = [by] if isinstance(by, str) else by
    target = _storage.bucket_to_write(upload_to, bucket_is_private)
    if output_dir.resolve() == path.resolve():
        raise _facts.refused("refusal.audits", "in_the_run", folder=output_dir, name=EXAMPLES)
    if images is not None:
        check_images(images)
    workers, tell = workers_of(engine), progress or silent
    opened, log, recorded = read_run(path, unreadable, unit_column, tell)
    units = "" if log.unit_ids is None else writer.fingerprint(log.unit_ids)
    identity = [opened.fingerprint, units, *sorted(opened.faults)]
    recorded = recorded_runs.with_references(recorded, path, signals, baseline_signals)
    chosen, options = method_of_run(log, recorded, path, method)
    recorded = _read_by(chosen, recorded)
    words = ["indpriv", "audit", str(path), "--output-dir", str(output_dir), *options]
    words += [word for column in by for word in ("--by", column)]
    settings: dict[str, Any] = {
        "--unit-column": unit_column,
        "--set unreadable": None if unreadable == "refuse" else unreadable,
        "--signals": signals,
        "--set baseline_signals": baseline_signals,
        "--set seed": seed,
    }
    for option, value in settings.items():
        flag, _, key = option.partition(" ")
        words += [] if value is None else [flag, f"{key}={value}" if key else str(value)]
    which = {"log": identity, "method": chosen.to_json(), "versions": versions()}
    with in_progress(output_dir) as folder:
        report = partial(tell, ACCOUNTING)
        parts = account_parts(log, chosen, folder, which, progress=report, workers=workers)
        parts = as_checked(parts, recorded.checks)
        epsilons, name = _in_memory_if_needed(parts, log, recorded), path.resolve().name
        run = AuditedRun(log, epsilons, recorded, name, by, chosen, seed, shlex.join(words), tell)
        found = find_all(run)
        with _storage.uploaded(output_dir, target), _stage(tell, WRITING):
            write_audit(output_dir, run, found, images, since)
    return found


def _in_memory_if_needed(parts: EpsilonTable, log: NormLog, recorded: RecordedRun) -> EpsilonTable:
    """The epsilons in parts, unless they are few or their analysis needs all of them at once.

    It does for units, signals of reference models, attributes, reconstructions and federated runs,
    and if the example table has the rows in another order than the log.
    """
    examples = recorded.examples
    if (
        len(parts) <= LARGEST_FILE
        or parts.account.rows_per_unit is not None
        or log.unit_ids is not None
        or recorded.has_signals
        or recorded.leakage
        or recorded.dp.attributes is not None
        or recorded.recorder.get("rounds")
        or (examples is not None and len(examples.train_rows(log.example_ids).ranges()) == 1)
    ):
        return parts.table(parts.details)
    return parts
