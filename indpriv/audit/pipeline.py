"""From a run directory to an audit directory."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from indpriv._progress import StageProgress, silent
from indpriv._storage import bucket_to_write, location, location_on_disk, uploaded
from indpriv.accountant.account import account_parts
from indpriv.accountant.blocks import workers_of
from indpriv.accountant.cluster import versions
from indpriv.analysis.attacks.membership import attack_table, attacks_of, unit_attack_table
from indpriv.analysis.audited_run import AuditedRun, find_all
from indpriv.analysis.recorded_run import (
    RecordedRun,
    in_rows_of,
    recorded_run,
    with_references,
    with_units,
)
from indpriv.analysis.summary import Audit
from indpriv.audit.audit_directory import in_progress, write_audit
from indpriv.audit.method_of_run import MethodOptions, as_checked, method_of_run
from indpriv.epsilon_table import LARGEST_FILE, EpsilonParts, Epsilons, EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.evidence import if_known
from indpriv.norm_log.norm_log import NormLog, open_run
from indpriv.norm_log.run_files import EXAMPLES, check_holds_log
from indpriv.norm_log.writer import fingerprint
from indpriv.report.figures import check_images
from indpriv.report.search import MOST_EXAMPLES, search_data

READING, CHECKING, ACCOUNTING = "reading the log", "checking the run", "accounting"
WRITING = "writing"


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
    since: Audit | None = None,
    progress: StageProgress | None = None,
    **method: Unpack[MethodOptions],
) -> Audit:
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
    path, output_dir = location(path), location_on_disk(output_dir, "an audit is")
    target = bucket_to_write(upload_to, bucket_is_private)
    _check_arguments(path, output_dir, images)
    workers, tell = workers_of(engine), progress or silent
    folders = (signals, baseline_signals)
    log, recorded, identity = _read(path, unreadable, unit_column, folders, tell)
    chosen, options = method_of_run(log, recorded, path, method)
    if chosen.participation == "known":
        recorded = replace(recorded, checks=if_known(recorded.checks))
    command = _command(path, output_dir, options, by, unit_column, unreadable, seed, folders)
    name, report = path.resolve().name, partial(tell, ACCOUNTING)
    which = {"log": identity, "method": chosen.to_json(), "versions": versions()}
    with in_progress(output_dir) as folder:
        parts = account_parts(log, chosen, folder, which, progress=report, workers=workers)
        parts = as_checked(parts, recorded.checks)
        epsilons = _in_memory_if_needed(parts, log, recorded)
        run = AuditedRun(log, epsilons, recorded, name, by, chosen, seed, command, tell)
        found = find_all(run)
        with uploaded(output_dir, target):
            _write(output_dir, run, found, images, since)
    return found


@contextmanager
def _stage(tell: StageProgress, name: str) -> Iterator[None]:
    """A stage whose progress is not known while it lasts."""
    tell(name, 0, 1)
    yield
    tell(name, 1, 1)


def _check_arguments(path: Path, output_dir: Path, images: NDArray[np.float32] | None) -> None:
    if output_dir.resolve() == path.resolve():
        raise InputError(
            f"output_dir={output_dir} is the run itself, whose {EXAMPLES} the audit's own would "
            f"replace; choose another directory, e.g. {path / 'audit'}"
        )
    if images is not None:
        check_images(images)


def _in_memory_if_needed(parts: EpsilonParts, log: NormLog, recorded: RecordedRun) -> Epsilons:
    """The epsilons in parts, unless they are few or their analysis needs all of them at once.

    It does for units, signals of reference models, attributes, reconstructions and federated runs,
    and if the example table has the rows in another order than the log.
    """
    several = recorded.references or recorded.baseline_references or recorded.leakage
    units = parts.account.rows_per_unit is not None or log.unit_ids is not None
    examples = recorded.examples
    if (
        len(parts) <= LARGEST_FILE
        or units
        or several
        or recorded.attributes is not None
        or recorded.recorder.get("rounds")
        or (examples is not None and len(examples.train_rows(log.example_ids).ranges()) == 1)
    ):
        return parts.table(parts.details)
    return parts


def _write(
    output_dir: Path,
    run: AuditedRun,
    found: Audit,
    images: NDArray[np.float32] | None,
    since: Audit | None,
) -> None:
    with _stage(run.tell, WRITING):
        epsilons, recorded, search, attacks = run.epsilons, run.recorded, None, None
        if isinstance(epsilons, EpsilonTable):
            search, scored = _searched(run, epsilons, found), run.once(attacks_of)
            attacks = unit_attack_table(epsilons, recorded, scored)
            if attacks is None and recorded.references:
                attacks = attack_table(epsilons, recorded, scored, found.ceilings)
        ids = run.log.example_ids
        write_audit(output_dir, epsilons, recorded, found, images, search, attacks, ids, since)


def _searched(run: AuditedRun, table: EpsilonTable, found: Audit) -> Markup | None:
    """What the report's search reads; None for more examples than a page can hold."""
    examples = run.recorded.examples
    if len(table) > MOST_EXAMPLES or examples is None:
        return search_data(found, run.log, table, None)
    train = in_rows_of(table, examples).aligned(table.example_ids)
    return search_data(found, run.log, table, train)


def _read(
    path: Path,
    unreadable: str,
    unit_column: str | None,
    folders: tuple[Path | None, Path | None],
    tell: StageProgress,
) -> tuple[NormLog, RecordedRun, list[str]]:
    """The log of a run directory, with the units of a column, what else is known, and hashes.

    folders: signals of reference models for the run and for its baseline. The hashes say of which
    log an account is.
    """
    with _stage(tell, READING):
        check_holds_log(path)
        run = open_run(path, unreadable=unreadable)
    with _stage(tell, CHECKING):
        log, recorded = run.log, recorded_run(run)
    if unit_column is not None:
        log, recorded = with_units(log, recorded, unit_column)
    units = "" if log.unit_ids is None else fingerprint(log.unit_ids)
    hashes = [run.state.fingerprint, units, *sorted(run.faults)]
    return log, with_references(recorded, path, *folders), hashes


def _command(
    path: Path,
    output_dir: Path,
    options: Sequence[str],
    by: Sequence[str],
    unit_column: str | None,
    unreadable: str,
    seed: int,
    folders: tuple[Path | None, Path | None],
) -> str:
    """The same audit on the command line."""
    words = ["indpriv", "audit", str(path), "--output-dir", str(output_dir), *options]
    for column in by:
        words += ["--by", column]
    if unit_column is not None:
        words += ["--unit-column", unit_column]
    if unreadable != "refuse":
        words += ["--set", f"unreadable={unreadable}"]
    signals, baseline_signals = folders
    if signals is not None:
        words += ["--signals", str(signals)]
    if baseline_signals is not None:
        words += ["--set", f"baseline_signals={baseline_signals}"]
    return shlex.join([*words, "--set", f"seed={seed}"])
