"""What a run was made with: processor, number of threads, commit of the code.

It contains no names of machines or people, and no paths.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import torch

_CPUINFO = Path("/proc/cpuinfo")
_MOST_REFERENCES, _MOST_BYTES = 5, 1 << 26  # one after the other; of a file of git


def environment_of(device: torch.device) -> dict[str, Any]:
    """For run.json: the machine, and code_commit if the working folder is in a git repository."""
    commit = _code_commit()
    return {
        "machine": {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        },
        **({} if commit is None else {"code_commit": commit}),
    }


def processor() -> str:
    """Name of the processor, or at least its architecture."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _code_commit() -> str | None:
    """The commit of the repository around the working folder; None without one.

    Git is not called: it runs programs that the repository's settings name.
    """
    try:
        places = [Path.cwd() / ".git", *(above / ".git" for above in Path.cwd().parents)]
        commit = next((_head(git) for git in places if git.exists()), "")
    except (OSError, ValueError):
        return None
    return f"{commit}, perhaps with uncommitted changes" if commit else None


def _head(git: Path) -> str:
    """The commit that a .git names: a folder, or the file of a worktree; empty if it is none."""
    if git.is_file():
        git = git.parent / _start(git).removeprefix("gitdir:").strip()
    shared, found = git / (_start(git / "commondir") or "."), _start(git / "HEAD")
    for _ in range(_MOST_REFERENCES):
        if found.startswith("ref: refs/"):
            name = found.removeprefix("ref: ")
            packed = re.findall(rf"^(\w+) {re.escape(name)}$", _start(shared / "packed-refs"), re.M)
            found = _start(git / name) or _start(shared / name) or "".join(packed)
    return found if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", found) else ""


def _start(path: Path) -> str:
    """The text of a file, as far as it is read; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
