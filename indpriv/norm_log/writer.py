"""Writing the log: immutable Parquet files, and a journal. Sensitive: files are 0600.

A record exists if and only if its journal line does. Lines, in order of a run:

    header    schema, ids file, rounding, unit, neighbouring relation, sampler, norm pass, policy
    record    a full record: step, file, bytes, hash, max_grad_norm, fingerprints of ids and
        targets, seconds; in place of bytes and hash, parts: those of each part of a long one
    exact     rows of the reference examples: first step, count, file, bytes, hash
    free      batch norms: first step, count, steps among them without any, file, bytes, hash
    filter    examples that the privacy filter left out, if any: first step, count, file, bytes,
        hash
    steps     realised settings of consecutive steps, and counts of the session ("evidence")
    truncate  training was resumed from a checkpoint at this step: what was logged beyond it is void
    close     the run ended as intended; "files": hashes of those beside it, see `run_files.seal`
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from indpriv import _facts, _files, _folders, _reading, _storage
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.errors import EvidenceError
from indpriv.norm_log import journal_state, records, run_files
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.run_files import ID_COLUMNS, IDS, RECORD_FILE, RECORDS, files_of, part_name
from indpriv.norm_log.session_counts import SessionCounts

# What the header of every session says alike; and its `run`, with what it means if it says nothing.
_ALIKE = (
    *("n_examples", "ids_fingerprint", "rounding", "rounding_mode", "individually_clipped"),
    *("unit", "policy", "privacy_filter"),
)
_NOBODY = np.zeros(0, np.int64)
_ALIKE_IN_RUN = {"ranks": 1, "max_batch_size": None, "clipping_norm_epsilon": 0.0}


def fingerprint(values: NDArray[np.generic]) -> str:
    """Hash of an array's values, in order, and of its dtype."""
    if values.dtype.kind in "OUT":
        content = "\0".join(map(str, values.tolist())).encode()
    else:
        content = np.ascontiguousarray(values).tobytes()
    found = hash_of(values.dtype.kind, values.shape)
    found.update(content)
    return str(found.hexdigest())


def hash_of(kind: str, shape: tuple[int, ...]) -> Any:
    """The hash of an array of this kind and shape, to be updated with the bytes of its parts."""
    return hashlib.sha256(f"{kind}{shape}".encode())


@dataclass(frozen=True)
class LogHeader:
    """What a log says once, before its first record."""

    rounding: float  # of norms
    rounding_mode: str
    unit: str
    neighbouring: str
    sampler: str
    individually_clipped: bool  # training clipped each example at its last recorded level
    norm_pass: Mapping[str, Any]  # how norms were taken, with its caveats
    run: Mapping[str, Any] = field(default_factory=dict)  # what else is known of the run
    # When norms are taken; empty if no policy chose the records.
    policy: Mapping[str, Any] = field(default_factory=dict)
    # Order and rdp_cap of the filter that watched the run; empty if none did.
    privacy_filter: Mapping[str, float] = field(default_factory=dict)


