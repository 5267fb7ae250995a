"""An append-only journal of JSON lines in a hash chain, which shows changed or lost lines."""

import errno
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from indpriv._files import BINARY, PRIVATE, OneWriter, fsync_folder, on_failure
from indpriv.errors import EvidenceError, InputError

NAME = "journal.jsonl"
_START = "indpriv"


def _to_line(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _link(previous: str, body: dict[str, Any]) -> str:
    return hashlib.sha256(f"{previous}\n{_to_line(body)}".encode()).hexdigest()


def read_journal(run_dir: Path) -> tuple[list[dict[str, Any]], bool]:
    """Entries of a journal, and whether a torn last line (a crash while appending) was dropped.

    Raises:
        EvidenceError: no journal, or a whole line that is broken, changed or out of order.
    """
    entries, _, torn = _read(run_dir)
    return entries, torn


def _read(run_dir: Path) -> tuple[list[dict[str, Any]], str, bool]:
    """Entries, the hash that the next line continues, and whether a torn last line was dropped."""
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
                f"{path} line {number} was changed, or a line before it is lost: its hash does not "
                "continue the chain; restore the file from a copy"
            )
        entries.append(entry)
    return entries, chain, bool(rest)


class JournalWriter:
    """The one writer of a journal. It holds a lock; when `append` returns, the line is on disk.

    Attributes:
        entries: what the journal held when it was opened.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._descriptor: int | None = None
        self._lock = OneWriter(run_dir)
        with on_failure(self.close):
            self.entries = self._continue(run_dir / NAME)

    def _continue(self, path: Path) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        self._chain = _START
        if path.exists():
            entries, self._chain, torn = _read(self._run_dir)
            if torn:  # never acknowledged: cut it off, so that the next line starts on its own
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._next = len(entries)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY, PRIVATE)
        fsync_folder(self._run_dir)
        return entries

    def __len__(self) -> int:
        return self._next

    def append(self, kind: str, *, wait: bool = True, **values: Any) -> None:
        """Append one line and wait until it is on disk.

        wait: False where another line follows at once, which waits for both.
        """
        if self._descriptor is None:
            raise InputError(f"{self._run_dir / NAME} is closed; open it again to append")
        body = {"seq": self._next, "kind": kind, **values}
        chain = _link(self._chain, body)
        data = f"{_to_line({**body, 'chain': chain})}\n".encode()
        end = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(
                    errno.ENOSPC,
                    f"only {written} of {len(data)} bytes were written",
                    str(self._run_dir / NAME),
                )
            if wait:
                os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, end)  # a torn line in the middle would spoil the rest
            raise
        self._chain, self._next = chain, self._next + 1

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
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
