"""LogState: what the journal of a run says once it is replayed. Sensitive only in its counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from indpriv._facts import FAILED, NOT_CHECKED, Fact
from indpriv._journal import read_journal
from indpriv._reading import AtLeastZero, Number, Text, Whole, YesNo, check, table
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.evidence import (
    CHECKS,
    COMPARISONS,
    OF_FULL_RECORDS,
    OF_SECRECY,
    SEEDED,
    private_clipping_norm,
    session_checks,
)
from indpriv.norm_log.recording_policy import RecordingPolicy
from indpriv.norm_log.run_files import JOURNAL, MOST_STEPS, Line, files_of, holds_log
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.step_settings import SETTING_NAMES, StepSettings
from indpriv.norm_log.writer import SCHEMA

# What lines may hold, as far as anything here reads them. What is not named may be there, and may
# be anything. What lines say together is checked where it is used.
_COLUMN_BYTES = 32  # a column of a Parquet file takes more

_Count, _Steps = Annotated[Whole, Field(ge=1)], Annotated[Whole, Field(le=MOST_STEPS)]
_Positive = Annotated[Number, Field(gt=0)]
_Rate = Annotated[_Positive, Field(le=1)]


_RUN = table(
    {
        Text: "id? no_privacy? clipping? loss_reduction? sampler_class? optimizer? start?",
        YesNo: "seeded? secure_mode?",
        AtLeastZero: "clipping_norm_epsilon? clip_headroom? expected_batch_size?",
        Number: "learning_rate? momentum? weight_decay?",
        Whole: "max_batch_size? n_parameters?",
        _Count: "steps_per_epoch? ranks?",
        dict[str, Whole]: "layers?",
        dict[str, Text]: "versions?",
    }
)
_FILE: dict[Any, str] = {Text: "file sha256?", Whole: "bytes?", list[tuple[Whole, Text]]: "parts?"}
_SPAN = {**_FILE, Whole: "first bytes?", _Steps: "count"}
_BATCH_NORMS = table({**_SPAN, list[Whole]: "missing"})
_CLOSE = {table({Whole: "from_step"}): "evidence?", dict[str, Any]: "files?"}
_HEADER: dict[Any, str] = {
    Text: "ids_fingerprint ids_sha256 rounding_mode unit neighbouring sampler",
    Annotated[_Count, Field(lt=1 << 31)]: "n_examples",
    Whole: "n_exact",
    Number: "rounding",
    YesNo: "individually_clipped",
    table({Text: "backend? fallback?", AtLeastZero: "slack?", list[Text]: "caveats?"}): "norm_pass",
    _RUN: "run",
    dict[str, Any]: "policy",
    dict[str, Number]: "privacy_filter",
}
_RECORD = _FILE | {
    Text: "file sha256? ids_fingerprint targets_fingerprint",
    Whole: "step n_examples bytes?",
    _Positive: "max_grad_norm",
    AtLeastZero: "seconds",
}
_SETTINGS = {_Positive: "noise_multiplier max_grad_norm", _Rate: "sample_rate"}
_LINES = {
    "header": table(_HEADER),
    "record": table(_RECORD),
    "exact": table({**_SPAN, AtLeastZero: "seconds"}),
    "free": _BATCH_NORMS,
    "divided": _BATCH_NORMS,
    "filter": table(_SPAN),
    "steps": table({**_CLOSE, **_SETTINGS, Whole: "first", _Steps: "count"}),
    "close": table(_CLOSE),
    "truncate": table({Whole: "step"}),
}
_KEPT = {  # kind of line -> where its lines are kept
    "record": "records",
    "exact": "exact",
    "free": "batch_norms",
    "divided": "batch_norms",
    "filter": "left_out",
    "steps": "steps",
}


@dataclass
class LogState:
    """What the journal of a run says, without lines that were declared void."""

    run_dir: Path
    header: Line  # the first line
    torn: bool = False  # a torn last line was dropped
    records: list[Line] = field(default_factory=list)  # of record files, as the next three
    exact: list[Line] = field(default_factory=list)
    batch_norms: list[Line] = field(default_factory=list)
    left_out: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)
    # The last counts of every recording session; a resumed run has several.
    sessions: list[SessionCounts] = field(default_factory=list)
    closed: bool = False  # the recorder closed the log
    # Name -> hash, at the end of a closed log, of the files beside it; None in older logs too.
    beside: Mapping[str, str] | None = None
    voided_steps: int = 0  # that were run and declared void on resuming
    fingerprint: str = ""  # of all lines, and by the hashes in them of the record files

    @property
    def total_steps(self) -> int:
        """Number of steps that the log proves."""
        return self.steps[-1]["first"] + self.steps[-1]["count"] if self.steps else 0

    @property
    def files(self) -> list[Line]:
        """What the journal says of each record file."""
        lines = [*self.records, *self.exact, *self.batch_norms, *self.left_out]
        return [file for line in lines for file in files_of(line)]

    @property
    def of_rounds(self) -> bool:
        """A `RoundRecorder` wrote the log."""
        return any(session.rounds is not None for session in self.sessions)

    @property
    def unwatched(self) -> bool:
        """No recorder saw the training: norms come from checkpoints or from another trainer."""
        return any(session.training is None for session in self.sessions)

    def checks(self) -> list[Fact]:
        """What settings and the counts of all sessions say about assumptions of an account."""
        found = session_checks(
            self.sessions,
            n_examples=self.header["n_examples"],
            closed=self.closed,
            voided_steps=self.voided_steps,
            individually_clipped=self.header["individually_clipped"],
            filtered=bool(self.header["privacy_filter"]),
        )
        if not (self.clipping_norm_epsilon and self.steps):
            return found
        starts = [session.from_step for session in self.sessions]
        used = self.settings()
        return [*found, private_clipping_norm(used, starts, self.clipping_norm_epsilon)]

    @property
    def clipping_norm_epsilon(self) -> float:
        """Of the private release that max_grad_norm was set to; 0 if it was none."""
        return float(self.header["run"].get("clipping_norm_epsilon") or 0.0)

    @property
    def norm_caveats(self) -> tuple[str, ...]:
        """Reasons, found while norms were taken, why an account of this log is an estimate."""
        found = [caveat for session in self.sessions for caveat in session.caveats]
        return tuple(dict.fromkeys(found))

    @property
    def caveats(self) -> tuple[str, ...]:
        """`norm_caveats`, and what a check refuted or, of training's gradients, left open."""
        doubted = [check.detail for check in self.checks() if _is_doubt(check)]
        return tuple(dict.fromkeys([*self.norm_caveats, *doubted]))

    @property
    def known_caveats(self) -> tuple[str, ...]:
        """Reasons why an account with known participation is an estimate.

        It reads the norms of batches as training clipped them, whatever drew the batches, so
        neither the sampler nor the norm pass matters to it.
        """
        found = [caveat for one in self.sessions if one.training is None for caveat in one.caveats]
        doubted = [
            check.detail
            for check in self.checks()
            if _is_doubt(check) and check.key not in OF_SECRECY | OF_FULL_RECORDS
        ]
        return tuple(dict.fromkeys([*found, *filter(None, [self.no_privacy]), *doubted]))

    @property
    def most_participations(self) -> int | None:
        """Largest number of times that one example was drawn; None if nobody counted."""
        counts = [session.draws.participations_max for session in self.sessions if session.draws]
        return sum(counts) if counts and len(counts) == len(self.sessions) else None

    @property
    def sampler(self) -> str:
        """What drew the batches; "other" if it was not the same in every session."""
        samplers = {session.sampler for session in self.sessions} or {"poisson"}
        return samplers.pop() if len(samplers) == 1 else "other"

    @property
    def seeded(self) -> bool:
        """Whether random numbers come from a known seed, according to the header or a session."""
        return bool(self.header["run"].get("seeded")) or any(one.seeded for one in self.sessions)

    @property
    def no_privacy(self) -> str:
        """Why the run has no privacy at all; "" if nothing says so."""
        return SEEDED if self.seeded else str(self.header["run"].get("no_privacy") or "")

    @property
    def policy(self) -> RecordingPolicy | None:
        """When norms were taken, in steps; None if no policy chose the records."""
        return RecordingPolicy.from_header(self.header) if self.header["policy"] else None

    @property
    def pass_seconds(self) -> float:
        """Wall time of the passes that took norms."""
        return float(sum(line["seconds"] for line in (*self.records, *self.exact)))

    @property
    def training_seconds(self) -> float | None:
        """Wall time of training without these passes; None if it was not measured."""
        if self.unwatched:
            return None
        return float(sum(s.training.training_seconds for s in self.sessions if s.training))

    def settings(self) -> StepSettings:
        """Realised settings of these steps."""
        counts = [line["count"] for line in self.steps]
        columns = (
            np.repeat([float(line[name]) for line in self.steps], counts) for name in SETTING_NAMES
        )
        return StepSettings.from_values(self.total_steps, *columns)

    @property
    def clip_excess(self) -> float:
        """The largest excess of clipped gradients that accounts count in a session."""
        return max((s.training.accounted_excess for s in self.sessions if s.training), default=0.0)

    def accounted_settings(self) -> StepSettings:
        """The settings with less noise where clipped gradients stay longer than max_grad_norm.

        Noise counts in units of the longest gradient: noise_multiplier / (1 + excess).
        """
        found = self.settings()
        if not self.clip_excess:
            return found
        factor = np.ones(len(found))
        for one in self.sessions:  # in order: a later one replaces the steps from its first on
            factor[one.from_step :] = 1 + (one.training.accounted_excess if one.training else 0.0)
        return replace(found, noise_multiplier=found.noise_multiplier / factor)


