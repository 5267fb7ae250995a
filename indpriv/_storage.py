"""Runs and audits in object storage: paths to read them, and sending them there from a disk.

An address such as s3://bucket/runs/adult becomes a `RemotePath` with the methods of pathlib that we
use, which reads by pyarrow.fs: S3 (s3), Google Cloud Storage (gs, gcs), Azure (abfs, abfss).
Functions that read a Path take one too. Everything is written on a disk; `upload` sends it.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit
from urllib.request import url2pathname

from indpriv import _facts, _files, _folders
from indpriv.errors import InputError, PrivacyWarning

_SECRETS = {"sig", "client_secret"}  # what pyarrow takes in an address of Azure
SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
_GOOGLE_TRIES_FOR = 80  # seconds, where its library would for minutes; others wait _PAUSES
_PAUSES = (1.0, 4.0, 15.0, 60.0)  # seconds, before a server that did not answer is asked again
_ASK_AGAIN = re.compile(  # messages of the library of AWS at which asking again may help
    "NETWORK_CONNECTION|SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT|THROTTLING"
)
# Why storage refuses, and the words in messages of the libraries of AWS, Google and Azure, which
# pyarrow passes on, that say so.
_REASONS = {
    "no_credentials": "OAuth2 access token",
    "expired": "ExpiredToken",
    "no_right": "ACCESS_DENIED|PERMISSION_DENIED|UNAUTHENTICATED|AuthorizationFailure|"
    "AuthorizationPermissionMismatch|NoAuthenticationInformation",
    "no_bucket": "NO_SUCH_BUCKET|ContainerNotFound",
    "silent": "NETWORK_CONNECTION|UNAVAILABLE|Could not connect to server|Could not resolve host",
}
# What makes the other files count, and refers to them by hashes.
_LAST = ("audit.json", _files.JOURNAL)

if TYPE_CHECKING:
    _Base = Path
else:
    _Base = PurePosixPath


class StorageError(InputError):
    """Object storage that does not let us read or write."""


class RemotePath(_Base):
    """A path in object storage: /SCHEME/OPTIONS/BUCKET/..., so that it is pure.

    A method of pathlib that is missing here fails, and never reads a local file.
    """

    if not TYPE_CHECKING:

        def __str__(self) -> str:
            # From Python 3.12 on, pathlib hashes parents of a bucket by this, too.
            _, scheme, options, *rest = (*self.parts, "", "")[: max(3, len(self.parts))]
            query = unquote(options[1:])
            return f"{scheme}://{'/'.join(rest)}" + (f"?{query}" if query else "")

        def __fspath__(self) -> str:
            raise TypeError(f"{self} lies in object storage, and a file on a disk is needed")

        def __reduce__(self) -> tuple[Any, ...]:
            return location, (str(self),)

        def is_file(self) -> bool:
            return self._info().is_file

        def is_dir(self) -> bool:
            """Whether anything lies below: buckets have no empty folders."""
            return not self.is_file() and bool(self.files_below())

        def exists(self) -> bool:
            return self.is_file() or self.is_dir()

        def stat(self) -> SimpleNamespace:
            """Its st_size: buckets have no modes."""
            info = self._info()
            if not info.is_file:
                raise FileNotFoundError(f"{self} does not exist")
            return SimpleNamespace(st_size=info.size)

        def iterdir(self) -> "Iterator[RemotePath]":
            return iter(dict.fromkeys(self / name.partition("/")[0] for name in self.files_below()))

        def glob(self, pattern: str) -> "Iterator[RemotePath]":
            return (path for path in self.iterdir() if path.match(pattern))

        def open(self, mode: str = "rb") -> Any:
            if mode != "rb":
                raise ValueError(f"{self} is opened to read bytes, not with mode {mode!r}")
            return self._asked("read", lambda system, key: system.open_input_file(key))

        def read_bytes(self) -> bytes:
            def read(system: Any, key: str) -> bytes:
                with system.open_input_file(key) as file:
                    return file.read()

            return self._asked("read", read)

        def absolute(self) -> "RemotePath":
            return self

        resolve = absolute

    def put(self, file: Path) -> None:
        """Send a file on a disk: readers see the old object or all of the new one."""
        from pyarrow.fs import LocalFileSystem, copy_files

        def put(system: Any, key: str) -> None:  # Ctrl-C waits for the library
            copy_files(str(file), key, LocalFileSystem(), system, use_threads=False)

        self._asked("write", put)

    def files_below(self) -> dict[str, Any]:
        """Path below this folder -> what the server says of the file, of all in order."""
        from pyarrow.fs import FileSelector

        def below(system: Any, key: str) -> dict[str, Any]:
            found = system.get_file_info(FileSelector(key, allow_not_found=True, recursive=True))
            files = sorted((info for info in found if info.is_file), key=lambda info: info.path)
            return {info.path.removeprefix(f"{key}/"): info for info in files}

        files: dict[str, Any] = self._asked("list", below)
        return files

    def _info(self) -> Any:
        return self._asked("read", lambda system, key: system.get_file_info(key))

    def _asked(self, what: str, call: Callable[[Any, str], Any]) -> Any:
        """What a call with file system and key returns; repeated while the server is silent."""
        _, scheme, options, bucket, *rest = self.parts
        system, root = _file_system(scheme, bucket, unquote(options[1:]))
        for pause in (*_PAUSES, None):
            try:
                return call(system, "/".join([root, *rest]))
            except FileNotFoundError:
                raise
            except OSError as error:
                if pause is None or not _ASK_AGAIN.search(str(error)):
                    reason = _reason_of(error, bucket)
                    raise StorageError(f"{self}: cannot {what}: {reason}") from error
            time.sleep(pause)


def _reason_of(error: OSError, bucket: str) -> str:
    """A reason with its remedy, or what the library said."""
    case = next((case for case, words in _REASONS.items() if re.search(words, str(error))), "")
    return _facts.text("refusal.storage", case, bucket=bucket) if case else str(error)


def location(path: str | Path) -> Path:
    """The path of a directory, given as one or as an address; InputError for another address."""
    if isinstance(path, RemotePath):
        return path
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # C:/ is a drive
        return Path(path)
    address = re.sub(r"^([^:]+):/+", lambda found: f"{found[1].lower()}://", str(path))
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Path(url2pathname(f"/{parts.netloc}{parts.path}"))
    if parts.scheme not in SCHEMES:
        said = {"scheme": parts.scheme, "known": ", ".join(f"{one}://" for one in SCHEMES)}
        raise _facts.refused("refusal.storage", "scheme", address=address, **said)
    if not parts.netloc:
        raise _facts.refused("refusal.storage", "address", scheme=parts.scheme)
    if _holds_credentials(parts):
        raise _facts.refused("refusal.storage", "credentials", scheme=parts.scheme)
    below = filter(None, [parts.path.strip("/")])
    options = f"?{quote(parts.query, safe='')}"
    return RemotePath("/", parts.scheme, options, parts.netloc, *below)


def location_on_disk(path: str | Path, what: str) -> Path:
    """The `location` of a directory on a disk, else InputError; what: "a run is", say."""
    found = location(path)
    if isinstance(found, RemotePath):
        raise _facts.refused("refusal.storage", "on_a_disk", found=found, what=what)
    nearest = next(filter(Path.exists, (found, *found.parents)), None)
    if nearest is not None and not nearest.is_dir():
        raise _facts.refused("refusal.storage", "a_file", found=nearest, path=path)
    return found


def bucket_to_write(
    address: str | Path | None, bucket_is_private: bool = False
) -> RemotePath | None:
    """The `location` that sensitive files are sent to, None for None; InputError unless private."""
    if address is None:
        return None
    if isinstance(found := location(address), RemotePath) and bucket_is_private is True:
        return found
    remote = isinstance(found, RemotePath)
    raise _facts.refused("refusal.storage", "others" if remote else "no_address", found=found)


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
        reason, missing = _reason_of(error, bucket), False
        if not re.search(_REASONS["no_right"], str(error)):  # perhaps only to look at a bucket
            raise InputError(f"{scheme}://{bucket}: {reason}") from error
    if missing:
        reason = _facts.text("refusal.storage", "no_bucket", bucket=bucket)
        raise InputError(f"{scheme}://{bucket}: {reason}")
    return system, root


def sizes_in(folder: Path) -> dict[str, int]:
    """Name -> bytes of each file in a folder, in one listing; nothing where there is no folder."""
    if isinstance(folder, RemotePath):
        return {name: info.size for name, info in folder.files_below().items() if "/" not in name}
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        return {entry.name: entry.stat().st_size for entry in files}


# --- sending what was written on a disk


def upload(folder: str | Path, upload_to: str | Path, *, bucket_is_private: bool = False) -> None:
    """Send a run or an audit from a disk to object storage; a second call goes on with it.

    The journal of a run and the audit.json of an audit go last: until then, what is in the bucket
    is no run or audit, or one that is not whole, and readers say so. A file is left out if one of
    its size was put there after it was last changed. Files that lie there alone stay.

    Args:
        folder: a run directory or an audit directory.
        upload_to: its address, e.g. s3://bucket/runs/adult.
        bucket_is_private: say that only those who may see the folder can read the bucket.

    Raises:
        InputError: neither a run nor an audit, one that is still being written, a link in it, or
            another run at the address.
        StorageError: the bucket cannot be written; what was sent stays there.
    """
    source = location_on_disk(folder, "a folder that is sent was")
    if (target := bucket_to_write(upload_to, bucket_is_private)) is None:
        raise InputError("upload_to is None; pass an address, e.g. s3://bucket/runs/adult")
    _check(source, target)
    _folders.named_by_person(source)
    there = target.files_below()
    names = [path.relative_to(source) for path in source.rglob("*")]
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    for name in sorted(names, key=lambda name: (name.name in _LAST, -len(name.parts), name)):
        _folders.refuse_links(path := source / name)
        if not path.is_file():
            continue
        own, sent = path.stat(), there.get(name.as_posix())
        is_there = sent and sent.size == own.st_size and sent.mtime_ns >= own.st_mtime_ns
        if name.name in _LAST or not is_there:
            (target / name.as_posix()).put(path)


def _check(source: Path, target: RemotePath) -> None:
    if not any((source / name).is_file() for name in _LAST):
        raise InputError(f"{source} is neither a run directory nor an audit directory; pass one")
    if (process := _files.writer_of(source)) is not None:
        raise InputError(f"{source} is still being written, by process {process}; wait for it")
    for name in _LAST:
        here, there = _first_line(source / name), _first_line(target / name)
        if there and (not here or (name == _files.JOURNAL and here != there)):
            raise InputError(f"{target} holds another run or audit; choose another address")


def _first_line(path: Path) -> bytes:
    """The header of a journal, which no other run has; nothing where there is no file."""
    return path.read_bytes().partition(b"\n")[0] if path.is_file() else b""


@contextmanager
def uploaded(folder: Path, to: RemotePath | None, *, or_warn: bool = False) -> Iterator[None]:
    """Send what the block wrote to a folder, also after an error or Ctrl-C, as far as it got.

    to: None to send nothing. or_warn: warn, not raise, where the bucket cannot be written.
    """
    ended = False
    try:
        yield
        ended = True
    finally:
        try:
            if to is not None and (ended or (folder / _files.JOURNAL).is_file()):
                upload(folder, to, bucket_is_private=True)
        except (OSError, InputError) as error:
            remedy = _facts.text("refusal.storage", "unsent", error=error, folder=folder, to=to)
            if ended and not or_warn:
                raise StorageError(remedy) from error
            warnings.warn(remedy, PrivacyWarning, stacklevel=1)
