"""One writer of a folder in object storage at a time."""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
import weakref
from contextlib import suppress
from pathlib import Path

from indpriv._storage.remote_path import RemotePath, StorageError
from indpriv.errors import InputError

_RENEWED_EVERY, _FORGOTTEN_AFTER = 60.0, 300.0  # seconds
_RENEWED_LATELY = 150.0  # seconds: before a claim is this old, nobody has forgotten it


class RemoteLock:
    """The claim of one process on a folder in object storage, which it renews as long as it lives.

    All claims are objects there, and the server's clock says which of them are old. A process puts
    its own and then looks at all, so that of two that begin at once at most one goes on. One that
    was silent for so long that another took the folder gives it up for good.
    """

    def __init__(self, folder: RemotePath, shown: Path) -> None:
        """Claim the folder; InputError, naming the owner and `shown`, if another process has."""
        self._shown, self._folder = shown, folder
        self._claim = folder / f".claim-{uuid.uuid4().hex}"
        self._forgotten: set[RemotePath] = set()  # claims that this process has removed
        self._one_at_a_time, self._ended = threading.Lock(), threading.Event()
        self._lost = "it was released"
        self._renew()
        try:
            self._look_around()
        except BaseException:
            _end(self._claim, self._ended)
            raise
        # Neither keeps the lock alive: it ends with a writer that was dropped, and at exit.
        self._end = weakref.finalize(self, _end, self._claim, self._ended)
        stay = threading.Thread(target=_stay, args=(weakref.ref(self), self._ended), daemon=True)
        stay.start()

    def _renew(self) -> None:
        began = time.time()  # which goes on while the machine sleeps
        self._claim.write_bytes(f"{os.getpid()} on {platform.node()}".encode())
        self._renewed = began

    def _look_around(self) -> None:
        """Forget claims that are old; InputError if there is another one."""
        claims = {path: at for path, at in self._folder.times() if path.name.startswith(".claim-")}
        now = claims.pop(self._claim, None)
        for claim, renewed in claims.items():
            if claim in self._forgotten or (now and now - renewed > _FORGOTTEN_AFTER):
                self._forgotten.add(claim)
                claim.unlink(missing_ok=True)
                continue
            with suppress(FileNotFoundError):  # just released
                raise InputError(
                    f"{self._shown} is being written by process {claim.read_text()}; it has one "
                    "writer at a time: wait for it, stop it, or choose another directory. A "
                    f"process that died is forgotten after {_FORGOTTEN_AFTER:g} s"
                )
        if now is None:
            raise InputError(f"{self._shown}: the claim of this process is gone")

    def check(self) -> None:
        """Raise InputError if another process may have taken the folder, here and ever after."""
        with self._one_at_a_time:
            if not self._ended.is_set():
                try:
                    if time.time() - self._renewed > _RENEWED_LATELY:
                        self._look_around()
                        self._renew()
                    self._look_around()
                    return
                except StorageError:
                    raise
                except InputError as error:
                    self._ended.set()
                    self._lost = str(error)
            raise InputError(
                f"{self._shown} may have been taken by another process, because this one was "
                f"silent for too long ({self._lost}); it writes there no more"
            )

    def renew(self) -> None:
        """Say that this process lives."""
        self.check()
        with self._one_at_a_time, suppress(InputError):
            if not self._ended.is_set():
                self._renew()

    def release(self) -> None:
        """Give the folder up; a claim that cannot be removed is forgotten."""
        with self._one_at_a_time:
            self._end()


def _end(claim: RemotePath, ended: threading.Event) -> None:
    ended.set()
    with suppress(InputError):
        claim.unlink(missing_ok=True)


def _stay(weak: weakref.ref[RemoteLock], ended: threading.Event) -> None:
    """Renew a claim until it ends."""
    while not ended.wait(_RENEWED_EVERY):
        lock = weak()
        if lock is None:
            return
        with suppress(InputError):  # what keeps us from the bucket also ends the writing
            lock.renew()
        del lock
