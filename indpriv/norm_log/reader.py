"""Reading a NormLog from disk: the journal is replayed, every file is held against its hash. Sensitive.

What is read is plain arrays; `NormLog.open` makes a NormLog of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from indpriv import _files
from indpriv._checks import check_choice
from indpriv._journal import read_journal
from indpriv.errors import EvidenceError
from indpriv.norm_log.batch_norms import BatchNormFile, FileBatchNorms
from indpriv.norm_log.evidence import FAILED, NORM_PRECISION, NORMS_IN_TRAINING, Check
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.recording_policy import RecordingPolicy
from indpriv.norm_log.session_checks import session_checks
from indpriv.norm_log.writer import IDS, RECORDS, SCHEMA

_KINDS = ("record", "exact", "free", "filter", "steps", "truncate", "close")


@dataclass(frozen=True)
class LogState:
    """What the journal of a run says, void lines left out."""

    header: dict[str, Any]
    records: list[dict[str, Any]]
    exact: list[dict[str, Any]]
    batch_norms: list[dict[str, Any]]
    left_out: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    closed: bool
    torn: bool
    evidence: list[dict[str, Any]]
    voided_steps: int

    @property
    def total_steps(self) -> int:
        """Number of steps that the log proves."""
        return sum(entry["count"] for entry in self.steps)

    @property
    def n_files(self) -> int:
        """Number of record files."""
        return len(self.files)

    @property
    def files(self) -> list[dict[str, Any]]:
        """Lines of all record files."""
        return [*self.records, *self.exact, *self.batch_norms, *self.left_out]

    @property
    def unwatched(self) -> bool:
        """Whether nobody watched the training: norms from checkpoints, or from another trainer."""
        return any("replayed" in evidence or "converted" in evidence for evidence in self.evidence)

    def checks(self) -> list[Check]:
        """Assumptions held against the last counts of every recording session (a resumed run has several)."""
        return session_checks(
            self.evidence,
            n_examples=self.header["n_examples"],
            closed=self.closed,
            voided_steps=self.voided_steps,
            individually_clipped=self.header["individually_clipped"],
            filtered=bool(self.header.get("privacy_filter")),
        )

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why an account of this log is an estimate: how its norms were taken, and every check that failed."""
        taken = [caveat for evidence in self.evidence for caveat in evidence["caveats"]]
        failed = [check.detail for check in self.checks() if check.status == FAILED]
        return tuple(dict.fromkeys([*taken, *failed]))

    @property
    def sampler(self) -> str:
        """What drew the batches: Poisson sampling where it did so in every session, else the first other."""
        return next((e["sampler"] for e in self.evidence if e["sampler"] != "poisson"), "poisson")

    @property
    def policy(self) -> RecordingPolicy | None:
        """When norms were taken, in steps; None where no policy chose the records, or an older log does not say."""
        return RecordingPolicy.from_header(self.header) if self.header.get("policy") else None

    @property
    def pass_seconds(self) -> float:
        """Wall time of the passes that took norms."""
        return float(sum(entry["seconds"] for entry in (*self.records, *self.exact)))

    @property
    def training_seconds(self) -> float | None:
        """Wall time between them, in all sessions; None where an older log does not say."""
        if not all("training_seconds" in evidence for evidence in self.evidence):
            return None
        return float(sum(evidence["training_seconds"] for evidence in self.evidence))

    def settings(self) -> dict[str, NDArray[np.float64]]:
        """noise_multiplier, max_grad_norm and sample_rate of these steps, each (total_steps,)."""
        counts = [entry["count"] for entry in self.steps]
        return {
            name: np.repeat([float(entry[name]) for entry in self.steps], counts)
            for name in ("noise_multiplier", "max_grad_norm", "sample_rate")
        }


