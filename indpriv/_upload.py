"""Sending runs and audits from a disk to object storage."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from indpriv._files import writer_of
from indpriv._folders import named_by_person, refuse_links
from indpriv._storage import RemotePath, StorageError, bucket_to_write, location_on_disk
from indpriv.errors import InputError, PrivacyWarning

_JOURNAL = "journal.jsonl"
_LAST = ("audit.json", _JOURNAL)  # what makes the other files count, and refers to them by hashes


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
    named_by_person(source)
    there = target.files_below()
    names = [path.relative_to(source) for path in source.rglob("*")]
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    for name in sorted(names, key=lambda name: (name.name in _LAST, -len(name.parts), name)):
        refuse_links(path := source / name)
        if not path.is_file():
            continue
        own, sent = path.stat(), there.get(name.as_posix())
        is_there = sent and sent.size == own.st_size and sent.mtime_ns >= own.st_mtime_ns
        if name.name in _LAST or not is_there:
            (target / name.as_posix()).put(path)


def _check(source: Path, target: RemotePath) -> None:
    if not any((source / name).is_file() for name in _LAST):
        raise InputError(f"{source} is neither a run directory nor an audit directory; pass one")
    if (process := writer_of(source)) is not None:
        raise InputError(f"{source} is still being written, by process {process}; wait for it")
    for name in _LAST:
        here, there = _first_line(source / name), _first_line(target / name)
        if there and (not here or (name == _JOURNAL and here != there)):
            raise InputError(f"{target} holds another run or audit; choose another address")


def _first_line(path: Path) -> bytes:
    """The header of a journal, which no other run has; nothing where there is no file."""
    return path.read_bytes().partition(b"\n")[0] if path.is_file() else b""


@contextmanager
def uploaded(folder: Path, to: RemotePath | None, *, or_warn: bool = False) -> Iterator[None]:
    """Send what the block wrote to a folder, also after an error or Ctrl-C, as far as it got.

    Args:
        folder: on a disk, where it stays.
        to: None to send nothing; an audit that failed is not sent.
        or_warn: warn where the bucket cannot be written, as after an error; otherwise raise.
    """
    ended = False
    try:
        yield
        ended = True
    finally:
        try:
            if to is not None and (ended or (folder / _JOURNAL).is_file()):
                upload(folder, to, bucket_is_private=True)
        except (OSError, InputError) as error:
            remedy = (
                f"{error}. What was written is in {folder}; to send it, type in Python: "
                f'indpriv.upload("{folder}", "{to}", bucket_is_private=True)'
            )
            if ended and not or_warn:
                raise StorageError(remedy) from error
            warnings.warn(remedy, PrivacyWarning, stacklevel=1)