def _is_doubt(check: Fact) -> bool:
    """Whether the account may not be of the training: an exact one was compared with it."""
    compared = check.key in (*COMPARISONS, "random_numbers")
    compared &= not CHECKS[check.key].optional
    return check.status == FAILED or (compared and check.status == NOT_CHECKED)


def _check_line(line: Line, where: str) -> None:
    """Compare a line of a journal with the schema of its kind; one of no known kind has none.

    Raises:
        EvidenceError: what it lacks, or a value that it may not have.
    """
    if (kind := _LINES.get(line["kind"])) is None:
        return
    check(kind, line, where)
    if "file" in line and not {"bytes", "sha256"} <= line.keys() and "parts" not in line:
        raise EvidenceError(f"{where} lacks bytes and sha256; restore the file from a copy")
    size = line.get("bytes") or 0
    if line["kind"] == "exact" and line["count"] * _COLUMN_BYTES > size:
        raise EvidenceError(f"{where}: {size} bytes cannot hold {line['count']} steps")
    if line["kind"] == "header" and {*line["privacy_filter"]} not in (set(), {"order", "rdp_cap"}):
        raise EvidenceError(f"{where}: a privacy_filter has order and rdp_cap, and nothing else")


def read_state(run_dir: Path) -> LogState:
    """Replay the journal of a run.

    Raises:
        EvidenceError: a damaged line, a newer schema, steps that go back or leave a gap, a repeated
            record, or counts that cannot be read.
    """
    lines, torn = read_journal(run_dir)
    if not lines or lines[0]["kind"] != "header":
        raise EvidenceError(
            f"{run_dir} has a journal without a header: recording stopped before its first record"
        )
    header = lines[0]
    if header.get("schema") not in range(1, SCHEMA + 1):
        raise EvidenceError(
            f"{run_dir} was written with log schema {header.get('schema')!r}; this indpriv reads "
            f"up to {SCHEMA}: upgrade indpriv"
        )
    for number, line in enumerate(lines, 1):
        _check_line(line, f"{run_dir / JOURNAL} line {number}")
    content = json.dumps(lines, sort_keys=True).encode()
    state = LogState(run_dir, header, torn, fingerprint=hashlib.sha256(content).hexdigest())
    counts: dict[int, Mapping[str, Any]] = {}
    for line in lines[1:]:
        state.closed = line["kind"] == "close"
        state.beside = line.get("files") if state.closed else None
        if (evidence := line.get("evidence")) is not None:
            counts[evidence["from_step"]] = evidence
        if line["kind"] == "truncate":
            _truncate(state, line["step"])
            counts = {start: found for start, found in counts.items() if start < line["step"]}
        else:
            _add(state, line)
    state.sessions = [  # a run that is resumed after its last step has a session without any
        SessionCounts.from_json(found)
        for start, found in counts.items()
        if start < state.total_steps or len(counts) == 1
    ]
    return state


