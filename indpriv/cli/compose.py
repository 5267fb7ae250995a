"""The command compose: several runs on the same people, accounted together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from indpriv.cli.audit import Accountant, BetweenRecords, Conversion
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import Json, check_folder, print_json, progress_bar
from indpriv.errors import InputError

By = Annotated[
    str,
    typer.Option(
        help="What identifies someone in all runs: example_id, unit_id, or a metadata column that "
        "names the owner of each row."
    ),
]
TuningMean = Annotated[
    float | None,
    typer.Option(
        help="These runs were tried, and only the best one is published: the mean of the law from "
        "which their number was drawn. The worst case is then that of the best run.",
        show_default="all runs are published",
    ),
]


def compose(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    by: By = "example_id",
    delta: Annotated[
        float | None,
        typer.Option(help="Delta of the bound over all runs.", show_default="that of the runs"),
    ] = None,
    accountant: Accountant = "rdp",
    between_records: BetweenRecords = "last",
    conversion: Conversion = "canonne2020",
    tuning_mean: TuningMean = None,
    tuning_shape: Annotated[
        float,
        typer.Option(help="Shape of that law: 1 geometric, 0 logarithmic, inf Poisson."),
    ] = 1.0,
    same_run: Annotated[
        bool, typer.Option("--same-run", help="A run given twice stands for two runs like it.")
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="Write epsilon.parquet and composition.json there.", show_default="only print"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Account for several runs on the same people together, and for the price of tuning.

    Example: indpriv compose runs/pretraining runs/finetuning --by unit_id

    Someone who was in one run only keeps the epsilon of that run.
    """
    from indpriv.accountant import Tuning
    from indpriv.audit import compose_runs, write_composition
    from indpriv.report.screens.composition import print_composition

    if len(runs) < 2:
        raise InputError("indpriv compose needs two runs or more; for one, type: indpriv audit RUN")
    for run in runs:
        checked_run(run, "compose")
    if output_dir is not None:
        check_folder("--output-dir", output_dir)
    with progress_bar() as progress:
        found = compose_runs(
            runs,
            by=by,
            delta=delta,
            accountant=accountant,
            conversion=conversion,
            between_records=between_records.replace("-", "_"),
            tuning=None if tuning_mean is None else Tuning(tuning_mean, tuning_shape),
            same_run=same_run,
            progress=progress,
        )
    if output_dir is not None:
        write_composition(found, output_dir)
    if as_json:
        print_json(found.to_json())
    else:
        print_composition(found, Console(highlight=False))
