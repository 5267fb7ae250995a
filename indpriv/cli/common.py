"""What several commands share: output, the progress bar, and checks of what a command got.

Where that is no run or folder that it needs, the message says what to type next.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.progress import Progress, TaskID

from indpriv._facts import refused, text
from indpriv._folders import is_remote
from indpriv._formatting import Console, clean
from indpriv._storage import location, location_on_disk
from indpriv._types import StageProgress
from indpriv.audit.audit_directory import REPORT, SUMMARY
from indpriv.cli.commands import EXPERIMENTS
from indpriv.errors import InputError
from indpriv.norm_log.run_files import HOLDOUT, IDS, JOURNAL, RUN_DIRECTORY, holds_log, why_no_run

_LEVELS = 3  # of folders that are searched for runs
_NAMED = 5  # runs or files that a message names
_ARCHIVES = {".zip": "zipfile", ".tar": "tarfile", ".tgz": "tarfile", ".gz": "tarfile"}


def say(text: str) -> None:
    """Print a text, in which nothing but line breaks is obeyed."""
    typer.echo(clean(text, kept="\n"))


def print_json(content: object) -> None:
    """Print a result as JSON and nothing else."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def show_result(
    as_json: bool, content: object, print_it: Callable[..., None], *of: Any, **values: Any
) -> None:
    """Print a result as JSON, or by a function of it and a console."""
    if as_json:
        print_json(content)
    else:
        print_it(*of, Console(highlight=False), **values)


def check_folder(option: str, folder: Path) -> None:
    """Raise InputError if the folder is in a bucket, or a file is in its way."""
    location_on_disk(folder, f"{option} names what is")


def check_device(device: str) -> None:
    """Raise InputError if PyTorch cannot compute on the device."""
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # depends on the PyTorch build
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise refused("refusal.commands", "device", device=device, reason=reason) from error


@contextmanager
def progress_bar() -> Iterator[StageProgress]:
    """A progress bar on standard error, one line per stage."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield show


def checked_run(path: Path | None, command: str, program: str = "indpriv") -> Path:
    """The path, if it is a run directory; InputError with what to type next if it is not.

    command, program: as they are typed before it.
    """
    command = f"{program} {command}"
    if path is None:
        raise InputError(f"{command} needs a run directory; {_type_one(command, Path())}")
    path = location(path)
    if holds_log(path):
        return path
    if is_remote(path):
        raise InputError(f"{path} holds no {JOURNAL}; {RUN_DIRECTORY}")
    if not path.exists():
        raise InputError(f"{path} does not exist; {_type_one(command, Path())}")
    raise InputError((_of_folder if path.is_dir() else _of_file)(path, command))


def _of_folder(path: Path, command: str) -> str:
    if (path / SUMMARY).is_file():
        said = {"path": path, "command": command, "report": path / REPORT}
        said |= {"show": typed("show", path), "one": _type_one(command, path, path.parent)}
        return text("sentence.no_run", "audit", **said)
    if _runs_in(path):
        return f"{path} holds no {JOURNAL}, but folders in it do; {_type_one(command, path)}"
    return f"{why_no_run(path)}. {_replayed(path)}"


def _of_file(path: Path, command: str) -> str:
    folder = path.parent
    if holds_log(folder):
        return f"{path} is one file of a run; type: {typed(command, folder, '')}"
    if (folder / SUMMARY).is_file():
        return _of_folder(folder, command)
    unpacked = path.with_name(path.name.split(".")[0])
    if unpacked.exists():
        unpacked = unpacked.with_name(f"{unpacked.name}-unpacked")
    if path.suffix in _ARCHIVES:
        unpack = shlex.join(["python", "-m", _ARCHIVES[path.suffix], "-e", str(path)])
        unpack, then = f"{unpack} {shlex.quote(str(unpacked))}", typed(command, unpacked, "")
        return text("sentence.no_run", "archive", path=path, unpack=unpack, then=then)
    if path.suffix == ".toml":
        then = typed(command, Path("runs", path.stem), "")
        train = typed("train", path, EXPERIMENTS)
        return text("sentence.no_run", "audit_file", path=path, train=train, then=then)
    return f"{path} is a file, and a run is a directory. {_replayed(folder)}"


def _replayed(folder: Path) -> str:
    return text("sentence.no_run", "checkpoints", then=typed("audit", folder))


def _type_one(command: str, *folders: Path) -> str:
    """The command for each run in the folders, or how to record a run where there is none."""
    found = list(dict.fromkeys(run for folder in folders for run in _runs_in(folder)))
    if not found:
        return text("sentence.no_run", "nowhere")
    return "type one of:" + "".join(f"\n  {typed(command, run, '')}" for run in found[:_NAMED])


def _runs_in(folder: Path) -> list[Path]:
    """Runs in a folder, the nearest first: neither logs of test examples nor ledgers."""
    return [
        path.parent
        for level in range(_LEVELS + 1)
        for path in sorted(folder.glob("/".join(["*"] * level + [IDS])))
        if holds_log(path.parent) and path.parent.name != HOLDOUT
    ]


def typed(command: str, path: Path, program: str = "indpriv") -> str:
    """The line to type for a command on a path."""
    return shlex.join([*program.split(), *command.split(), str(path)])
