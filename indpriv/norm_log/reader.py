"""Reading a NormLog from disk: every file is compared with its hash in the journal. Sensitive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv import _files, _repeats
from indpriv._arrays import Ids, IntArray, all_distinct
from indpriv._checks import check_choice
from indpriv._facts import FAILED
from indpriv._reading import named
from indpriv._storage import check_hash, is_remote, sizes_in
from indpriv.errors import EvidenceError
from indpriv.norm_log.journal_state import LogState
from indpriv.norm_log.records import (
    LARGEST_FILE,
    BatchNormFile,
    FileBatchNorms,
    FileRecord,
    FileRecords,
    RecordFile,
    StoredIds,
    levels_of,
)
from indpriv.norm_log.run_files import ID_COLUMNS, IDS, RECORDS, Line, files_of
from indpriv.norm_log.validation import CONTRIBUTIONS, check_unit_ids, check_words

_LEFT_OUT = {"position": "i", "step": "i"}
Faults = Mapping[str, str]  # file name -> what is wrong with it


def record_faults(state: LogState, *, hash_all: bool) -> dict[str, str]:
    """What is wrong with each record file that is missing, cut, changed or of other examples.

    hash_all: whether changes are looked for in files too whose hash is compared when they are read.
    """
    faults: dict[str, str] = {}
    folder = state.run_dir / RECORDS
    sizes = sizes_in(folder)
    for line in state.files:
        name = line["file"]
        record = f"record of step {line.get('step', line.get('first'))}"
        if name != Path(name).name:
            faults[name] = f"{record} points outside the run directory"
        elif name not in sizes:
            faults[name] = f"{record} is missing"
        elif sizes[name] != line["bytes"]:
            faults[name] = f"{record} has {sizes[name]} bytes instead of {line['bytes']}"
        elif (hash_all or not _hashed_when_read(state, line)) and (
            _files.sha256(folder / name) != line["sha256"]
        ):
            faults[name] = f"{record} was changed: its hash is not the journal's"
    return faults


def _hashed_when_read(state: LogState, line: Line) -> bool:
    """Whether a file is hashed when it is read and not before: in object storage, or in parts."""
    return is_remote(state.run_dir) or "parts" in line


def hashed_when_read(state: LogState) -> int:
    """The number of record files that are hashed when they are read and not before."""
    return sum(_hashed_when_read(state, line) for line in state.files)


def _files_of(state: LogState, line: Line, faults: Faults) -> tuple[RecordFile | None, ...]:
    """The files of a line; None for one that cannot be read."""
    folder, later = state.run_dir.absolute() / RECORDS, _hashed_when_read(state, line)
    return tuple(
        None
        if one["file"] in faults
        else RecordFile(folder / one["file"], one["sha256"] if later else None)
        for one in files_of(line)
    )


def check_readable(faults: Faults, state: LogState, unreadable: str) -> None:
    """Raise EvidenceError if a log proves no step, contradicts itself, or has unaccepted faults."""
    check_choice("unreadable", unreadable, ("refuse", "worst_case"))
    if state.total_steps == 0:
        raise EvidenceError(
            f"{state.run_dir} proves no step: recording stopped before the first one was logged"
        )
    if faults and unreadable == "refuse":
        listed = "; ".join(f"{name}: {fault}" for name, fault in list(faults.items())[:5])
        raise EvidenceError(
            f"{state.run_dir}: {len(faults)} of {len(state.files)} record files are not as written "
            f"({listed}); restore them, or count them at max_grad_norm with "
            "unreadable='worst_case' (--set unreadable=worst_case)"
        )
    _check_consistent(state)


def log_fields(state: LogState, faults: Faults) -> dict[str, Any]:
    """The fields of the NormLog of a run; records with faults count at max_grad_norm."""
    header, run = state.header, state.header["run"]
    ids, units, exact = _read_ids(state)
    levels = levels_of(header["rounding"], header["rounding_mode"])
    words = (state.sampler, header["unit"], header["neighbouring"])
    # A crash can leave a record whose step was not logged.
    used = {line["step"]: line for line in state.records if line["step"] < state.total_steps}
    rows = [FileRecord(_files_of(state, line, faults), "norm") for line in used.values()]
    reference_rows = [
        FileRecord(_files_of(state, line, faults), str(step))
        for line in state.exact
        if line["file"] not in faults
        for step in range(line["first"], min(line["first"] + line["count"], state.total_steps))
    ]
    recorded = np.array([*used], dtype=np.int64)
    settings = state.accounted_settings()
    if run.get("clipping") in CONTRIBUTIONS:
        settings = settings.steady_between(recorded)
    whole = header["n_exact"] > 0 and len(reference_rows) == state.total_steps
    return {
        "example_ids": ids,
        "unit_ids": check_unit_ids(units, len(ids), header["unit"]),
        "recorded_steps": recorded,
        "unreadable_steps": tuple(
            step for step, row in zip(used, rows, strict=True) if None in row.files
        ),
        "settings": settings,
        "levels": levels,
        **dict(zip(("sampler", "unit", "neighbouring"), words, strict=True)),
        "individually_clipped": header["individually_clipped"],
        "caveats": state.caveats,
        "records": FileRecords(rows, levels),
        "rows": np.arange(len(rows)),
        "reference_positions": exact if whole else None,
        "reference_records": FileRecords(reference_rows, levels) if whole else None,
        "batch_norms": batch_norms_of(state, faults),
        "most_participations": state.most_participations,
        "known_caveats": state.known_caveats,
        "truncation": check_words(*words, run.get("max_batch_size"), header["n_examples"]),
        "clipping_norm_epsilon": state.clipping_norm_epsilon,
    }


def _read_ids(state: LogState) -> tuple[Ids, NDArray[np.generic] | None, IntArray]:
    """Ids and units of the examples, and positions of the reference examples.

    Many ids on a disk are hashed here and read later; checksums of their pages are compared then.
    """
    path, sha256 = state.run_dir / IDS, state.header["ids_sha256"]
    n = state.header["n_examples"]
    if is_remote(path) or n <= LARGEST_FILE:
        ids = _files.read_parquet(path, sha256=sha256, kinds=ID_COLUMNS)
        _check_ids(path, ids["example_id"].to_numpy(), None, n)
        units = ids["unit_id"].to_numpy() if "unit_id" in ids else None
        return ids["example_id"].to_numpy(), units, np.flatnonzero(ids["exact"].to_numpy())
    check_hash(path, sha256)
    rows = _files.ParquetRows.open(path, ID_COLUMNS)
    stored = StoredIds(rows, "example_id")
    equal = _repeats.repeated(lambda start, stop: stored[start:stop], rows.ranges())
    _check_ids(path, stored, equal, n)  # equal hashes, and perhaps equal ids
    units = np.asarray(StoredIds(rows, "unit_id")) if "unit_id" in rows.columns else None
    exact = [
        start + np.flatnonzero(rows.read(start, stop, ["exact"])["exact"])
        for start, stop in rows.ranges()
    ]
    return stored, units, np.concatenate(exact)


def _check_ids(path: Path, ids: Ids, some: IntArray | None, n_examples: int) -> None:
    """Raise EvidenceError unless there are n_examples ids, and those at `some` (or all) differ."""
    distinct = all_distinct(np.asarray(ids if some is None else ids[some]))
    if len(ids) != n_examples or not distinct:
        twice = "" if distinct else ", some of them twice"
        raise EvidenceError(
            f"{path} has {len(ids)} example ids{twice}; the log has {n_examples} examples, each "
            "with an id of its own: restore the file from a copy"
        )


def _check_consistent(state: LogState) -> None:
    run_dir, header = state.run_dir, state.header
    max_grad_norm = state.settings().max_grad_norm
    targets = {line["targets_fingerprint"] for line in state.records}
    for line in state.records:
        step = line["step"]
        if line["ids_fingerprint"] != header["ids_fingerprint"] or len(targets) > 1:
            raise EvidenceError(
                f"{run_dir}: the data changed its order or its labels between records (by step "
                f"{step}); norms of one example would be another's: record again with the data set "
                "fixed"
            )
        if line["n_examples"] != header["n_examples"]:
            raise EvidenceError(
                f"{run_dir}: the record of step {step} has {line['n_examples']} examples, the log "
                f"has {header['n_examples']}; the data set may not grow or shrink during a run"
            )
        if step < len(max_grad_norm) and not np.isclose(
            line["max_grad_norm"], max_grad_norm[step], rtol=1e-12
        ):
            raise EvidenceError(
                f"{run_dir}: the record of step {step} was taken at max_grad_norm="
                f"{line['max_grad_norm']}, but the step ran at {max_grad_norm[step]}"
            )


def read_reference_positions(run_dir: Path) -> IntArray:
    """Positions of the examples that the log of a run records at every step."""
    return np.flatnonzero(_files.read_parquet(run_dir / IDS, ["exact"], kinds=ID_COLUMNS)["exact"])


def filter_is_proven(state: LogState, faults: Faults) -> bool:
    """Whether a privacy filter watched the run and nothing on which its guarantee rests has failed.

    These are all checks except those of the norms: an example was charged for the level that it was
    clipped at, whatever its norm. It was charged for the noise as it was, which is too little where
    clipped gradients stay longer than their level.
    """
    failed = {check.key for check in state.checks() if check.status == FAILED}
    return (
        bool(state.header["privacy_filter"])
        and not state.clip_excess
        and not any(line["file"] in faults for line in state.left_out)
        and failed <= {"norms_in_training", "norm_precision"}
    )


def read_left_out(state: LogState) -> IntArray:
    """(n_examples,) the step from which the filter left an example out, else total_steps."""
    left_out_at = np.full(state.header["n_examples"], state.total_steps)
    for line in state.left_out:
        for file in filter(None, _files_of(state, line, {})):
            with named(file.path):
                frame = _files.read_parquet(file.path, sha256=file.sha256, kinds=_LEFT_OUT)
                kept = frame[frame["step"] < min(line["first"] + line["count"], state.total_steps)]
                if not kept[["position", "step"]].ge(0).all(axis=None):
                    raise EvidenceError("positions and steps are at least 0")
                left_out_at[kept["position"].to_numpy()] = kept["step"].to_numpy()
    return left_out_at


def batch_norms_of(state: LogState, faults: Faults) -> FileBatchNorms | None:
    """The batch norms of a log that has any; steps of unreadable files have none."""
    levels = levels_of(state.header["rounding"], state.header["rounding_mode"])
    steps, found = [], list[BatchNormFile]()
    for line in state.batch_norms:
        first, stop = line["first"], min(line["first"] + line["count"], state.total_steps)
        files = [file for file in _files_of(state, line, faults) if file is not None]
        if first < stop and len(files) == len(files_of(line)):
            steps.append(np.setdiff1d(np.arange(first, stop), line["missing"]))
            found += [BatchNormFile(file, first, stop - first) for file in files]
    return FileBatchNorms(np.concatenate(steps), tuple(found), levels) if found else None
