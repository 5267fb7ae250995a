"""Files that are compared with their hash while they are read, once. Sensitive: they are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from hashlib import file_digest
from hashlib import sha256 as sha256_of
from pathlib import Path

from indpriv._storage.remote_path import is_remote
from indpriv.errors import EvidenceError

_KEPT_BYTES, _KEPT_BYTES_OF_DISK = 1 << 28, 1 << 26  # a disk is read again at little cost


class _Kept:
    """Files that were read and compared with their hash, as many as fit into a few bytes."""

    def __init__(self, largest: int) -> None:
        self._lock, self._size, self._largest = threading.Lock(), 0, largest
        self._content: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def read(self, path: Path, sha256: str) -> bytes:
        key = (str(path), sha256)
        with self._lock:
            if key in self._content:
                self._content.move_to_end(key)
                return self._content[key]
        content = path.read_bytes()
        _compare(path, sha256_of(content).hexdigest(), sha256)
        with self._lock:
            if key not in self._content:  # another thread may have read it too
                self._content[key] = content
                self._size += len(content)
            while self._size > self._largest:
                self._size -= len(self._content.popitem(last=False)[1])
        return content


_of_buckets, _of_disk = _Kept(_KEPT_BYTES), _Kept(_KEPT_BYTES_OF_DISK)


def check_hash(path: Path, sha256: str) -> None:
    """Raise EvidenceError unless a file on a disk is there and has this hash."""
    try:
        with path.open("rb") as file:
            _compare(path, file_digest(file, "sha256").hexdigest(), sha256)
    except FileNotFoundError as error:
        raise EvidenceError(f"{path} is missing; restore it from a copy") from error


def _compare(path: Path, found: str, sha256: str) -> None:
    if found != sha256:
        raise EvidenceError(
            f"{path} was changed: its hash is not the journal's; restore it from a copy"
        )


def read_verified(path: Path, sha256: str) -> bytes:
    """The content of a file, compared with its hash while it is read.

    What was read is kept as long as there is room, so that each byte is read once.

    Raises:
        EvidenceError: the file is missing, or its hash is another.
    """
    try:
        return (_of_buckets if is_remote(path) else _of_disk).read(path, sha256)
    except FileNotFoundError as error:
        raise EvidenceError(f"{path} is missing; restore it from a copy") from error
