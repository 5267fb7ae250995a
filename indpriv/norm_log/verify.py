"""Verify what a run recorded: hashes, coverage, sampling, accountant. Sensitive in its counts."""

import hashlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np

from indpriv import _files, _folders, _formatting
from indpriv._facts import FAILED, NOT_CHECKED, PASSED, Fact, fact, text
from indpriv.errors import EvidenceError
from indpriv.norm_log import evidence, fields, run_files, writer
from indpriv.norm_log.journal_state import LogState, batch_norms_of, hashed_when_read
from indpriv.norm_log.norm_log import OpenedRun


def verify(run: OpenedRun, signed_by: Path | None = None) -> list[Fact]:
    """Check all that the log of a run can prove; signed_by: public keys of who may have signed."""
    return [
        journal_check(run, signed_by),
        *_records(run),
        _coverage(run),
        *evidence.session_checks(run),
        *_took_part(run),
        _norm_pass(run),
        _declared_settings(run),
        _permissions(run.run_dir),
    ]


def journal_check(state: LogState, signed_by: Path | None = None) -> Fact:
    """Whether log and files beside it are as they were closed, and signed by a key in signed_by."""
    there, said = run_files.files_beside(state.run_dir), state.beside or {}
    faults = [
        f"{name} is not as it was when the log was closed: restore it from a copy"
        for name, sha256 in said.items()
        if name not in there or _files.sha256(there[name]) != sha256
    ]
    origin, fault = _origin(state, run_files.public_keys(signed_by) if signed_by else None)
    new = ", ".join(sorted(there.keys() - said.keys()))
    if signed_by and not fault and new:
        fault = f"{origin}, but not {new}"
    if faults or fault:
        return fact("check.journal", FAILED, faults="; ".join([*faults, *filter(None, [fault])]))
    torn = "; a torn last line was dropped" if state.torn else ""
    beside = f"as are {len(said)} files beside it" + f" ({new} came later)" * bool(new)
    if state.beside is None:
        beside = "without hashes of files beside it"
    return fact("check.journal", PASSED, beside=beside, torn=torn, origin=origin)


def _origin(state: LogState, keys: set[bytes] | None) -> tuple[str, str]:
    """Who signed the log, and what is wrong with that; of a part only where keys are named."""
    path = state.run_dir / run_files.SIGNATURE
    if not path.is_file():
        unsigned = "unsigned: whoever gave you this run could have changed it"
        return unsigned, unsigned if keys else ""
    if keys is None and find_spec("cryptography") is None:
        return "signed, not verified: pip install 'indpriv[sign]'", ""
    lines = (state.run_dir / run_files.JOURNAL).read_bytes().splitlines(keepends=True)
    public, signed = run_files.read_signature(path, _ends(lines))
    whose = run_files.fingerprint(public)
    by = f"signed by {whose}"
    if not signed:
        return by, f"the signature by {whose} is not of this log, or of more of it"
    if signed < len(lines):
        by += f" up to line {signed} of {len(lines)}, and not from there on"
    if keys is None:
        return f"{by}; compared with no key of yours", ""
    by += "" if public in keys else ", by none of your keys"
    return by, by if signed < len(lines) or public not in keys else ""


def _ends(lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number of each line that may be the last signed one, and the hash of all up to it."""
    digest = hashlib.sha512()
    for number, line in enumerate(lines, 1):
        digest.update(line)
        if number in (1, len(lines)) or b'"kind":"close"' in line:
            yield number, digest.copy().digest()


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
    files = run.files
    later = 0 if run.hashed_all else sum(hashed_when_read(run, line) for line in files)
    case = "later" if later else ""
    return [fact("check.records", PASSED, case, files=len(files), later=later)]


def _coverage(state: LogState) -> Fact:
    steps = state.total_steps
    if any(session.rounds is not None for session in state.sessions):
        return fact("check.coverage", PASSED, "rounds", steps=steps)
    n_recorded = sum(line["step"] < steps for line in state.lines["record"])
    recorded = text(
        "check.coverage",
        "recorded",
        recorded=n_recorded,
        steps=steps,
        examples=state.header["n_examples"],
        policy="" if state.policy is None else f" ({state.policy.describe()})",
        cost=_formatting.format_cost(state.pass_seconds, state.training_seconds),
    )
    if state.header["individually_clipped"]:
        headroom = state.header["run"].get("clip_headroom", 0.0)
        above = f" (norms plus {headroom:g} of max_grad_norm)" if headroom else ""
        return fact("check.coverage", PASSED, "levels", recorded=recorded, above=above)
    complete = steps and n_recorded == steps
    return fact("check.coverage", PASSED if complete else NOT_CHECKED, recorded=recorded)


def _took_part(state: LogState) -> Iterator[Fact]:
    """Whether batch norms are of those who were counted, in each session that counted them."""
    n_examples = state.header["n_examples"]
    spans = pairwise([*(session.from_step for session in state.sessions), state.total_steps])
    for session, (first, stop) in zip(state.sessions, spans, strict=True):
        known, kind = session.rounds or session.training, "example"
        if known is None or known.took_part is None or known.steps != stop - first:
            continue  # where steps differ, resuming declared some void
        if session.rounds is not None:
            kind = session.rounds.of
        steps = range(first, stop)
        norms = batch_norms_of(state, steps)
        if norms is None or not np.isin(np.asarray(steps), norms.steps).all():
            yield fact("check.took_part", NOT_CHECKED)
            continue
        found, total = writer.hash_of("i", (n_examples,)), 0
        for part in norms.participations(steps, n_examples):
            total += int(part.sum())
            found.update(part.tobytes())
        status = PASSED if found.hexdigest() == known.took_part else FAILED
        yield fact("check.took_part", status, total=total, steps=len(steps), kind=kind)


def _declared_settings(state: LogState) -> Fact:
    """Compare the settings in run.json with what the optimizer used at each step."""
    if state.unwatched:
        return fact("check.declared_settings", NOT_CHECKED, "unwatched")
    declared = run_files.read_run_json(state.run_dir).get("training") or {}
    names = [name for name in fields.SETTING_NAMES if declared.get(name) is not None]
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
    norm_pass = {"backend": "unknown", "fallback": None, **state.header["norm_pass"]}
    case = "fallback" if norm_pass["fallback"] else ""
    return fact("check.norm_pass", PASSED, case, **norm_pass)


def _permissions(run_dir: Path) -> Fact:
    if _folders.is_remote(run_dir) or os.name == "nt":
        where = "bucket" if _folders.is_remote(run_dir) else "windows"
        return fact("check.permissions", NOT_CHECKED, where)
    exposed = [path.name for path in run_dir.rglob("*.parquet") if _files.others_can_read(path)]
    if exposed:
        run = shlex.quote(str(run_dir))
        return fact("check.permissions", FAILED, count=len(exposed), example=exposed[0], run=run)
    return fact("check.permissions", PASSED)
