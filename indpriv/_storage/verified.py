"""Files that are compared with their hash while they are read, once. Sensitive: they are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from hashlib import sha256 as sha256_of
from pathlib import Path

from indpriv.errors import EvidenceError

_KEPT_BYTES = 1 << 28


class _Kept:
    """Files that were read and compared with their hash, as many as fit into a few bytes."""

    def __init__(self) -> None:
        self._lock, self._size = threading.Lock(), 0
        self._content: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def read(self, path: Path, sha256: str) -> bytes:
        key = (str(path), sha256)
        with self._lock:
            if key in self._content:
                self._content.move_to_end(key)
                return self._content[key]
        content = path.read_bytes()
        if sha256_of(content).hexdigest() != sha256:
            raise EvidenceError(
                f"{path} was changed: its hash is not the journal's; restore it from a copy"
            )
        with self._lock:
            if key not in self._content:  # another thread may have read it too
                self._content[key] = content
                self._size += len(content)
            while self._size > _KEPT_BYTES:
                self._size -= len(self._content.popitem(last=False)[1])
        return content


_kept = _Kept()


def read_verified(path: Path, sha256: str) -> bytes:
    """The content of a file in object storage, compared with its hash while it is read.

    What was read is kept as long as there is room, so that each byte is read once.

    Raises:
        EvidenceError: the file is missing, or its hash is another.
    """
    try:
        return _kept.read(path, sha256)
    except FileNotFoundError as error:
        raise EvidenceError(f"{path} is missing; restore it from a copy") from error
