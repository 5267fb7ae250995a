"""What a run was made with: processor, number of threads, commit of the code.

It contains no names of machines or people, and no paths.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

_CPUINFO = Path("/proc/cpuinfo")
_SECONDS = 5.0  # for git, which can be slow on large or remote folders


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
    """The commit, and whether tracked files have changed since; None without git or a commit."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return f"{commit}, perhaps with uncommitted changes"
    return f"{commit}, with uncommitted changes" if changes else commit


def _git(*arguments: str) -> str | None:
    """What git prints in the working folder; None if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
