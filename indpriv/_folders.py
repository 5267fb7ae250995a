"""Writing below a directory that a person named: what lies in it may be a stranger's.

The directory itself may be reached through links, as whoever names it wishes. Below it none is
followed: each folder is opened by its descriptor in the one above, and files in it by that
descriptor. Where the system cannot (Windows), a link that is there is refused, but one that is
planted in the same moment is not noticed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from indpriv._storage import is_remote
from indpriv.errors import InputError

PRIVATE = 0o600
_BINARY = getattr(os, "O_BINARY", 0)  # without it Windows changes line ends
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait
_JUNCTION = 0xA0000003  # how Windows marks links to folders that need no rights to make
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_BY_DESCRIPTOR = {os.open, os.mkdir, os.stat, os.unlink, os.rename} <= os.supports_dir_fd
_named: set[Path] = set()  # absolute paths of directories


def named_by_person(path: Path) -> None:
    """Say that a directory was named by a person: from now on no link below it is followed."""
    if not is_remote(path):
        _named.add(path.absolute())


def _split(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The outermost directory above a path that was named, or the path, and the names below it."""
    path = path.absolute()
    root = next((parent for parent in reversed(path.parents) if parent in _named), path)
    return root, path.relative_to(root).parts


def refuse_links(path: Path) -> None:
    """Raise InputError if a path leads through a link below a directory that a person named."""
    if is_remote(path):
        return
    folder, below = _split(path)
    for name in below:
        folder /= name
        with suppress(FileNotFoundError, NotADirectoryError):
            _refuse_link(folder, folder.lstat())


def _refuse_link(path: Path, found: os.stat_result) -> None:
    junction = getattr(found, "st_reparse_tag", 0) == _JUNCTION
    if stat.S_ISLNK(found.st_mode) or junction:
        raise InputError(
            f"{path} is a link, and links in a directory of a run or an audit are not followed: "
            "whoever gave you the directory could have put it there to have another of your files "
            "read or overwritten. Remove it, or put a copy of what it points to in its place"
        )


class Folder:
    """An open directory, see `opened`."""

    def __init__(self, root: Path) -> None:
        self.path = root
        self._descriptor = os.open(root, _FOLDER) if _BY_DESCRIPTOR else None

    def _at(self, name: str) -> str:
        return str(self.path / name) if self._descriptor is None else name

    @contextmanager
    def entry(self, name: str) -> Iterator[None]:
        """Refuse a link before the block uses a name; an OSError in it names the path."""
        try:
            self.check(name)
            yield
        except OSError as error:
            self.check(name)
            if os.sep not in str(error.filename):  # none, or a name in the folder alone
                error.filename, error.filename2 = str(self.path / name), None
            raise

    def check(self, name: str) -> None:
        """Raise InputError if a name in it is that of a link."""
        with suppress(FileNotFoundError):
            found = os.stat(self._at(name), dir_fd=self._descriptor, follow_symlinks=False)
            _refuse_link(self.path / name, found)

    def enter(self, name: str, *, make: bool) -> None:
        """Go on with a folder in it; make: it (0700), if it is missing."""
        with self.entry(name):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(self._at(name), 0o700, dir_fd=self._descriptor)
            if self._descriptor is not None:
                below = os.open(name, _FOLDER | _NO_LINK, dir_fd=self._descriptor)
                self.close()
                self._descriptor = below
        self.path /= name

    def open(self, name: str, flags: int) -> int:
        """Descriptor of a file in it (0600 if new); InputError if it is anything else."""
        with self.entry(name):
            every = flags | _NO_LINK | _BINARY
            descriptor = os.open(self._at(name), every, PRIVATE, dir_fd=self._descriptor)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            os.close(descriptor)
            raise InputError(
                f"{self.path / name} is not a file of its own (it has {found.st_nlink} names, or "
                "is a device): what is written to it would change something else; put a copy in "
                "its place"
            )
        return descriptor

    def replace(self, old: str, new: str) -> None:
        """Rename a file in it, in place of another."""
        with self.entry(new):
            at = self._descriptor
            os.replace(self._at(old), self._at(new), src_dir_fd=at, dst_dir_fd=at)

    def unlink(self, name: str) -> None:
        """Remove a file or link in it, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(self._at(name), dir_fd=self._descriptor)

    def sync(self) -> None:
        """Make renames in it durable (Windows has no way to ask for it)."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close it."""
        if self._descriptor is not None:
            os.close(self._descriptor)


@contextmanager
def opened(path: Path, *, make: bool = False) -> Iterator[Folder]:
    """A folder to write in; make: what is missing of it below the directory that was named.

    Raises:
        InputError: a link leads to it, below the directory that a person named.
        OSError: there is none, or it is not a folder.
    """
    root, below = _split(path)
    folder = Folder(root)
    try:
        for name in below:
            folder.enter(name, make=make)
        yield folder
    finally:
        folder.close()


def make_folder(path: Path, *inside: str) -> Path:
    """Make a directory that a person named (0700), unless it is there, and a folder inside it."""
    target = path.joinpath(*inside)
    if is_remote(path):
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        return target
    root, _ = _split(path)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    named_by_person(root)
    with opened(target, make=True):
        return target


def remove_file(path: Path) -> None:
    """Remove a file, or a link in its place, if there is one."""
    if is_remote(path):
        path.unlink(missing_ok=True)
    elif path.parent.is_dir():
        with opened(path.parent) as folder:
            folder.unlink(path.name)
