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

    Files of the repository are read, and git is not called: its settings can name programs, which
    it then runs, and whether files changed since the commit is seen in no other way.
    """
    try:
        here = Path.cwd()
        found = next((git for at in (here, *here.parents) if (git := at / ".git").exists()), None)
        commit = None if found is None else _head(found)
    except (OSError, ValueError):
        return None
    return None if commit is None else f"{commit}, perhaps with uncommitted changes"


def _head(git: Path) -> str | None:
    """The commit that a .git names: a folder, or the file of a worktree that says where one is."""
    if git.is_file():
        git = git.parent / _start(git).removeprefix("gitdir:").strip()
    shared = git / (_start(git / "commondir").strip() or ".")
    found = _start(git / "HEAD").strip()
    for _ in range(_MOST_REFERENCES):
        if not found.startswith("ref: refs/"):
            break
        name = found.removeprefix("ref: ")
        packed = re.search(rf"^(\w+) {re.escape(name)}$", _start(shared / "packed-refs"), re.M)
        loose = (_start(folder / name).strip() for folder in (git, shared))
        found = next(filter(None, loose), packed[1] if packed else "")
    return found if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", found) else None


def _start(path: Path) -> str:
    """The text of a file, as far as it is read; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_MOST_BYTES).decode("utf-8", "replace")
