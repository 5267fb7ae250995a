"""The process that trains: signals to it, and what run.json says of its machine and code.

run.json contains no names of machines or people, and no paths.
"""

import platform
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_CPUINFO = Path("/proc/cpuinfo")
_MOST_REFERENCES, _MOST_BYTES = 5, 1 << 26  # one after the other; of a file of git


def heard_signals() -> list[signal.Signals]:
    """SIGINT and SIGTERM unless they are ignored; none outside the main thread.

    Scripts start background jobs with SIGINT ignored, so that Ctrl-C in the terminal does not stop
    them; ignored signals stay ignored. Stop such a run with SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    both = signal.SIGINT, signal.SIGTERM
    return [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Deliver Ctrl-C and SIGTERM that arrive inside the block when it ends.

    They wait while the log is written: half a step would contradict itself.
    """
    arrived: list[int] = []
    previous = {
        number: signal.signal(number, lambda late, _: arrived.append(late))
        for number in heard_signals()
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


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
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name[^:\n]*:(.*)$", text, re.M)
    return (named and named[1].strip()) or platform.processor() or platform.machine()


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
