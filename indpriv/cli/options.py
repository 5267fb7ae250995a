"""What commands share: options, the progress bar, and checks of folders and devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from indpriv._progress import StageProgress
from indpriv.errors import InputError

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")]
By = Annotated[
    list[str] | None,
    typer.Option(
        "--by",
        help="Column to compare groups by, e.g. race, age:bins=10, or race,sex for combinations. May be given several times.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Repeatable sampling and noise. Such a run has no privacy, and is labelled so everywhere."
    ),
]


def check_folder(option: str, folder: Path) -> None:
    """InputError where a folder cannot be made because a file stands in its way."""
    for part in (folder, *folder.parents):
        if part.exists():
            if not part.is_dir():
                raise InputError(
                    f"{option} {folder}: {part} is a file, and a directory is needed; choose another path"
                )
            return


def check_device(device: str) -> None:
    """InputError where PyTorch cannot compute on the device."""
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (
        RuntimeError,
        AssertionError,
        ImportError,
    ) as error:  # which of them depends on how PyTorch was built
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"--device {device} cannot be used: {reason}; pass cpu, or a device that this build of PyTorch has"
        ) from error


@contextmanager
def progress_bar() -> Iterator[StageProgress]:
    """A progress bar on standard error, one line per stage."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks: dict[str, Any] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield tell
