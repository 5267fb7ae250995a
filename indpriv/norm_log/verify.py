"""Verify what a run recorded: hashes, coverage, sampling, accountant. Sensitive in its counts."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np

from indpriv._files import others_can_read
from indpriv._formatting import format_cost
from indpriv._storage import is_remote
from indpriv.errors import EvidenceError
from indpriv.norm_log.checks.took_part import who_took_part
from indpriv.norm_log.evidence import (
    COVERAGE,
    DECLARED_SETTINGS,
    NORM_PASS,
    PERMISSIONS,
    RECORDS,
    Check,
)
from indpriv.norm_log.journal_state import LogState
from indpriv.norm_log.norm_log import OpenedRun
from indpriv.norm_log.reader import hashed_when_read
from indpriv.norm_log.schema import read_run_json
from indpriv.norm_log.sealing import journal_check
from indpriv.norm_log.step_settings import SETTING_NAMES


def verify(run: OpenedRun, signed_by: Path | None = None) -> list[Check]:
    """Check everything that the log of a run can prove.

    signed_by: a file with the public keys of those who may have signed it; see `journal_check`.

    Returns:
        one Check or more per assumption. If one fails, an account of the run is an estimate, or it
        is refused.
    """
    state = run.state
    return [
        journal_check(state, signed_by),
        *_records(run),
        _coverage(state),
        *state.checks(),
        *who_took_part(state, run.faults),
        _norm_pass(state),
        _declared_settings(state),
        _permissions(state.run_dir),
    ]


def _records(run: OpenedRun) -> list[Check]:
    if run.faults:
        return [
            replace(RECORDS, title=f"record {name}").failed(fault)
            for name, fault in run.faults.items()
        ]
    try:
        _ = run.log
    except EvidenceError as error:
        return [RECORDS.failed(str(error))]
    n_files, later = len(run.state.files), 0 if run.hashed_all else hashed_when_read(run.state)
    when = f", {later} of them compared when they are read" if later else ""
    return [
        RECORDS.passed(
            f"{n_files} files with the hashes of the journal{when}, ids and labels in one order"
        )
    ]


def _coverage(state: LogState) -> Check:
    steps = state.total_steps
    if state.of_rounds:
        return COVERAGE.passed(f"norms of all who took part in {steps:,} rounds; no others count")
    recorded = sum(line["step"] < steps for line in state.records)
    policy = "" if state.policy is None else f" ({state.policy.describe()})"
    detail = (
        f"{recorded:,} of {steps:,} steps have a record of all {state.header['n_examples']:,} "
        f"examples{policy}; {format_cost(state.pass_seconds, state.training_seconds)}"
    )
    if state.header["individually_clipped"]:
        headroom = state.header["run"].get("clip_headroom", 0.0)
        above = f" (norms plus {headroom:g} of max_grad_norm)" if headroom else ""
        return COVERAGE.passed(
            f"{detail}; between records, training clipped at the levels of the last one{above}"
        )
    if recorded == steps and steps:
        return COVERAGE.passed(detail)
    return COVERAGE.not_checked(f"{detail}; norms at the others are assumed (between_records)")


def _declared_settings(state: LogState) -> Check:
    """Compare the settings in run.json with what the optimizer used at each step."""
    if state.unwatched:
        return DECLARED_SETTINGS.not_checked("no other record of what the optimizer used exists")
    declared = read_run_json(state.run_dir).get("training") or {}
    names = [name for name in SETTING_NAMES if declared.get(name) is not None]
    if not names or not state.steps:
        return DECLARED_SETTINGS.not_checked(
            "it declares no step settings; the account uses the optimizer's own"
        )
    settings = state.settings()
    for name in names:
        used = getattr(settings, name)
        said = np.atleast_1d(declared[name])  # one value, or one for each planned step
        if len(said) > 1 and len(said) < len(used):
            return DECLARED_SETTINGS.failed(
                f"it declares {name} for {len(said)} steps of {len(used)}"
            )
        if not np.allclose(used, said[: len(used)], rtol=1e-9):
            shown = f"{said.min():g} to {said.max():g}" if len(said) > 1 else declared[name]
            return DECLARED_SETTINGS.failed(
                f"it declares {name}={shown}, the optimizer used {used.min():g} to "
                f"{used.max():g}, which the account uses"
            )
    return DECLARED_SETTINGS.passed(f"{', '.join(names)} are the optimizer's own at every step")


def _norm_pass(state: LogState) -> Check:
    caveats = "; ".join(state.norm_caveats)
    if state.unwatched:
        return NORM_PASS.not_checked(caveats or "norms are as the federated trainer passed them")
    if caveats:
        return NORM_PASS.failed(caveats)
    norm_pass = state.header["norm_pass"]
    fallback = norm_pass.get("fallback")
    slower = f"; not layerwise, which is faster: {fallback}" if fallback else ""
    return NORM_PASS.passed(
        f"{norm_pass.get('backend', 'unknown')}, compared with one example at a time{slower}"
    )


def _permissions(run_dir: Path) -> Check:
    if is_remote(run_dir):
        return PERMISSIONS.not_checked("who can read a bucket is set there, and not looked at")
    if os.name == "nt":
        return PERMISSIONS.not_checked("Windows does not say who can read a file in these terms")
    exposed = [path.name for path in run_dir.rglob("*.parquet") if others_can_read(path)]
    if exposed:
        return PERMISSIONS.failed(
            f"sensitive files can be read by others: {len(exposed)}, e.g. {exposed[0]}; run "
            f"find {shlex.quote(str(run_dir))} ! -name .here -exec chmod go= {{}} +"
        )
    return PERMISSIONS.passed("sensitive files are readable by their owner only")
