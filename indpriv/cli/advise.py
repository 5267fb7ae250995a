"""The command advise: what would lower the epsilons of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from indpriv.cli.audit import Accountant, Delta
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import By, Json, check_folder, print_json, progress_bar

NAME = "advice"  # of its files

Target = Annotated[
    float, typer.Option(help="Largest epsilon that the quantile of a group is to have, e.g. 1.0.")
]
Quantile = Annotated[
    float, typer.Option(help="Which quantile of a group's epsilons; 0.95 is the 95th percentile.")
]
OutputDir = Annotated[
    Path | None, typer.Option(help="Directory to write to.", show_default="RUN/advice")
]


def advise(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of a Recorder.")],
    target: Target,
    by: By = None,
    quantile: Quantile = 0.95,
    output_dir: OutputDir = None,
    delta: Delta = None,
    accountant: Accountant = "rdp",
    as_json: Json = False,
) -> None:
    """Say how much more noise, or how low a clipping norm, would bring each group to a target.

    Example: indpriv advise runs/adult --target 1.0 --by race

    What it says are predictions of a run to come, not guarantees.
    """
    from indpriv.audit.advice.of_run import advise_on_run
    from indpriv.report.renderers.page_files import write_page
    from indpriv.report.screens.advice import page_of, print_advice

    run_dir = checked_run(path, "advise")
    output_dir = output_dir or run_dir / NAME
    check_folder("--output-dir", output_dir)
    with progress_bar() as progress:
        found = advise_on_run(
            run_dir,
            target=target,
            by=by or [],
            quantile=quantile,
            delta=delta,
            accountant=accountant,
            progress=progress,
        )
    write_page(page_of(found), found.to_json(), output_dir, NAME)
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False)
    print_advice(found, console)
    console.print(f"\n[bold]{escape(str(output_dir / f'{NAME}.html'))}[/]", soft_wrap=True)