def state_to_resume(run_dir: Path, step: int | None) -> LogState | None:
    """The log that recording continues at a step, or None where it begins a new one.

    Raises:
        InputError: there is a log and no step, or the log does not reach that step.
    """
    if step is None:
        if holds_log(run_dir):
            raise InputError(
                f"{run_dir} already holds a recorded run; choose another directory, remove it, "
                "or continue it with resume_at=STEP"
            )
        return None
    state = read_state(run_dir)
    if step > state.total_steps:
        raise InputError(
            f"resume_at={step}, but the log in {run_dir} proves only {state.total_steps} "
            "steps; the steps between would be missing: resume from a checkpoint at step "
            f"{state.total_steps} or before"
        )
    return state


def _add(state: LogState, line: Line) -> None:
    kind = line["kind"]
    if kind == "close":
        return
    if kind not in _KEPT:
        raise EvidenceError(
            f"{state.run_dir}: a line of the journal is of kind {kind!r}, which this indpriv does "
            "not know: upgrade indpriv"
        )
    if kind == "record" and state.records and line["step"] <= state.records[-1]["step"]:
        raise EvidenceError(
            f"{state.run_dir}: a record at step {line['step']} follows one at step "
            f"{state.records[-1]['step']}; resume with resume_at=STEP, so that the log says "
            "which steps are void"
        )
    if kind == "steps" and line["first"] != state.total_steps:
        raise EvidenceError(
            f"{state.run_dir}: steps from {line['first']} follow {state.total_steps} steps; "
            "the log has lost lines"
        )
    if kind == "steps" and line["first"] + line["count"] > MOST_STEPS:
        raise EvidenceError(
            f"{state.run_dir}: the log has more than {MOST_STEPS:,} steps, the most that are "
            "read; restore the file from a copy"
        )
    lines: list[Line] = getattr(state, _KEPT[kind])
    if kind == "divided":
        lines.clear()
    lines.append(line)


def _truncate(state: LogState, step: int) -> None:
    """Drop what was logged from this step on: training was resumed there."""
    if step > state.total_steps:
        raise EvidenceError(
            f"{state.run_dir}: training was resumed at step {step}, after only {state.total_steps} "
            "steps; the log has lost lines"
        )
    state.voided_steps += state.total_steps - step
    state.records = [line for line in state.records if line["step"] < step]
    for lines in (state.exact, state.batch_norms, state.left_out, state.steps):
        lines[:] = [
            {**line, "count": min(line["count"], step - line["first"])}
            for line in lines
            if line["first"] < step
        ]
