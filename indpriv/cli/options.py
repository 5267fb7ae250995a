"""What several commands share: options, output, the progress bar, checks of folders and devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from indpriv._shown import Console, clean
from indpriv._storage import is_remote, location, location_on_disk
from indpriv.errors import InputError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from indpriv._progress import StageProgress


def of_replay(text: str) -> Any:
    """An option for a folder of checkpoints."""
    return typer.Option(help=text, rich_help_panel="For a folder of checkpoints")


StepOf = Annotated[
    list[str] | None,
    of_replay(
        "Number of updates, where neither a file nor the word step in its name tells it: "
        '"model_{epoch}.pt=20*epoch" or "a.pt=0,b.pt=20". Can be given several times.'
    ),
]
Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="Run directory of a Recorder, or a folder of checkpoints with --spec."
    ),
]
AuditDir = Annotated[
    Path, typer.Argument(metavar="AUDIT_DIR", help="Audit directory: holds audit.json.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
By = Annotated[
    list[str] | None,
    typer.Option(
        "--by",
        help="Column to compare groups by, e.g. race; age:bins=10 for ranges; race,sex for "
        "combinations; correct or loss:bins=10 for the final model's results. Can be given several "
        "times.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Make sampling and noise reproducible. Such a run has no privacy and is labelled so."
    ),
]
SignedBy = Annotated[
    Path | None,
    typer.Option(
        help="Require the log to be signed by a key in this file: OpenSSH's .pub, allowed_signers "
        "or authorized_keys."
    ),
]
Signals = Annotated[
    Path | None,
    typer.Option(
        help="Signals of reference models for this run, from indpriv.attacks.train_references."
    ),
]
BaselineSignals = Annotated[
    Path | None,
    typer.Option(help="The same for the non-private baseline."),
]

Engine = Annotated[
    str,
    typer.Option(help="Where epsilons are computed: local, or ray, a cluster that reads RUN too."),
]
BucketIsPrivate = Annotated[
    bool,
    typer.Option(
        "--bucket-is-private",
        help="Only those who may see norms can read the bucket that is written to.",
    ),
]


def say(text: str) -> None:
    """Print a text, in which nothing but line breaks is obeyed."""
    typer.echo(clean(text, kept="\n"))


def print_json(content: object) -> None:
    """Print a result as JSON and nothing else."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def check_folder(option: str, folder: Path, *, or_address: bool = False) -> None:
    """Raise InputError if a file stands where the folder or one of its parents is needed.

    or_address: it may lie in object storage.
    """
    if or_address and is_remote(location(folder)):
        return
    location_on_disk(folder, f"{option} names what is")
    existing = next((part for part in (folder, *folder.parents) if part.exists()), None)
    if existing is not None and not existing.is_dir():
        raise InputError(
            f"{option} {folder}: {existing} is a file, and a directory is needed; choose another "
            "path"
        )


def check_device(device: str) -> None:
    """Raise InputError if PyTorch cannot compute on the device."""
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # depends on the PyTorch build
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"--device {device} cannot be used: {reason}; pass cpu, or a device that this build of "
            "PyTorch supports"
        ) from error


@contextmanager
def progress_bar() -> Iterator[StageProgress]:
    """A progress bar on standard error, one line per stage."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield show