def read_state(run_dir: Path) -> LogState:
    """Replay the journal of a run.

    Raises:
        EvidenceError: a damaged line, a newer schema, steps that go back or leave a gap, a repeated record.
    """
    entries, torn = read_journal(run_dir)
    if not entries or entries[0]["kind"] != "header":
        raise EvidenceError(
            f"{run_dir} has a journal without a header: recording stopped before its first record"
        )
    header = entries[0]
    if header["schema"] > SCHEMA:
        raise EvidenceError(
            f"{run_dir} was written with log schema {header['schema']}; this indpriv reads up to {SCHEMA}: upgrade indpriv"
        )
    records: list[dict[str, Any]] = []
    exact: list[dict[str, Any]] = []
    free: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    closed, voided_steps = False, 0
    evidence: dict[int, dict[str, Any]] = {}
    for entry in entries[1:]:
        kind = check_choice("journal line kind", entry["kind"], _KINDS)
        closed = kind == "close"
        if "evidence" in entry:
            evidence[entry["evidence"]["from_step"]] = entry["evidence"]
        if kind == "record":
            if records and entry["step"] <= records[-1]["step"]:
                raise EvidenceError(
                    f"{run_dir}: a record at step {entry['step']} follows one at step {records[-1]['step']}; "
                    "resume with resume_at=STEP, so that the log says which steps are void"
                )
            records.append(entry)
        elif kind == "exact":
            exact.append(entry)
        elif kind == "free":
            free.append(entry)
        elif kind == "filter":
            left_out.append(entry)
        elif kind == "steps":
            done = sum(line["count"] for line in steps)
            if entry["first"] != done:
                raise EvidenceError(
                    f"{run_dir}: steps from {entry['first']} follow {done} steps; the log has lost lines"
                )
            steps.append(entry)
        elif kind == "truncate":
            voided_steps += sum(line["count"] for line in steps) - entry["step"]
            evidence = {
                start: counts for start, counts in evidence.items() if start < entry["step"]
            }
            records = [line for line in records if line["step"] < entry["step"]]
            exact, free = _cut(exact, entry["step"]), _cut(free, entry["step"])
            left_out, steps = _cut(left_out, entry["step"]), _cut(steps, entry["step"])
    return LogState(
        header,
        records,
        exact,
        free,
        left_out,
        steps,
        closed,
        torn,
        list(evidence.values()),
        voided_steps,
    )


