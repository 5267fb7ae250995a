"""Run and audit directories in object storage: paths with the methods of pathlib that we use.

An address such as s3://bucket/runs/adult becomes a `RemotePath`, which reads and writes by
pyarrow.fs: S3 (s3), Google Cloud Storage (gs, gcs), Azure (abfs, abfss). Functions that take a Path
take one too; what they open, they open by its methods, since it has no place on a disk.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit
from urllib.request import url2pathname

from indpriv._storage.reasons import ASK_AGAIN, NO_BUCKET, NO_RIGHT, reason_of
from indpriv.errors import InputError

_SECRETS = {"sig", "client_secret"}  # what pyarrow takes in an address of Azure
SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")

if TYPE_CHECKING:
    _Base = Path
else:
    _Base = PurePosixPath


@dataclass(frozen=True)
class RemoteStat:
    """What `RemotePath.stat` knows."""

    st_size: int


class StorageError(InputError):
    """Object storage that does not let us read or write; what was written before stays."""


class RemotePath(_Base):
    """A path in object storage. Its parts are /SCHEME/OPTIONS/BUCKET/..., so that it is pure.

    A method of pathlib that is missing here fails, and never reads a local file.
    """

    if not TYPE_CHECKING:

        def __str__(self) -> str:
            _, scheme, options, *rest = self.parts
            query = unquote(options[1:])
            return f"{scheme}://{'/'.join(rest)}" + (f"?{query}" if query else "")

        def __fspath__(self) -> str:
            raise TypeError(f"{self} lies in object storage, and a file on a disk is needed")

        def __repr__(self) -> str:
            return f"RemotePath({str(self)!r})"

        def __reduce__(self) -> tuple[Any, ...]:
            return _location, (str(self),)

        def is_file(self) -> bool:
            return self._info().is_file

        def is_dir(self) -> bool:
            """Whether anything lies below: buckets have no empty folders."""
            return not self.is_file() and next(self._below(), None) is not None

        def exists(self) -> bool:
            return self.is_file() or self.is_dir()

        def stat(self) -> RemoteStat:
            info = self._info()
            if not info.is_file:
                raise FileNotFoundError(f"{self} does not exist")
            return RemoteStat(info.size)

        def iterdir(self) -> Iterator[RemotePath]:
            seen = (self / below.parts[len(self.parts)] for below in self._below())
            return iter(dict.fromkeys(seen))

        def glob(self, pattern: str) -> Iterator[RemotePath]:
            return (path for path in self.iterdir() if path.match(pattern))

        def rglob(self, pattern: str) -> Iterator[RemotePath]:
            return (path for path in self._below() if path.match(pattern))

        def open(self, mode: str = "rb") -> Any:
            if mode != "rb":
                raise ValueError(f"{self} is opened to read bytes, not with mode {mode!r}")
            system, key = self._where()
            return self._asked("read", lambda: system.open_input_file(key))

        def read_bytes(self) -> bytes:
            system, key = self._where()

            def read() -> bytes:
                with system.open_input_file(key) as file:
                    return file.read()

            return self._asked("read", read)

        def read_text(self, encoding: str = "utf-8") -> str:
            return self.read_bytes().decode(encoding)

        def write_bytes(self, content: bytes) -> None:
            """Put a whole object: readers see the old one or this one."""
            system, key = self._where()

            def put() -> None:
                file = system.open_output_stream(key)
                file.write(content)
                file.close()

            def uninterrupted() -> None:
                # A stream that is dropped puts what it has. Ctrl-C reaches the main thread only.
                with ThreadPoolExecutor(1) as one:
                    one.submit(put).result()

            self._asked("write", uninterrupted)

        def rmdir(self) -> None:
            """Nothing: a bucket has objects only."""

        def unlink(self, missing_ok: bool = False) -> None:
            system, key = self._where()
            try:
                self._asked("write", lambda: system.delete_file(key), pauses=())
            except FileNotFoundError:
                if not missing_ok:
                    raise

        def absolute(self) -> RemotePath:
            return self

        def resolve(self) -> RemotePath:
            return self

    def times(self) -> Iterator[tuple[RemotePath, float]]:
        """Files directly in this folder, and when each was written by the server's clock."""
        return ((self / info.base_name, info.mtime_ns / 1e9) for info in self._listed(False))

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of each file directly in this folder, in one listing."""
        return {info.base_name: info.size for info in self._listed(False)}

    def _where(self) -> tuple[Any, str]:
        """The file system, and the key there."""
        _, scheme, options, bucket, *rest = self.parts
        system, root = _file_system(scheme, bucket, unquote(options[1:]))
        return system, "/".join([root, *rest])

    def _info(self) -> Any:
        system, key = self._where()
        return self._asked("read", lambda: system.get_file_info(key))

    def _listed(self, recursive: bool) -> list[Any]:
        """What the server says of the files in this folder, or of all below."""
        from pyarrow.fs import FileSelector

        system, key = self._where()
        selector = FileSelector(key, allow_not_found=True, recursive=recursive)
        found = self._asked("list", lambda: system.get_file_info(selector))
        return sorted((info for info in found if info.is_file), key=lambda info: info.path)

    def _below(self) -> Iterator[RemotePath]:
        """Files below, in order of their names."""
        key = self._where()[1]
        return (self / info.path.removeprefix(f"{key}/") for info in self._listed(True))

    def _asked(
        self, what: str, call: Callable[[], Any], pauses: Sequence[float] | None = None
    ) -> Any:
        """What a call of the server returns; it is repeated while the server does not answer.

        pauses: in seconds, before it is repeated; default _PAUSES.

        Raises:
            StorageError: what keeps us from an object.
            FileNotFoundError: it does not exist.
        """
        for pause in (*(_PAUSES if pauses is None else pauses), None):
            try:
                return call()
            except FileNotFoundError:
                raise
            except OSError as error:
                if pause is None or not any(word in str(error) for word in ASK_AGAIN):
                    reason = reason_of(error, self.parts[3])
                    raise StorageError(f"{self}: cannot {what}: {reason}") from error
            time.sleep(pause)


def location_to_write(path: str | Path, bucket_is_private: bool) -> Path:
    """The path of a directory to write sensitive files to; see `location`.

    Raises:
        InputError: as `location`; or object storage that nobody said is private.
    """
    found = location(path)
    if is_remote(found) and not bucket_is_private:
        raise InputError(
            f"{found} lies in object storage. On a disk, indpriv writes files that only their "
            "owner can read; who can read a bucket, its settings decide. Make sure that nobody "
            "else can, and pass bucket_is_private=True (--set bucket_is_private)"
        )
    return found


def location_on_disk(path: str | Path, what: str) -> Path:
    """The path of a directory that can only be written on a disk; see `location`.

    Raises:
        InputError: as `location`; or object storage. what: that is written there, with a verb.
    """
    found = location(path)
    if is_remote(found):
        raise InputError(
            f"{found} lies in object storage: {what} written on a disk; pass a directory there, "
            "and copy it"
        )
    return found


def remove_tree(folder: Path) -> None:
    """Remove a folder and what lies in it, as far as that is possible."""
    if isinstance(folder, RemotePath):
        for path in list(folder.rglob("*")):
            path.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def is_remote(path: str | Path) -> bool:
    """Whether a path lies in object storage."""
    return isinstance(path, RemotePath)


def sizes_in(folder: Path) -> dict[str, int]:
    """Name -> bytes of each file in a folder, in one listing; nothing where there is no folder."""
    if isinstance(folder, RemotePath):
        return folder.sizes()
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        return {entry.name: entry.stat().st_size for entry in files}


def location(path: str | Path) -> Path:
    """The path of a directory that is given as a path or as an address with a scheme.

    A Path that an address was made into has lost a slash, which is put back.

    Raises:
        InputError: a scheme that is not known, no bucket, or credentials in the address, which
            reports would repeat.
    """
    if isinstance(path, RemotePath):
        return path
    return _location(str(path)) if _scheme(path) else Path(path)


def _scheme(path: str | Path) -> str:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", str(path))  # C:/ is a drive
    return found[1].lower() if found else ""


def _location(address: str) -> Path:
    address = re.sub(r"^([^:]+):/+", lambda found: f"{found[1].lower()}://", address)
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Path(url2pathname(f"/{parts.netloc}{parts.path}"))
    if parts.scheme not in SCHEMES:
        raise InputError(
            f"{address}: {parts.scheme}:// is no storage that we read; pass a path, file://, or "
            f"one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}"
        )
    if not parts.netloc or _holds_credentials(parts):
        problem = (
            "holds credentials, which reports would repeat" if parts.netloc else "has no bucket"
        )
        raise InputError(
            f"{parts.scheme}:// address {problem}: pass {parts.scheme}://BUCKET/PATH, and "
            "credentials by the environment, e.g. AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    options = quote(parts.query, safe="")
    below = parts.path.strip("/").split("/") if parts.path.strip("/") else []
    return RemotePath("/", parts.scheme, f"?{options}", parts.netloc, *below)


def _holds_credentials(parts: SplitResult) -> bool:
    """Whether an address does: Azure's has CONTAINER@ACCOUNT, Google's may have anonymous@."""
    user, at, _ = parts.netloc.rpartition("@")
    if parts.scheme in ("abfs", "abfss"):
        return ":" in user or not _SECRETS.isdisjoint(parse_qs(parts.query))
    return bool(at) and not (parts.scheme in ("gs", "gcs") and user == "anonymous")


@lru_cache
def _file_system(scheme: str, bucket: str, query: str) -> tuple[Any, str]:
    """The pyarrow file system of a bucket, and how keys there begin."""
    import pyarrow as pa
    from pyarrow import fs

    if scheme in ("gs", "gcs") and "retry_limit_seconds" not in query:
        query = "&".join(filter(None, (query, f"retry_limit_seconds={_GOOGLE_TRIES_FOR}")))
    try:
        system, root = fs.FileSystem.from_uri(
            f"{scheme}://{bucket}/" + (f"?{query}" if query else "")
        )
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{scheme}://{bucket} cannot be used: {error}") from error
    root = str(root).strip("/")
    try:  # what does not exist is never found, whether an object or its bucket
        missing = not system.get_file_info(root).type
    except OSError as error:
        reason = reason_of(error, bucket)
        if reason != NO_RIGHT.format(bucket=bucket):  # it may be that of looking at a bucket only
            raise InputError(f"{scheme}://{bucket}: {reason}") from error
        missing = False
    if missing:
        raise InputError(f"{scheme}://{bucket}: {NO_BUCKET.format(bucket=bucket)}")
    return system, root


_GOOGLE_TRIES_FOR = 80  # seconds, where its library would for minutes; others wait _PAUSES
_PAUSES = (1.0, 4.0, 15.0, 60.0)  # seconds, before a server that did not answer is asked again
