"""Verify the evidence of a run: hashes, chain, coverage, sampling, accountant. Sensitive only in its counts."""

import stat
from dataclasses import replace
from pathlib import Path

import numpy as np

from indpriv._files import read_json
from indpriv._formatting import format_cost
from indpriv.errors import EvidenceError
from indpriv.norm_log.evidence import (
    COVERAGE,
    DECLARED_SETTINGS,
    HASH_CHAIN,
    NORM_PASS,
    PERMISSIONS,
    RECORDS,
    Check,
)
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.reader import LogState, read_state, record_faults


def verify(run_dir: Path) -> list[Check]:
    """Check everything that the log of a run can prove.

    Args:
        run_dir: the directory a Recorder wrote.

    Returns:
        One Check per assumption. A check that fails makes an account of the run an estimate, or refuses it.
    """
    try:
        state = read_state(run_dir)
    except EvidenceError as error:
        return [HASH_CHAIN.failed(str(error))]
    checks = [
        HASH_CHAIN.passed(
            "every line continues the hash chain" + ("; a torn last line was dropped" * state.torn),
        ),
        *_check_records(run_dir, state),
        _check_coverage(state),
    ]
    checks += [*state.checks(), _check_norm_pass(state)]
    checks += [_check_declared(run_dir, state), _check_permissions(run_dir)]
    return checks


def _check_records(run_dir: Path, state: LogState) -> list[Check]:
    faults = record_faults(run_dir, state)
    if faults:
        return [
            replace(RECORDS, title=f"record {name}").failed(fault) for name, fault in faults.items()
        ]
    try:
        NormLog.open(run_dir)
    except EvidenceError as error:
        return [RECORDS.failed(str(error))]
    count = state.n_files
    return [
        RECORDS.passed(
            f"{count} files with the hashes of the journal, ids and labels in one order",
        )
    ]


def _check_coverage(state: LogState) -> Check:
    steps = state.total_steps
    recorded = sum(entry["step"] < steps for entry in state.records)
    detail = (
        f"{recorded:,} of {steps:,} steps have a record of all {state.header['n_examples']:,} examples"
        f"{'' if state.policy is None else f' ({state.policy.describe()})'}; "
        f"{format_cost(state.pass_seconds, state.training_seconds)}"
    )
    if state.header["individually_clipped"]:
        headroom = state.header["run"].get("clip_headroom", 0.0)
        above = f" (norms and {headroom:g} of max_grad_norm)" if headroom else ""
        return COVERAGE.passed(
            f"{detail}; between records, training clipped at the last one's levels{above}",
        )
    if recorded == steps and steps:
        return COVERAGE.passed(detail)
    return COVERAGE.not_checked(f"{detail}; norms at the others are assumed (between_records)")


def _check_declared(run_dir: Path, state: LogState) -> Check:
    """Hold what run.json says of the steps against what the optimizer did at each of them."""
    if state.unwatched:
        return DECLARED_SETTINGS.not_checked("nothing else tells what the optimizer used")
    path = run_dir / "run.json"
    content = read_json(path) if path.is_file() else {}
    declared = content.get("training", {}) if isinstance(content, dict) else None
    if not isinstance(declared, dict):
        return DECLARED_SETTINGS.failed("it is not a JSON object with a table of training settings")
    names = [
        name for name in ("noise_multiplier", "max_grad_norm", "sample_rate") if name in declared
    ]
    if not names or not state.steps:
        return DECLARED_SETTINGS.not_checked(
            "it declares no step settings; the account uses the optimizer's own",
        )
    settings = state.settings()
    for name in names:
        realised = settings[name]
        if not np.allclose(realised, declared[name], rtol=1e-9):
            return DECLARED_SETTINGS.failed(
                f"it declares {name}={declared[name]}, the optimizer used {realised.min():g} to {realised.max():g}, "
                "which the account uses",
            )
    return DECLARED_SETTINGS.passed(f"{', '.join(names)} are the optimizer's own at every step")


def _check_norm_pass(state: LogState) -> Check:
    caveats = "; ".join(
        dict.fromkeys(caveat for evidence in state.evidence for caveat in evidence["caveats"])
    )
    if state.unwatched:
        return NORM_PASS.not_checked(caveats)
    if caveats:
        return NORM_PASS.failed(caveats)
    norm_pass = state.header["norm_pass"]
    fallback = norm_pass.get("fallback")  # logs written before this was kept lack it
    slower = f"; not layerwise, which is faster: {fallback}" if fallback else ""
    return NORM_PASS.passed(
        f"{norm_pass.get('backend', 'unknown')}, checked against one example at a time{slower}",
    )


def _check_permissions(run_dir: Path) -> Check:
    exposed = [
        path.name
        for path in run_dir.rglob("*.parquet")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ]
    if exposed:
        return PERMISSIONS.failed(
            f"sensitive files can be read by others: {len(exposed)}, e.g. {exposed[0]}; run chmod -R go= {run_dir}",
        )
    return PERMISSIONS.passed("sensitive files are readable by their owner only")
