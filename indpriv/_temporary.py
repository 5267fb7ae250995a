"""What is said where there is no room for temporary files."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from indpriv.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def room_for(need: str) -> Iterator[None]:
    """Raise one InputError if the block finds no room for temporary files; other errors go on.

    need: a sentence without its full stop that says what is written there, and how much.
    """
    remedy = f"{need}; free it, or set TMPDIR to a folder with room"
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise InputError(f"no folder for temporary files can be written. {remedy}") from error
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise InputError(f"{folder}, the folder of temporary files, is full. {remedy}") from error
