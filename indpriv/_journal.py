"""An append-only journal of JSON lines in a hash chain, which shows damage but no forgery."""

import errno
import hashlib
import json
import os
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any

from indpriv import _files, _folders, _reading
from indpriv._facts import text
from indpriv.errors import ChainError, EvidenceError, InputError

NAME = "journal.jsonl"
_START = "indpriv"


def _to_line(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _link(previous: str, body: dict[str, Any]) -> str:
    return hashlib.sha256(f"{previous}\n{_to_line(body)}".encode()).hexdigest()


def chains(entries: list[dict[str, Any]]) -> list[str]:
    """The hash that a first line continues, and that of each entry of `read_journal`."""
    return [*accumulate(entries, _link, initial=_START)]


def read_journal(run_dir: Path) -> tuple[list[dict[str, Any]], bool]:
    """Entries, and whether a torn last line (of a crash) was dropped; EvidenceError if damaged."""
    entries, _, content = _read(run_dir)
    return entries, not content.endswith(b"\n") and bool(content)


def _read(run_dir: Path) -> tuple[list[dict[str, Any]], str, bytes]:
    """Entries, the hash that the next line continues, and the file's content."""
    path = run_dir / NAME
    _folders.refuse_links(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise EvidenceError(text("refusal.journal", "none", run_dir=run_dir, name=NAME)) from error
    *lines, _ = content.split(b"\n")  # the last one is torn, or empty
    entries: list[dict[str, Any]] = []
    chain = _START
    for number, line in enumerate(lines, 1):
        try:
            entry = _reading.parse_json(line)
            claimed, _ = entry.pop("chain"), entry["kind"].isascii()
            chain = _link(chain, entry)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            values = {"path": path, "number": number, "error": error}
            raise EvidenceError(text("refusal.journal", "damaged", **values)) from error
        if claimed != chain or entry.get("seq") != number - 1:
            raise ChainError(text("refusal.journal", "chain", path=path, number=number))
        entries.append(entry)
    return entries, chain, content


class JournalWriter(AbstractContextManager["JournalWriter"]):
    """The one writer of a journal. It holds a lock; a line that `append` waited for is kept.

    Attributes:
        entries: what the journal held when it was opened.
        chain: hash of its last line, which the next one continues.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME
        self._file: int | None = None
        self._lock = _files.OneWriter(run_dir)
        with _files.on_failure(self.close):
            found = _read(run_dir) if self._path.is_file() else ([], _START, b"")
            self.entries, self.chain, content = found
            self._next = len(self.entries)
            self._file = _folders.open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.ftruncate(self._file, content.rfind(b"\n") + 1)  # a torn line was not acknowledged

    def __len__(self) -> int:
        return self._next

    def append(self, kind: str, *, wait: bool = True, **values: Any) -> None:
        """Append one line and wait until it is kept; OSError: it is not in the journal.

        wait: False where another line follows at once, which waits for both.
        """
        if self._file is None:
            raise InputError(f"{self._path} is closed; open it again to append")
        body = {"seq": self._next, "kind": kind, **values}
        chain = _link(self.chain, body)
        line = f"{_to_line({**body, 'chain': chain})}\n".encode()
        end = os.fstat(self._file).st_size
        try:
            if (written := os.write(self._file, line)) != len(line):
                reason = f"only {written} of {len(line)} bytes were written"
                raise OSError(errno.ENOSPC, reason, str(self._path))
            if wait:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, end)  # a torn line in the middle would spoil the rest
            raise
        self.chain, self._next = chain, self._next + 1

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()
