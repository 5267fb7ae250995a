"""Writing below a directory that a person named: what lies in it may be a stranger's.

The directory itself may be reached through links. Below it none is followed: each folder is opened
by its descriptor in the one above. Where the system cannot (Windows), a link that is there is
refused, but one that is planted in the same moment is not noticed.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from indpriv._facts import refused

PRIVATE = 0o600
# Windows changes line ends without the first; a pipe would wait without the last.
_FILE = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK"))
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_JUNCTION = 0xA0000003  # how Windows marks links to folders that need no rights to make
_BY_DESCRIPTOR = {os.open, os.mkdir, os.unlink, os.rename} <= os.supports_dir_fd
_named: set[Path] = set()  # absolute paths of directories


def named_by_person(path: Path) -> None:
    """Say that a directory was named by a person: from now on no link below it is followed."""
    _named.add(path.absolute())


def is_remote(path: str | Path) -> bool:
    """Whether a path lies in object storage: those are pure, see `indpriv._storage`."""
    return not isinstance(path, str | Path)


def _split(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The outermost directory above a path that was named, or the path, and the names below it."""
    path = path.absolute()
    root = next((parent for parent in reversed(path.parents) if parent in _named), path)
    return root, path.relative_to(root).parts


def refuse_links(path: Path) -> None:
    """Raise InputError if a path leads through a link below a directory that a person named."""
    place, below = _split(path)
    for name in () if is_remote(path) else below:  # buckets have no links
        place /= name
        with suppress(FileNotFoundError, NotADirectoryError):
            found = place.lstat()
            if stat.S_ISLNK(found.st_mode) or getattr(found, "st_reparse_tag", 0) == _JUNCTION:
                raise refused("refusal.storage", "link", place=place)


@contextmanager
def path_named(path: Path) -> Iterator[None]:
    """Where an OSError names no file, or one without its folder, it names this path."""
    try:
        yield
    except OSError as error:
        if os.sep not in str(error.filename):
            error.filename = str(path)
            del error.filename2  # None would be shown
        raise


@contextmanager
def _entry(path: Path) -> Iterator[tuple[str, int | None]]:
    """What to tell the system to find a path: its name, and a descriptor of the folder it is in."""
    refuse_links(path)
    if not _BY_DESCRIPTOR:
        yield str(path), None
        return
    root, below = _split(path.parent)
    folder = os.open(root, _FOLDER)
    try:
        with path_named(path):
            for name in below:
                inner = os.open(name, _FOLDER | _FILE, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield path.name, folder
    finally:
        os.close(folder)


def make_folder(path: Path, *inside: str) -> Path:
    """Make a directory that a person named (0700), unless it is there, and a folder inside it."""
    target = path.joinpath(*inside)
    root, _ = _split(path)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    named_by_person(root)
    for name in _split(target)[1]:
        with _entry(root := root / name) as (at, folder), suppress(FileExistsError):
            os.mkdir(at, 0o700, dir_fd=folder)
    return target


def open_file(path: Path, flags: int) -> int:
    """Descriptor of a file (0600 if new); InputError if links lead to it, or it has other names."""
    with _entry(path) as (at, folder):
        descriptor = os.open(at, flags | _FILE, PRIVATE, dir_fd=folder)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            os.close(descriptor)
            raise refused("refusal.storage", "device", path=path, n=found.st_nlink)
        if folder is not None and not flags & os.O_EXCL:  # its name is durable
            os.fsync(folder)
    return descriptor


def replace_file(old: Path, new: Path) -> None:
    """Rename a file within its folder, durably, also in place of another."""
    with _entry(new) as (at, folder):
        source = str(old) if folder is None else old.name
        os.replace(source, at, src_dir_fd=folder, dst_dir_fd=folder)
        if folder is not None:
            os.fsync(folder)


def remove_file(path: Path) -> None:
    """Remove a file, if there is one."""
    with suppress(FileNotFoundError), _entry(path) as (at, folder):
        os.unlink(at, dir_fd=folder)
