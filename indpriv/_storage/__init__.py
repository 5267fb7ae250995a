"""Run and audit directories on a disk or in object storage, behind one kind of path."""

from indpriv._storage.remote_lock import RemoteLock
from indpriv._storage.remote_path import (
    RemotePath,
    StorageError,
    is_remote,
    location,
    location_on_disk,
    location_to_write,
    remove_tree,
    sizes_in,
)
from indpriv._storage.verified import check_hash, read_verified

__all__ = [
    "RemoteLock",
    "RemotePath",
    "StorageError",
    "check_hash",
    "is_remote",
    "location",
    "location_on_disk",
    "location_to_write",
    "read_verified",
    "remove_tree",
    "sizes_in",
]