class NormLogWriter:
    """Appends to the log in `run_dir`. What it appended survives a crash at any later moment."""

    def __init__(
        self,
        run_dir: Path,
        header: LogHeader,
        example_ids: NDArray[np.generic],
        unit_ids: NDArray[np.generic] | None = None,
        reference_positions: IntArray = _NOBODY,
    ) -> None:
        """Start a log in an empty directory, or continue one and remove what a crash left there."""
        exact = np.zeros(len(example_ids), dtype=bool)
        exact[reference_positions] = True
        units = {} if unit_ids is None else {"unit_id": unit_ids}
        try:
            ids = pa.table({"example_id": example_ids, **units, "exact": exact})
            _reading.check_columns(run_dir / IDS, ids.schema, ID_COLUMNS)
        except (pa.ArrowException, EvidenceError) as error:
            raise _facts.refused("refusal.ids", "unreadable", error=error) from error
        self._n, self._ids_fingerprint = len(example_ids), fingerprint(example_ids)
        line = {
            "schema": run_files.SCHEMA,
            "n_examples": self._n,
            "ids_fingerprint": self._ids_fingerprint,
            "ids_file": IDS,
            "ids_sha256": "",  # of a file that a log to be continued has
            "n_exact": len(reference_positions),
            **vars(header),
        }
        _reading.check(journal_state.LINES["header"], line, "what the log says", "correct it")
        self.run_dir, self._folder = run_dir, _folders.make_folder(run_dir, RECORDS)
        self._journal = _files.JournalWriter(run_dir)
        self._levels = records.Levels(header.rounding, header.rounding_mode)
        with _files.on_failure(self.close):
            if lines := self._journal.entries:
                self._check_continues(lines[0], header)
                for path in self._folder.glob(".*.tmp"):  # what a crash left
                    _folders.remove_file(path)
                # Lines come after their files. Those of void lines are kept.
                named = {file["file"] for one in lines if "file" in one for file in files_of(one)}
                for name in _storage.sizes_in(self._folder):
                    if RECORD_FILE.fullmatch(name) and name not in named:
                        _folders.remove_file(self._folder / name)
                return
            _files.write_atomically(run_dir / IDS, content := _files.parquet_bytes(ids))
            line["ids_sha256"] = hashlib.sha256(content).hexdigest()
            self._journal.append("header", **line)

    def record(
        self,
        step: int,
        norms: FloatArray,
        *,
        max_grad_norm: float,
        targets_fingerprint: str,
        seconds: float,
    ) -> None:
        """Append a full record: norms (n_examples,) at the parameters that `step` starts from."""
        column, name = self._levels.encode(norms, max_grad_norm), f"{step:012d}.parquet"
        if len(column) <= records.LARGEST_FILE:
            written = self._write(name, {"norm": column})
        else:
            parts = np.split(column, range(records.PART_SIZE, len(column), records.PART_SIZE))
            files = [
                self._write(part_name(name, number), {"norm": part})
                for number, part in enumerate(parts)
            ]
            written = {"file": name, "parts": [[one["bytes"], one["sha256"]] for one in files]}
        self._journal.append(
            "record",
            step=step,
            n_examples=len(column),
            max_grad_norm=max_grad_norm,
            ids_fingerprint=self._ids_fingerprint,
            targets_fingerprint=targets_fingerprint,
            seconds=round(seconds, 6),
            **written,
        )

    def exact(
        self, first: int, norms: FloatArray, max_grad_norms: FloatArray, seconds: float
    ) -> None:
        """Append rows (n_steps, n_reference) of the reference examples, of steps from `first`."""
        rows = self._levels.encode(norms, max_grad_norms[:, np.newaxis])
        columns = {str(step): row for step, row in enumerate(rows, first)}
        written = self._write(f"exact-{first:012d}.parquet", columns)
        self._journal.append(
            "exact", first=first, count=len(norms), seconds=round(seconds, 6), **written
        )

    def free(
        self,
        first: int,
        batches: Sequence[tuple[IntArray, FloatArray] | None],
        max_grad_norms: FloatArray,
    ) -> None:
        """Append positions and norms of batches (None: unknown) of steps; `steps` must follow."""
        known = {step: batch for step, batch in enumerate(batches) if batch is not None}
        steps = np.repeat([*known], [len(batch[0]) for batch in known.values()]).astype(np.int64)
        position, norms = (
            np.concatenate([np.zeros(0, kind), *(batch[part] for batch in known.values())])
            for part, kind in enumerate((np.int64, np.float64))
        )
        norms = self._levels.encode(norms, max_grad_norms[steps])
        kept_at = (steps + first).astype(np.int32)
        entries = records.BatchNormEntries(position.astype(np.int32), kept_at, norms)
        self._journal.append(
            "free",
            wait=False,
            first=first,
            count=len(batches),
            missing=[first + step for step in range(len(batches)) if step not in known],
            entries=len(entries),
            **self._write(f"free-{first:012d}.parquet", records.file_bytes(entries, first)),
        )

    def left_out(self, first: int, count: int, positions: IntArray, steps: IntArray) -> None:
        """Append the examples that the filter left out in `count` steps, with the step for each."""
        columns = {"position": positions.astype(np.int32), "step": steps.astype(np.int32)}
        written = self._write(f"filter-{first:012d}.parquet", columns)
        self._journal.append("filter", first=first, count=count, examples=len(positions), **written)

    def steps(self, first: int, count: int, *, counts: SessionCounts, **setting: Any) -> None:
        """Append the realised `StepSetting` that `count` consecutive steps from `first` shared."""
        self._journal.append(
            "steps", first=first, count=count, evidence=counts.to_json(), **setting
        )

    def spans(self, settings: StepSettings, first: int, end: int, counts: SessionCounts) -> None:
        """Append the steps from first to before end of a run with these settings."""
        for start, stop in settings.spans(first, end):
            self.steps(start, stop - start, **vars(settings.at(start)), counts=counts)

    def truncate(self, step: int) -> None:
        """Declare void what was logged beyond `step`, from which training was resumed."""
        self._journal.append("truncate", step=step)

    def finish(self, counts: SessionCounts) -> None:
        """Append the line that says that the run ended as intended, with the last counts."""
        self._journal.append("close", evidence=counts.to_json())

    def close(self) -> None:
        """Release the directory."""
        self._journal.close()

    def _write(
        self, name: str, content: bytes | Mapping[str, NDArray[np.generic]]
    ) -> dict[str, Any]:
        """Write a file, or columns to a Parquet file, and return what the journal says of it."""
        if not isinstance(content, bytes):
            content = _files.parquet_bytes(pa.table(dict(content)))
        _files.write_atomically(self._folder / name, content)
        return {"file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def _check_continues(self, first: Mapping[str, Any], header: LogHeader) -> None:
        """Raise EvidenceError unless this run continues the log with this first line."""
        logged = {**_ALIKE_IN_RUN, **first["run"], **first}
        expected = {**_ALIKE_IN_RUN, **header.run, **vars(header)}
        expected |= {"n_examples": self._n, "ids_fingerprint": self._ids_fingerprint}
        for name in (*_ALIKE, *_ALIKE_IN_RUN):
            if logged.get(name, {}) != expected[name]:
                values = {"logged": logged.get(name), "expected": expected[name]}
                raise _facts.damaged("refusal.resume", "other", name=name, **values)
