"""LogState: what the journal of a run says once it is replayed, and the files that it names.

Every file is compared with its hash in the journal. Sensitive.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from indpriv import _checks, _columns, _facts, _files, _folders, _storage
from indpriv._reading import AtLeastZero, Number, Text, Whole, YesNo, check, named, table
from indpriv._types import IntArray, NDArray
from indpriv.errors import EvidenceError
from indpriv.norm_log import records, session_counts
from indpriv.norm_log.fields import SETTING_NAMES, RecordingPolicy, StepSettings
from indpriv.norm_log.run_files import ID_COLUMNS, IDS, MOST_STEPS, RECORDS, SCHEMA, Line, files_of

_LEFT_OUT = {"position": "i", "step": "i"}  # columns, see `check_columns`

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
        Whole: "max_batch_size? n_parameters? n_drawn_from?",
        _Count: "steps_per_epoch? ranks?",
        dict[str, Whole]: "layers?",
        dict[str, Text]: "versions?",
    }
)
_FILE: dict[Any, str] = {Text: "file sha256?", Whole: "bytes?", list[tuple[Whole, Text]]: "parts?"}
_SPAN = {**_FILE, Whole: "first bytes?", _Steps: "count"}
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
LINES = {
    "header": table(_HEADER),
    "record": table(_RECORD),
    "exact": table({**_SPAN, AtLeastZero: "seconds"}),
    "free": table({**_SPAN, list[Whole]: "missing"}),
    "filter": table(_SPAN),
    "steps": table({**_CLOSE, **_SETTINGS, Whole: "first", _Steps: "count"}),
    "close": table(_CLOSE),
    "truncate": table({Whole: "step"}),
}
_OF_FILES = ("record", "exact", "free", "filter")  # kinds of lines that name files


@dataclass
class LogState:
    """What the journal of a run says, without lines that were declared void."""

    run_dir: Path
    header: Line  # the first line
    torn: bool = False  # a torn last line was dropped
    # Kind -> its lines, of those of files and "steps".
    lines: dict[str, list[Line]] = field(
        default_factory=lambda: {kind: [] for kind in (*_OF_FILES, "steps")}
    )
    # The last counts of every recording session; a resumed run has several.
    sessions: list[session_counts.SessionCounts] = field(default_factory=list)
    # Of each session that another followed: its steps (-1 if it was killed), and whether a batch
    # may have been in the hands of the loop when it ended.
    ends: list[tuple[int, bool]] = field(default_factory=list)
    closed: bool = False  # the recorder closed the log
    # Name -> hash, at the end of a closed log, of the files beside it; None in older logs too.
    beside: Mapping[str, str] | None = None
    voided_steps: int = 0  # that were run and declared void on resuming
    fingerprint: str = ""  # of all lines, and by the hashes in them of the record files
    # File name -> what is wrong with it, of damaged or missing records, where files were looked at.
    faults: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = "refuse"  # what to do about these; see `NormLog.open`
    hashed_all: bool = False  # no file is left whose hash is only compared when it is read

    @property
    def steps(self) -> list[Line]:
        """Lines of the realised settings."""
        return self.lines["steps"]

    @property
    def total_steps(self) -> int:
        """Number of steps that the log proves."""
        return self.steps[-1]["first"] + self.steps[-1]["count"] if self.steps else 0

    @property
    def files(self) -> list[Line]:
        """What the journal says of each record file."""
        return [file for kind in _OF_FILES for line in self.lines[kind] for file in files_of(line)]

    @property
    def unwatched(self) -> bool:
        """No recorder saw the training: norms come from checkpoints or from another trainer."""
        return any(session.training is None for session in self.sessions)

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
    def most_participations(self) -> int | None:
        """Largest number of times that one example was drawn; None if it is not known."""
        # What was drawn says nothing of a step that used another batch.
        known = [one.draws for one in self.sessions if one.draws and not one.steps_of_other_batches]
        counts = [draws.participations_max for draws in known]
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
        if self.seeded:
            return _facts.text("line.source", "seeded")
        return str(self.header["run"].get("no_privacy") or "")

    @property
    def levels(self) -> records.Levels:
        """Those that norms are rounded to."""
        return records.Levels(self.header["rounding"], self.header["rounding_mode"])

    @property
    def policy(self) -> RecordingPolicy | None:
        """When norms were taken, in steps; None if no policy chose the records."""
        return RecordingPolicy.from_header(self.header) if self.header["policy"] else None

    @property
    def pass_seconds(self) -> float:
        """Wall time of the passes that took norms."""
        lines = (*self.lines["record"], *self.lines["exact"])
        return float(sum(line["seconds"] for line in lines))

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
        """The settings, noise in units of the longest gradient: divided by 1 + excess."""
        found, factor = self.settings(), np.ones(self.total_steps)
        for one in self.sessions:  # in order: a later one replaces the steps from its first on
            factor[one.from_step :] = 1 + (one.training.accounted_excess if one.training else 0.0)
        return replace(found, noise_multiplier=found.noise_multiplier / factor)


def _check_line(line: Line, where: str) -> None:
    """Compare a line with the schema of its kind (EvidenceError); one of no known kind has none."""
    if (kind := LINES.get(line["kind"])) is None:
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
    """Replay the journal of a run; EvidenceError if it is damaged, newer, or contradicts itself."""
    lines, torn = _files.read_journal(run_dir)
    if not lines or lines[0]["kind"] != "header":
        raise _facts.damaged("refusal.journal", "headerless", run_dir=run_dir)
    header = lines[0]
    if header.get("schema") not in range(1, SCHEMA + 1):
        values = {"schema": header.get("schema"), "known": SCHEMA}
        raise _facts.damaged("refusal.journal", "newer", run_dir=run_dir, **values)
    for number, line in enumerate(lines, 1):
        _check_line(line, f"{run_dir / _files.JOURNAL} line {number}")
    content = json.dumps(lines, sort_keys=True).encode()
    state = LogState(run_dir, header, torn, fingerprint=hashlib.sha256(content).hexdigest())
    counts: dict[int, Mapping[str, Any]] = {}
    last: Mapping[str, Any] = {}  # counts of the session in progress
    for line in lines[1:]:
        state.closed = line["kind"] == "close"
        state.beside = line.get("files") if state.closed else None
        if (evidence := line.get("evidence")) is not None:
            counts[evidence["from_step"]] = last = evidence
        if line["kind"] == "truncate":
            killed = last.get("ended_in_hand") is None
            state.ends.append((-1, True) if killed else (last["steps"], last["ended_in_hand"]))
            last = {}
            counts = {start: found for start, found in counts.items() if start < line["step"]}
        _add(state, line)
    state.sessions = [  # a run that is resumed after its last step has a session without any
        session_counts.SessionCounts.from_json(found)
        for start, found in counts.items()
        if start < state.total_steps or len(counts) == 1
    ]
    return state


def state_to_resume(run_dir: Path, step: int | None) -> LogState | None:
    """The log that recording continues at a step, else InputError; None where it begins one."""
    if step is None:
        if (run_dir / _files.JOURNAL).is_file():
            raise _facts.refused("refusal.resume", "recorded", run_dir=run_dir)
        return None
    state = read_state(run_dir)
    if step > state.total_steps:
        raise _facts.refused("refusal.resume", "short", step=step, state=state)
    return state


def counts_at(state: LogState, step: int) -> Mapping[str, Any]:
    """The counts that a session logged after so many steps of the run; nothing if none did."""
    ending = (line for line in state.steps if line["first"] + line["count"] == step)
    found = next((line.get("evidence") or {} for line in ending), {})
    # A line that was cut off by an earlier resumption counts more.
    return found if found.get("from_step", 0) + found.get("steps", 0) == step else {}


def _add(state: LogState, line: Line) -> None:
    kind = line["kind"]
    if kind == "close":
        return
    if kind == "truncate":  # training was resumed: what was logged from this step on is void
        step = line["step"]
        if step > state.total_steps:
            raise _facts.damaged("refusal.journal", "truncated", state=state, step=step)
        state.voided_steps += state.total_steps - step
        for of, lines in state.lines.items():
            at = "step" if of == "record" else "first"
            left = [one for one in lines if one[at] < step]
            if of != "record":
                left = [{**one, "count": min(one["count"], step - one["first"])} for one in left]
            lines[:] = left
        return
    if kind not in state.lines:
        raise _facts.damaged("refusal.journal", "kind", state=state, kind=kind)
    lines = state.lines[kind]
    if kind == "record" and lines and line["step"] <= lines[-1]["step"]:
        raise _facts.damaged("refusal.journal", "record", state=state, line=line, last=lines[-1])
    if kind == "steps" and line["first"] != state.total_steps:
        raise _facts.damaged("refusal.journal", "gap", state=state, line=line)
    if kind == "steps" and line["first"] + line["count"] > MOST_STEPS:
        raise _facts.damaged("refusal.journal", "steps", state=state, most=MOST_STEPS)
    lines.append(line)


# --- the files that a journal names, each compared with its hash


def record_faults(state: LogState) -> dict[str, str]:
    """What is wrong with each record file that is missing, cut or changed."""
    faults: dict[str, str] = {}
    folder = state.run_dir / RECORDS
    sizes = _storage.sizes_in(folder)
    for line in state.files:
        name, fault = line["file"], ""
        if name != Path(name).name:
            fault = "points outside the run directory"
        elif name not in sizes:
            fault = "is missing"
        elif sizes[name] != line["bytes"]:
            fault = f"has {sizes[name]} bytes instead of {line['bytes']}"
        elif (state.hashed_all or not hashed_when_read(state, line)) and (
            _files.sha256(folder / name) != line["sha256"]
        ):
            fault = "was changed: its hash is not the journal's"
        if fault:
            faults[name] = f"record of step {line.get('step', line.get('first'))} {fault}"
    return faults


def hashed_when_read(state: LogState, line: Line) -> bool:
    """Whether a file is hashed when it is read and not before: in object storage, or in parts."""
    return _folders.is_remote(state.run_dir) or "parts" in line


def record_of(state: LogState, line: Line) -> tuple[records.RecordFile | None, ...]:
    """The files of a line; None for one that cannot be read."""
    folder, later = state.run_dir.absolute() / RECORDS, hashed_when_read(state, line)
    return tuple(
        None
        if one["file"] in state.faults
        else records.RecordFile(folder / one["file"], one["sha256"] if later else None)
        for one in files_of(line)
    )


def check_readable(state: LogState) -> None:
    """Raise EvidenceError if a log proves no step, contradicts itself, or has unaccepted faults."""
    _checks.check_choice("unreadable", state.unreadable, ("refuse", "worst_case"))
    run_dir, header, faults = state.run_dir, state.header, state.faults
    if state.total_steps == 0:
        raise _facts.damaged("refusal.journal", "no_steps", run_dir=run_dir)
    if faults and state.unreadable == "refuse":
        listed = "; ".join(f"{name}: {fault}" for name, fault in list(faults.items())[:5])
        values = {"n": len(faults), "of": len(state.files), "listed": listed}
        raise _facts.damaged("refusal.journal", "files", run_dir=run_dir, **values)
    max_grad_norm = state.settings().max_grad_norm
    targets = {line["targets_fingerprint"] for line in state.lines["record"]}
    for line in state.lines["record"]:
        step = line["step"]
        if line["ids_fingerprint"] != header["ids_fingerprint"] or len(targets) > 1:
            raise _facts.damaged("refusal.journal", "data", state=state, step=step)
        if line["n_examples"] != header["n_examples"]:
            raise _facts.damaged("refusal.journal", "examples", state=state, line=line)
        if step < len(max_grad_norm) and not np.isclose(
            line["max_grad_norm"], max_grad_norm[step], rtol=1e-12
        ):
            raise _facts.damaged(
                "refusal.journal", "clipping", state=state, line=line, clip=max_grad_norm[step]
            )


def read_ids(state: LogState) -> tuple[_columns.Ids, NDArray[np.generic] | None, IntArray]:
    """Ids and units of the examples, and positions of the reference examples."""
    # Many ids on a disk are hashed here and read later; checksums of pages are compared then.
    path, sha256 = state.run_dir / IDS, state.header["ids_sha256"]
    n = state.header["n_examples"]
    if in_memory := _folders.is_remote(path) or n <= records.LARGEST_FILE:
        rows = _columns.as_rows(_files.read_parquet(path, sha256=sha256, kinds=ID_COLUMNS))
    else:
        _files.check_hash(path, sha256)
        rows = _columns.Rows.open(path, ID_COLUMNS)
    stored = _columns.StoredColumn(rows, "example_id")
    ids = stored[:] if in_memory else stored
    units = _columns.StoredColumn(rows, "unit_id")[:] if "unit_id" in rows.columns else None
    stored_exact = _columns.StoredColumn(rows, "exact")
    parts = [start + np.flatnonzero(stored_exact[start:stop]) for start, stop in rows.ranges()]
    exact = np.concatenate(parts)
    repeated = _columns.repeated(rows, "example_id")
    if len(ids) != n or len(repeated):
        twice = ", some of them twice" if len(repeated) else ""
        raise _facts.damaged("refusal.ids", "twice", path=path, found=len(ids), n=n, twice=twice)
    return ids, units, exact


def read_left_out(state: LogState) -> IntArray:
    """(n_examples,) the step from which the filter left an example out, else total_steps."""
    left_out_at = np.full(state.header["n_examples"], state.total_steps)
    for line in state.lines["filter"]:
        for file in filter(None, record_of(state, line)):
            with named(file.path):
                frame = _files.read_parquet(file.path, sha256=file.sha256, kinds=_LEFT_OUT)
                kept = frame[frame["step"] < min(line["first"] + line["count"], state.total_steps)]
                if not kept[["position", "step"]].ge(0).all(axis=None):
                    raise EvidenceError("positions and steps are at least 0")
                left_out_at[kept["position"].to_numpy()] = kept["step"].to_numpy()
    return left_out_at


def batch_norms_of(state: LogState, within: range | None = None) -> records.BatchNorms | None:
    """The batch norms of a log, if it has any; within: of these steps, perhaps with others."""
    levels, steps, found = state.levels, [], list[partial[records.BatchNormEntries]]()
    for line in state.lines["free"]:
        first, stop = line["first"], min(line["first"] + line["count"], state.total_steps)
        files = record_of(state, line)
        needed = within is None or (first < within.stop and within.start < stop)
        if first < stop and None not in files and needed:
            steps.append(np.setdiff1d(np.arange(first, stop), line["missing"]))
            found += [
                partial(records.read_entries, file, first, stop - first, levels)
                for file in files
                if file is not None
            ]
    return records.BatchNorms(np.concatenate(steps), found) if found else None
