"""Verify what a run recorded: hashes, coverage, sampling, accountant. Sensitive in its counts."""

import os
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from indpriv._facts import FAILED, NOT_CHECKED, PASSED, Fact, fact, text
from indpriv._files import others_can_read
from indpriv._formatting import format_cost
from indpriv._storage import is_remote
from indpriv.errors import EvidenceError
from indpriv.norm_log.journal_state import LogState
from indpriv.norm_log.norm_log import OpenedRun
from indpriv.norm_log.reader import Faults, batch_norms_of, hashed_when_read
from indpriv.norm_log.run_files import read_run_json
from indpriv.norm_log.sealing import journal_check
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.step_settings import SETTING_NAMES
from indpriv.norm_log.writer import hash_of


def verify(run: OpenedRun, signed_by: Path | None = None) -> list[Fact]:
    """Check everything that the log of a run can prove.

    signed_by: a file with the public keys of those who may have signed it; see `journal_check`.

    Returns:
        one check or more per assumption. If one fails, an account of the run is an estimate, or it
        is refused.
    """
    state = run.state
    return [
        journal_check(state, signed_by),
        *_records(run),
        _coverage(state),
        *state.checks(),
        *_took_part(state, run.faults),
        _norm_pass(state),
        _declared_settings(state),
        _permissions(state.run_dir),
    ]


def _records(run: OpenedRun) -> list[Fact]:
    if run.faults:
        return [
            replace(fact("check.records", FAILED, fault=fault), title=f"record {name}")
            for name, fault in run.faults.items()
        ]
    try:
        _ = run.log
    except EvidenceError as error:
        return [fact("check.records", FAILED, fault=error)]
    files, later = len(run.state.files), 0 if run.hashed_all else hashed_when_read(run.state)
    return [fact("check.records", PASSED, "later" if later else "", files=files, later=later)]


def _coverage(state: LogState) -> Fact:
    steps = state.total_steps
    if state.of_rounds:
        return fact("check.coverage", PASSED, "rounds", steps=steps)
    n_recorded = sum(line["step"] < steps for line in state.records)
    recorded = text(
        "check.coverage",
        "recorded",
        recorded=n_recorded,
        steps=steps,
        examples=state.header["n_examples"],
        policy="" if state.policy is None else f" ({state.policy.describe()})",
        cost=format_cost(state.pass_seconds, state.training_seconds),
    )
    if state.header["individually_clipped"]:
        headroom = state.header["run"].get("clip_headroom", 0.0)
        above = f" (norms plus {headroom:g} of max_grad_norm)" if headroom else ""
        return fact("check.coverage", PASSED, "levels", recorded=recorded, above=above)
    complete = steps and n_recorded == steps
    return fact("check.coverage", PASSED if complete else NOT_CHECKED, recorded=recorded)


def _took_part(state: LogState, faults: Faults) -> list[Fact]:
    """One check for each session that counted how often each example was in the batch of a step."""
    starts = [session.from_step for session in state.sessions]
    spans = pairwise([*starts, state.total_steps])
    return [
        _who(state, faults, range(first, stop), session)
        for session, (first, stop) in zip(state.sessions, spans, strict=True)
        # Else resuming declared some steps void.
        if session.took_part is not None and session.took_part[0] == stop - first
    ]


def _who(state: LogState, faults: Faults, steps: range, session: SessionCounts) -> Fact:
    """Whether the batch norms of a session are of those who were counted at each step."""
    norms, n_examples = batch_norms_of(state, faults), state.header["n_examples"]
    if norms is None or not np.isin(np.asarray(steps), norms.steps).all():
        return fact("check.took_part", NOT_CHECKED)
    found, total = hash_of("i", (n_examples,)), 0
    for part in norms.participations(steps, n_examples):
        total += int(part.sum())
        found.update(part.tobytes())
    counted, kind = (session.took_part or (0, ""))[1], "example"
    if session.rounds is not None:
        kind = session.rounds.of
    status = PASSED if found.hexdigest() == counted else FAILED
    return fact("check.took_part", status, total=total, steps=len(steps), kind=kind)


def _declared_settings(state: LogState) -> Fact:
    """Compare the settings in run.json with what the optimizer used at each step."""
    if state.unwatched:
        return fact("check.declared_settings", NOT_CHECKED, "unwatched")
    declared = read_run_json(state.run_dir).get("training") or {}
    names = [name for name in SETTING_NAMES if declared.get(name) is not None]
    if not names or not state.steps:
        return fact("check.declared_settings", NOT_CHECKED)
    settings = state.settings()
    for name in names:
        used, said = getattr(settings, name), np.atleast_1d(declared[name])  # one, or one a step
        n, steps = len(said), len(used)
        too_few = n != 1 and n < steps
        if too_few or not np.allclose(used, said[:steps], rtol=1e-9):
            return fact(
                "check.declared_settings",
                FAILED,
                "too_few" if too_few else "",
                name=name,
                declared=f"{said.min():g} to {said.max():g}" if n > 1 else declared[name],
                n=n,
                steps=steps,
                least=used.min(),
                most=used.max(),
            )
    return fact("check.declared_settings", PASSED, names=", ".join(names))


def _norm_pass(state: LogState) -> Fact:
    if caveats := "; ".join(state.norm_caveats):
        status = NOT_CHECKED if state.unwatched else FAILED
        return fact("check.norm_pass", status, "caveats", caveats=caveats)
    if state.unwatched:
        return fact("check.norm_pass", NOT_CHECKED)
    norm_pass = state.header["norm_pass"]
    fallback = norm_pass.get("fallback")
    return fact(
        "check.norm_pass",
        PASSED,
        "fallback" if fallback else "",
        backend=norm_pass.get("backend", "unknown"),
        fallback=fallback,
    )


def _permissions(run_dir: Path) -> Fact:
    if is_remote(run_dir):
        return fact("check.permissions", NOT_CHECKED, "bucket")
    if os.name == "nt":
        return fact("check.permissions", NOT_CHECKED, "windows")
    exposed = [path.name for path in run_dir.rglob("*.parquet") if others_can_read(path)]
    if exposed:
        run = shlex.quote(str(run_dir))
        return fact("check.permissions", FAILED, count=len(exposed), example=exposed[0], run=run)
    return fact("check.permissions", PASSED)