def _cut(lines: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [
        {**line, "count": min(line["count"], step - line["first"])}
        for line in lines
        if line["first"] < step
    ]


class FileRecords:
    """Rows of a log in Parquet files; reads only the row groups that a block of examples needs.

    Each row is (path, column); a path of None is an unreadable record, which counts at max_grad_norm.
    """

    def __init__(self, rows: list[tuple[Path | None, str]], levels: Levels | None) -> None:
        self._rows = rows
        self._dtype = np.dtype(np.float64 if levels is None else levels.dtype)
        self._largest = np.inf if levels is None else levels.max_code

    def read(self, rows: NDArray[np.int64], start: int, stop: int) -> NDArray[np.generic]:
        """(len(rows), stop - start) codes or norms."""
        block: NDArray[np.generic] = np.empty((len(rows), stop - start), self._dtype)
        for out, row in enumerate(rows):
            path, column = self._rows[row]
            if path is None:
                block[out] = self._largest
                continue
            block[out] = _read_column(path, column, start, stop)
            if not np.all(block[out] <= self._largest):  # NaN does not pass either
                raise EvidenceError(
                    f"{path}: code {block[out].max()} is above the top code {self._largest} of its rounding"
                )
        return block


def _read_column(path: Path, column: str, start: int, stop: int) -> NDArray[np.generic]:
    size = _files.ROW_GROUP_SIZE
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            groups = list(range(start // size, -(-stop // size)))
            table = file.read_row_groups(groups, columns=[column], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise EvidenceError(f"record {path} cannot be read: {error}") from error
    values: NDArray[np.generic] = table.column(column).to_numpy()
    offset = start - groups[0] * size
    return values[offset : offset + stop - start]


def record_faults(run_dir: Path, state: LogState) -> dict[str, str]:
    """File name -> what is wrong with it, for every record file that is missing, cut, changed or of other examples."""
    faults: dict[str, str] = {}
    for entry in state.files:
        name = entry["file"]
        path = run_dir / RECORDS / name
        step = entry.get("step", entry.get("first"))
        if name != Path(name).name:
            faults[name] = f"record of step {step} points outside the run directory"
        elif not path.is_file():
            faults[name] = f"record of step {step} is missing"
        elif path.stat().st_size != entry["bytes"]:
            faults[name] = (
                f"record of step {step} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            )
        elif _files.sha256(path) != entry["sha256"]:
            faults[name] = f"record of step {step} was changed: its hash is not the journal's"
    return faults


def _check_consistent(run_dir: Path, state: LogState) -> None:
    header, max_grad_norm = state.header, state.settings()["max_grad_norm"]
    targets = {entry["targets_fingerprint"] for entry in state.records}
    for entry in state.records:
        if entry["ids_fingerprint"] != header["ids_fingerprint"] or len(targets) > 1:
            raise EvidenceError(
                f"{run_dir}: the data changed its order or its labels between records (by step {entry['step']}); "
                "norms of one example would be another's: record again with the data set fixed"
            )
        if entry["n_examples"] != header["n_examples"]:
            raise EvidenceError(
                f"{run_dir}: the record of step {entry['step']} has {entry['n_examples']} examples, the log has "
                f"{header['n_examples']}; the data set may not grow or shrink during a run"
            )
        step = entry["step"]
        if step < len(max_grad_norm) and not np.isclose(
            entry["max_grad_norm"], max_grad_norm[step], rtol=1e-12
        ):
            raise EvidenceError(
                f"{run_dir}: the record of step {step} was taken at max_grad_norm={entry['max_grad_norm']}, but the "
                f"step ran at {max_grad_norm[step]}"
            )


def _read_ids(run_dir: Path, header: Mapping[str, Any]) -> Any:
    path = run_dir / IDS
    frame = _files.read_parquet(path)
    if _files.sha256(path) != header["ids_sha256"]:
        raise EvidenceError(
            f"{path} was changed: its hash is not the journal's; restore it from a copy"
        )
    return frame


def read_reference_positions(run_dir: Path) -> NDArray[np.int64]:
    """Positions of the examples that the log of a run records at every step."""
    return np.flatnonzero(_files.read_parquet(run_dir / IDS)["exact"].to_numpy())


@dataclass(frozen=True)
class StoredLog:
    """What is stored of a log; fields as of NormLog, settings as of StepSettings."""

    header: dict[str, Any]
    example_ids: NDArray[np.generic]
    unit_ids: NDArray[np.generic] | None
    recorded_steps: NDArray[np.int64]
    unreadable_steps: tuple[int, ...]
    total_steps: int
    settings: dict[str, NDArray[np.float64]]
    levels: Levels | None
    records: FileRecords
    sampler: str
    caveats: tuple[str, ...]
    reference_positions: NDArray[np.int64] | None
    reference_records: FileRecords | None
    batch_norms: FileBatchNorms | None
    filter: dict[str, float]
    left_out_at: NDArray[np.int64] | None


def read_log(run_dir: Path, *, unreadable: str = "refuse") -> StoredLog:
    """Open the log of a run; see NormLog.open."""
    check_choice("unreadable", unreadable, ("refuse", "worst_case"))
    state = read_state(run_dir)
    header = state.header
    if state.total_steps == 0:
        raise EvidenceError(
            f"{run_dir} proves no step: recording stopped before the first one was logged"
        )
    faults = record_faults(run_dir, state)
    if faults and unreadable == "refuse":
        listed = "; ".join(f"{name}: {fault}" for name, fault in list(faults.items())[:5])
        raise EvidenceError(
            f"{run_dir}: {len(faults)} of {state.n_files} record files are not as written "
            f"({listed}); restore them, or count them at max_grad_norm with unreadable='worst_case' "
            "(--unreadable worst_case)"
        )
    _check_consistent(run_dir, state)
    ids = _read_ids(run_dir, header)
    levels = Levels(header["rounding"], header["rounding_mode"]) if header["rounding"] else None
    folder = run_dir / RECORDS
    # A crash can leave a record whose step was not logged.
    used = [entry for entry in state.records if entry["step"] < state.total_steps]
    rows: list[tuple[Path | None, str]] = [
        (None if entry["file"] in faults else folder / entry["file"], "norm") for entry in used
    ]
    exact_rows: list[tuple[Path | None, str]] = [
        (None if entry["file"] in faults else folder / entry["file"], str(step))
        for entry in state.exact
        for step in range(entry["first"], min(entry["first"] + entry["count"], state.total_steps))
    ]
    whole = header["n_exact"] > 0 and len(exact_rows) == state.total_steps
    whole = whole and all(
        path is not None for path, _ in exact_rows
    )  # else they are no truth to compare with
    return StoredLog(
        header=header,
        example_ids=ids["example_id"].to_numpy(),
        unit_ids=ids["unit_id"].to_numpy() if "unit_id" in ids else None,
        recorded_steps=np.array([entry["step"] for entry in used], dtype=np.int64),
        unreadable_steps=tuple(entry["step"] for entry in used if entry["file"] in faults),
        total_steps=state.total_steps,
        settings=state.settings(),
        levels=levels,
        records=FileRecords(rows, levels),
        sampler=state.sampler,
        caveats=state.caveats,
        reference_positions=np.flatnonzero(ids["exact"].to_numpy()) if whole else None,
        reference_records=FileRecords(exact_rows, levels) if whole else None,
        batch_norms=_batch_norms(run_dir, state, faults, levels),
        filter=dict(header.get("privacy_filter", {})),
        left_out_at=_left_out_at(run_dir, state, faults),
    )


def _left_out_at(
    run_dir: Path, state: LogState, faults: Mapping[str, str]
) -> NDArray[np.int64] | None:
    """(n_examples,) the step from which the privacy filter left an example out, total_steps where it did not.

    None where there was no filter, or a check of the evidence failed on which its guarantee rests: all of them, except
    that norms are those of training, since what an example was charged for is what it was clipped at.
    """
    if not state.header.get("privacy_filter") or any(
        entry["file"] in faults for entry in state.left_out
    ):
        return None
    about_norms = (NORMS_IN_TRAINING.key, NORM_PRECISION.key)
    if any(check.status == FAILED and check.key not in about_norms for check in state.checks()):
        return None
    return _read_left_out(run_dir, state)


def read_left_out(run_dir: Path) -> NDArray[np.int64]:
    """(n_examples,) the step from which the privacy filter of a run left an example out, total_steps where it did not."""
    return _read_left_out(run_dir, read_state(run_dir))


def _read_left_out(run_dir: Path, state: LogState) -> NDArray[np.int64]:
    left_out_at = np.full(state.header["n_examples"], state.total_steps)
    for entry in state.left_out:
        frame = _files.read_parquet(run_dir / RECORDS / entry["file"])
        kept = frame[frame["step"] < min(entry["first"] + entry["count"], state.total_steps)]
        left_out_at[kept["position"].to_numpy()] = kept["step"].to_numpy()
    return left_out_at


def _batch_norms(
    run_dir: Path, state: LogState, faults: Mapping[str, str], levels: Levels | None
) -> FileBatchNorms | None:
    """The batch norms of a log that has any; steps of unreadable files have none."""
    steps, found = [], []
    for entry in state.batch_norms:
        stop = min(entry["first"] + entry["count"], state.total_steps)
        if entry["file"] not in faults and entry["first"] < stop:
            steps.append(np.setdiff1d(np.arange(entry["first"], stop), entry["missing"]))
            found.append(
                BatchNormFile(
                    run_dir / RECORDS / entry["file"], entry["first"], stop - entry["first"]
                )
            )
    return FileBatchNorms(np.concatenate(steps), tuple(found), levels) if found else None
