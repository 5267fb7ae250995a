"""What several commands share: output, the progress bar, checks of folders and devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from indpriv._shown import Console, clean
from indpriv.errors import InputError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from indpriv._progress import StageProgress


def errors() -> Console:
    """Standard error, for warnings and for what a person should read while a command works."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a text, in which nothing but line breaks is obeyed."""
    typer.echo(clean(text, kept="\n"))


def print_json(content: object) -> None:
    """Print a result as JSON and nothing else."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def show_result(as_json: bool, content: object, print_it: Callable[..., None], *of: Any) -> None:
    """Print a result as JSON, or by a function of it and a console."""
    if as_json:
        print_json(content)
    else:
        print_it(*of, Console(highlight=False))


def check_folder(option: str, folder: Path) -> None:
    """Raise InputError if a file stands where the folder or one of its parents is needed."""
    from indpriv._storage import location_on_disk

    location_on_disk(folder, f"{option} names what is")
    existing = next((part for part in (folder, *folder.parents) if part.exists()), None)
    if existing is not None and not existing.is_dir():
        reason = f"{existing} is a file, and a directory is needed; choose another path"
        raise InputError(f"{option} {folder}: {reason}")


def check_device(device: str) -> None:
    """Raise InputError if PyTorch cannot compute on the device."""
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # depends on the PyTorch build
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"device {device} cannot be used: {reason}; pass cpu, or a device that this build of "
            "PyTorch supports"
        ) from error


@contextmanager
def progress_bar() -> Iterator[StageProgress]:
    """A progress bar on standard error, one line per stage."""
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield show
