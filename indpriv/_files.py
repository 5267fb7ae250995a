"""Files that survive a crash and are not read by others."""

import errno
import hashlib
import json
import os
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from indpriv import _facts, _folders, _reading
from indpriv.errors import ChainError, EvidenceError, InputError

METADATA_KEY = "indpriv"
JOURNAL, _START = "journal.jsonl", "indpriv"
ROW_GROUP_SIZE = 1 << 18
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar")  # of checkpoints
_OPTIONS: Any = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}
_LOCK, _WRITER = ".lock", ".writer"  # the latter holds the process id of the writer
_KEPT_BYTES = {True: 1 << 28, False: 1 << 26}  # of buckets, and of a disk, which costs little
_kept, _keeping = OrderedDict[tuple[str, str, int], bytes](), threading.Lock()


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    _folders.refuse_links(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, expected: str, content: bytes | None = None) -> None:
    """Raise EvidenceError unless a file is there and has this hash; content: if it was read."""
    try:
        found = sha256(path) if content is None else hashlib.sha256(content).hexdigest()
    except FileNotFoundError as error:
        raise EvidenceError(f"{path} is missing; restore it from a copy") from error
    if found != expected:
        raise _facts.damaged("refusal.records", "changed", path=path)


def read_verified(path: Path, sha256: str) -> bytes:
    """The content of a file, compared with its hash (EvidenceError) while it is read. Sensitive."""
    # Kept as long as there is room: each byte is read once, or again where a file was changed.
    try:
        at = 0 if _folders.is_remote(path) else path.stat().st_mtime_ns
        with _keeping:
            if (key := (str(path), sha256, at)) in _kept:
                _kept.move_to_end(key)
                return _kept[key]
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise EvidenceError(f"{path} is missing; restore it from a copy") from error
    check_hash(path, sha256, content)
    with _keeping:
        _kept[key] = content
        while sum(map(len, _kept.values())) > _KEPT_BYTES[_folders.is_remote(path)]:
            _kept.popitem(last=False)
    return content


def others_can_read(path: Path) -> bool:
    """Whether the mode of a path lets its group or others in; Windows keeps no such mode."""
    return os.name != "nt" and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


@contextmanager
def on_failure(clean_up: Callable[[], object]) -> Iterator[None]:
    """Clean up if the block does not reach its end, also after Ctrl-C; the error goes on."""
    try:
        yield
    except BaseException:
        clean_up()
        raise


def writer_of(folder: Path) -> str | None:
    """Process id of the process that writes a folder now; None if none does, as far as we see."""
    lock, writer = folder / _LOCK, folder / _WRITER
    if _folders.is_remote(folder) or not lock.is_file():
        return None
    _folders.refuse_links(lock)
    _folders.refuse_links(writer)
    try:
        with FileLock(lock, timeout=0, mode=_folders.PRIVATE, thread_local=False):
            return None
    except Timeout:
        number = writer.read_text(errors="replace") if writer.is_file() else ""
        return number if number.isdecimal() else "unknown"
    except (OSError, NotImplementedError):  # others' folder; a file system without locks
        return None


