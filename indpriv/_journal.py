"""An append-only journal of JSON lines in a hash chain: a line that was changed, lost or reordered is found."""

import errno
import fcntl
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from indpriv._files import PRIVATE, fsync_folder
from indpriv.errors import EvidenceError, InputError

NAME = "journal.jsonl"
_LOCK = ".lock"
_START = "indpriv"


def _link(previous: str, body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


def read_journal(run_dir: Path) -> tuple[list[dict[str, Any]], bool]:
    """Entries of the journal of a run, and whether a torn last line (a crash while appending) was dropped.

    Raises:
        EvidenceError: no journal, or a whole line that is broken, changed or out of order.
    """
    path = run_dir / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise EvidenceError(
            f"{run_dir} holds no {NAME}; pass the run directory of a Recorder, e.g. runs/adult"
        ) from error
    *lines, rest = content.split(b"\n")
    entries: list[dict[str, Any]] = []
    chain = _START
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            claimed = entry.pop("chain")
            chain = _link(chain, entry)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise EvidenceError(
                f"{path} line {number} is damaged ({error}); restore the file from a copy"
            ) from error
        if claimed != chain or entry.get("seq") != number - 1:
            raise EvidenceError(
                f"{path} line {number} was changed, or a line before it is lost: its hash does not continue the chain; "
                "restore the file from a copy"
            )
        entries.append(entry)
    return entries, bool(rest)


class JournalWriter:
    """The one writer of a journal. Holds a lock; every appended line is on disk when `append` returns."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        lock = os.open(run_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)
        self._lock = os.fdopen(lock, "a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise InputError(
                f"{run_dir} is being written by process {owner}; it has one writer at a time: wait for it, stop it, "
                "or choose another directory"
            ) from error
        try:
            self._continue(run_dir / NAME)
        except BaseException:
            self._lock.close()
            raise

    def _continue(self, path: Path) -> None:
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self._chain, self._seq = _START, 0
        if path.exists():
            entries, torn = read_journal(self._run_dir)
            for entry in entries:
                self._chain = _link(self._chain, entry)
            self._seq = len(entries)
            if torn:  # never acknowledged: cut it off, so that the next line starts on its own
                whole = path.read_bytes().rfind(b"\n") + 1
                os.truncate(path, whole)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
        fsync_folder(self._run_dir)

    def append(self, kind: str, **values: Any) -> None:
        """Append one line and wait until it is on disk."""
        body = {"seq": self._seq, "kind": kind, **values}
        chain = _link(self._chain, body)
        line = json.dumps(
            {**body, "chain": chain}, sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        data = f"{line}\n".encode()
        end = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(
                    errno.ENOSPC,
                    f"only {written} of {len(data)} bytes were written",
                    str(self._run_dir / NAME),
                )
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(
                self._descriptor, end
            )  # a torn line in the middle would spoil all that follows
            raise
        self._chain, self._seq = chain, self._seq + 1

    def close(self) -> None:
        """Release the lock."""
        if not self._lock.closed:
            os.close(self._descriptor)
            self._lock.close()

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
