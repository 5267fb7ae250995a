"""Verify the evidence of a run: hashes, chain, coverage, sampling, accountant. Sensitive only in its counts."""

import stat
from pathlib import Path

import numpy as np

from indpriv._files import read_json
from indpriv._formatting import format_cost
from indpriv.errors import EvidenceError
from indpriv.norm_log.evidence import FAILED, NOT_CHECKED, PASSED, Check
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
        return [Check("journal", FAILED, str(error))]
    checks = [
        Check(
            "journal",
            PASSED,
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
        return [Check(f"record {name}", FAILED, fault) for name, fault in faults.items()]
    try:
        NormLog.open(run_dir)
    except EvidenceError as error:
        return [Check("records", FAILED, str(error))]
    count = state.n_files
    return [
        Check(
            "records",
            PASSED,
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
        return Check(
            "coverage",
            PASSED,
            f"{detail}; between records, training clipped at the last one's levels{above}",
        )
    if recorded == steps and steps:
        return Check("coverage", PASSED, detail)
    return Check(
        "coverage", NOT_CHECKED, f"{detail}; norms at the others are assumed (between_records)"
    )


def _check_declared(run_dir: Path, state: LogState) -> Check:
    """Hold what run.json says of the steps against what the optimizer did at each of them."""
    if state.unwatched:
        return Check("run.json", NOT_CHECKED, "nothing else tells what the optimizer used")
    path = run_dir / "run.json"
    content = read_json(path) if path.is_file() else {}
    declared = content.get("training", {}) if isinstance(content, dict) else None
    if not isinstance(declared, dict):
        return Check(
            "run.json", FAILED, "it is not a JSON object with a table of training settings"
        )
    names = [
        name for name in ("noise_multiplier", "max_grad_norm", "sample_rate") if name in declared
    ]
    if not names or not state.steps:
        return Check(
            "run.json",
            NOT_CHECKED,
            "it declares no step settings; the account uses the optimizer's own",
        )
    settings = state.settings()
    for name in names:
        realised = settings[name]
        if not np.allclose(realised, declared[name], rtol=1e-9):
            return Check(
                "run.json",
                FAILED,
                f"it declares {name}={declared[name]}, the optimizer used {realised.min():g} to {realised.max():g}, "
                "which the account uses",
            )
    return Check("run.json", PASSED, f"{', '.join(names)} are the optimizer's own at every step")


def _check_norm_pass(state: LogState) -> Check:
    caveats = "; ".join(
        dict.fromkeys(caveat for evidence in state.evidence for caveat in evidence["caveats"])
    )
    if state.unwatched:
        return Check("norm pass", NOT_CHECKED, caveats)
    if caveats:
        return Check("norm pass", FAILED, caveats)
    norm_pass = state.header["norm_pass"]
    fallback = norm_pass.get("fallback")  # logs written before this was kept lack it
    slower = f"; not layerwise, which is faster: {fallback}" if fallback else ""
    return Check(
        "norm pass",
        PASSED,
        f"{norm_pass.get('backend', 'unknown')}, checked against one example at a time{slower}",
    )


def _check_permissions(run_dir: Path) -> Check:
    exposed = [
        path.name
        for path in run_dir.rglob("*.parquet")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ]
    if exposed:
        return Check(
            "permissions",
            FAILED,
            f"sensitive files can be read by others: {len(exposed)}, e.g. {exposed[0]}; run chmod -R go= {run_dir}",
        )
    return Check("permissions", PASSED, "sensitive files are readable by their owner only")