class OneWriter:
    """The lock of a folder that one process writes at a time, until it closes it or dies."""

    def __init__(self, folder: Path, shown: Path | None = None) -> None:
        """Take the lock; InputError, with `shown` or the folder, if another process has it."""
        # On some systems a locked file cannot be read, so the process id has a file of its own.
        with suppress(FileNotFoundError):
            os.close(_folders.open_file(folder / _LOCK, os.O_RDONLY))  # it is a file of its own
        self._lock = FileLock(folder / _LOCK, timeout=0, mode=_folders.PRIVATE, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout as error:
            values = {"folder": shown or folder, "process": writer_of(folder) or "unknown"}
            raise _facts.refused("refusal.resume", "written", **values) from error
        with on_failure(self.close):
            write_atomically(folder / _WRITER, str(os.getpid()).encode())

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()


@contextmanager
def written_atomically(path: Path) -> Iterator[Any]:
    """A private file, written in the block; it then replaces what has its name, durably."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with on_failure(lambda: _folders.remove_file(temporary)):
        descriptor = _folders.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with _folders.path_named(path), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _folders.replace_file(temporary, path)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a private file that is either whole or absent, and durable once this returns."""
    with written_atomically(path) as file:
        file.write(content)


def write_private_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write a DataFrame, readable by its owner only; its attrs also as JSON under METADATA_KEY."""
    write_private_frames([frame], path)


def write_private_frames(frames: Iterable[pd.DataFrame], path: Path, schema: Any = None) -> None:
    """Write DataFrames with the columns of schema, or the same, as `write_private_parquet` does."""
    writer = None
    with written_atomically(path) as file:
        for frame in frames:
            table = pa.Table.from_pandas(frame, schema=writer and schema, preserve_index=False)
            if writer is None:
                own, known = table.schema, {one.name: one for one in schema or ()}
                kept = [known.get(one.name, one) if one.type == pa.null() else one for one in own]
                attrs = {METADATA_KEY: json.dumps(frame.attrs)} if frame.attrs else {}
                schema = pa.schema(kept, metadata={**own.metadata, **attrs})
                writer = pq.ParquetWriter(file, schema, **_OPTIONS)
            writer.write_table(table.cast(schema), row_group_size=ROW_GROUP_SIZE)
        if writer is not None:
            writer.close()


def parquet_bytes(
    table: Any, *, delta_encoded: Collection[str] = (), row_group_size: int | None = None
) -> bytes:
    """A pyarrow table as Parquet; delta_encoded: columns of ascending whole numbers."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=row_group_size or ROW_GROUP_SIZE,
        **_OPTIONS,
        use_dictionary=[name for name in table.column_names if name not in delta_encoded],
        column_encoding=dict.fromkeys(delta_encoded, "DELTA_BINARY_PACKED"),
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read_parquet(
    path: Path, *, sha256: str | None = None, kinds: Mapping[str, str] = MappingProxyType({})
) -> pd.DataFrame:
    """Read a Parquet file with its attrs; kinds: see `check_columns`."""
    with opened_parquet(path, sha256) as file:
        _reading.check_columns(path, file.schema_arrow, kinds)
        return frame_of(file.read())


@contextmanager
def opened_parquet(path: Path, sha256: str | None = None) -> Iterator[Any]:
    """A Parquet file with checksums; what is wrong in the block is one InputError."""
    _folders.refuse_links(path)
    with _reading.named(path):
        source: Any
        if sha256 is not None:
            source = pa.BufferReader(read_verified(path, sha256))
        else:
            source = path.open("rb") if _folders.is_remote(path) else pa.OSFile(str(path))
        with source, _reading.ParquetFile(path, source) as file:
            yield file


def frame_of(table: Any) -> pd.DataFrame:
    """A pyarrow table as a DataFrame with its attrs."""
    frame: pd.DataFrame = table.to_pandas()
    attrs = (table.schema.metadata or {}).get(METADATA_KEY.encode())
    if attrs is not None:  # before pyarrow 22, to_pandas() left them out
        frame.attrs = dict(_reading.parse_json(attrs))
    return frame


def write_json(path: Path, value: Any) -> None:
    """Write a private JSON file atomically; NaN and infinity are errors."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; InputError names it where it is missing or broken."""
    _folders.refuse_links(path)
    with _reading.named(path, "restore it or make it again"):
        return _reading.parse_json(path.read_bytes())


def first_at(content: Mapping[str, Any], *paths: tuple[str, ...]) -> Any:
    """The value at the first of these paths in nested JSON objects that is not null, else None."""
    for path in paths:
        value: Any = content
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


# --- an append-only journal of JSON lines in a hash chain, which shows damage but no forgery


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
    path = run_dir / JOURNAL
    _folders.refuse_links(path)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _facts.damaged("refusal.journal", "none", run_dir=run_dir, name=JOURNAL) from error
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
            raise _facts.damaged("refusal.journal", "damaged", **values) from error
        if claimed != chain or entry.get("seq") != number - 1:
            raise ChainError(_facts.text("refusal.journal", "chain", path=path, number=number))
        entries.append(entry)
    return entries, chain, content


class JournalWriter(AbstractContextManager["JournalWriter"]):
    """The one writer of a journal. It holds a lock; a line that `append` waited for is kept."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / JOURNAL
        self._file: int | None = None
        self._lock = OneWriter(run_dir)
        with on_failure(self.close):
            found = _read(run_dir) if self._path.is_file() else ([], _START, b"")
            self.entries, self.chain, content = found  # its lines, and the hash of the last
            self._next = len(self.entries)
            self._file = _folders.open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.ftruncate(self._file, content.rfind(b"\n") + 1)  # a torn line was not acknowledged

    def __len__(self) -> int:
        return self._next

    def append(self, kind: str, *, wait: bool = True, **values: Any) -> None:
        """Append a line, kept once this returns or with the next if not `wait`; else OSError."""
        if self._file is None:
            raise InputError(f"{self._path} is closed; resume_at= continues it in a new recorder")
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
