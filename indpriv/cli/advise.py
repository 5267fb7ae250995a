"""The command advise: what would lower the epsilons of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from indpriv._shown import Console, escape
from indpriv.cli.audit import Accountant, Delta
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import By, Json, check_folder, print_json, progress_bar

NAME = "advice"  # of the files

Target = Annotated[
    float,
    typer.Option(help="Largest epsilon that the quantile of a group is to have, e.g. 1.0."),
]
Quantile = Annotated[
    float, typer.Option(help="Which quantile of a group's epsilons; 0.95 is the 95th percentile.")
]


def advise(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of a Recorder.")],
    target: Target,
    by: By = None,
    quantile: Quantile = 0.95,
    output_dir: Annotated[
        Path | None, typer.Option(help="Directory to write to.", show_default="RUN/advice")
    ] = None,
    delta: Delta = None,
    accountant: Accountant = "rdp",
    as_json: Json = False,
) -> None:
    """Say how much noise or which clipping norm would bring each group to a target epsilon.

    Example: indpriv advise runs/adult --target 1.0 --by race

    What is said of a run to come is a prediction, not a guarantee.
    """
    from indpriv.audit.advice import advise_on_run, check_question
    from indpriv.report.page import write_page
    from indpriv.report.screens import advice_page, print_whole

    check_question(target, quantile)
    run_dir = checked_run(run_dir, "advise")
    folder = output_dir or run_dir / NAME
    check_folder("--output-dir", folder)
    with progress_bar() as progress:
        found = advise_on_run(
            run_dir,
            target=target,
            by=by or (),
            quantile=quantile,
            progress=progress,
            delta=delta,
            accountant=accountant,
        )
    page = advice_page(found)
    write_page(page, folder, NAME, found.to_json())
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False)
    print_whole(page, console)
    console.print(f"\n[bold]{escape(str(folder / f'{NAME}.html'))}[/]", soft_wrap=True)
