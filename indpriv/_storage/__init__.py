"""Run and audit directories on a disk or in object storage, behind one kind of path."""

from indpriv._storage.remote_lock import RemoteLock
from indpriv._storage.remote_path import RemotePath, is_remote, location, remove_tree, sizes_in
from indpriv._storage.verified import check_hash, read_verified

__all__ = [
    "RemoteLock",
    "RemotePath",
    "check_hash",
    "is_remote",
    "location",
    "read_verified",
    "remove_tree",
    "sizes_in",
]
