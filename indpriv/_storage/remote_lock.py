"""One writer of a folder in object storage at a time."""

from __future__ import annotations

import os
import platform
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from indpriv._storage.remote_path import RemotePath, StorageError
from indpriv.errors import InputError

_RENEWED_EVERY, _FORGOTTEN_AFTER = 60.0, 300.0  # seconds


class RemoteLock:
    """The claim of one process on a folder in object storage, which it renews as long as it lives.

    All claims are objects there, and the server's clock says which of them are old. A process puts
    its own and then looks at all, so that of two that begin at once at most one goes on.
    """

    def __init__(self, folder: RemotePath, shown: Path) -> None:
        """Claim the folder; InputError, naming the owner and `shown`, if another process has."""
        self._owner = f"{os.getpid()} on {platform.node()}"
        self._claim, self._ended = folder / f".claim-{uuid.uuid4().hex}", threading.Event()
        self._renew()
        claims = {path: time for path, time in folder.times() if path.name.startswith(".claim-")}
        now = claims[self._claim]
        for claim, renewed in claims.items():
            if claim == self._claim:
                continue
            if now - renewed > _FORGOTTEN_AFTER:
                claim.unlink(missing_ok=True)
                continue
            owner = claim.read_text()
            self._claim.unlink()
            raise InputError(
                f"{shown} is being written by process {owner}; it has one writer at a time: wait "
                f"for it, stop it (it is forgotten after {_FORGOTTEN_AFTER:g} s), or choose "
                "another directory"
            )
        threading.Thread(target=self._stay, daemon=True).start()

    def _renew(self) -> None:
        self._claim.write_bytes(self._owner.encode())

    def _stay(self) -> None:
        while not self._ended.wait(_RENEWED_EVERY):
            with suppress(InputError):  # what keeps us from the bucket also ends the writing
                self.check()
                self._renew()

    def check(self) -> None:
        """Raise InputError if another process has taken the folder, since this one was silent."""
        if not self._claim.is_file():
            raise InputError(
                f"{self._claim.parent} was taken by another process, because this one was silent "
                f"for more than {_FORGOTTEN_AFTER:g} s; only that one writes there now"
            )

    def release(self) -> None:
        """Give the folder up; a claim that cannot be removed is forgotten."""
        self._ended.set()
        with suppress(StorageError):
            self._claim.unlink(missing_ok=True)
