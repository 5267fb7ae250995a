"""The command compose: several runs on the same people, accounted together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from indpriv._shown import Console
from indpriv.cli.audit import Accountant, BetweenRecords, Conversion
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import Json, check_folder, print_json, progress_bar
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.accountant import Tuning

By = Annotated[
    str,
    typer.Option(
        help="What identifies someone in all runs: example_id, unit_id, or a metadata column that "
        "names the owner of each row."
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(help="Delta of the bound over all runs.", show_default="that of the runs"),
]
Participation = Annotated[
    str | None,
    typer.Option(
        help="Whether an attacker knows who took part in which step: secret, which needs "
        "Poisson sampling, or known, which needs none.",
        show_default="of each run that of its audit",
    ),
]
Neighbouring = Annotated[
    str | None,
    typer.Option(
        help="Neighbouring relation: add-remove, zero-out or replace-one.",
        show_default="that of the runs",
    ),
]
SameRun = Annotated[
    bool, typer.Option("--same-run", help="A run given twice stands for two runs like it.")
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        help="Write epsilon.parquet and composition.json there.", show_default="only print"
    ),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")]
TuningShape = Annotated[
    float | None,
    typer.Option(
        help="Shape of that law: 1 geometric, 0 logarithmic, inf Poisson.", show_default="1"
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
    runs: Runs,
    by: By = "example_id",
    delta: Delta = None,
    accountant: Accountant = "rdp",
    between_records: BetweenRecords = "last",
    conversion: Conversion = "canonne2020",
    participation: Participation = None,
    neighbouring: Neighbouring = None,
    tuning_mean: TuningMean = None,
    tuning_shape: TuningShape = None,
    same_run: SameRun = False,
    output_dir: OutputDir = None,
    as_json: Json = False,
) -> None:
    """Account for several runs on the same people together, and for the price of tuning.

    Example: indpriv compose runs/pretraining runs/finetuning --by unit_id

    Someone who was in one run only keeps the epsilon of that run.
    """
    from indpriv.audit import compose_runs, write_composition
    from indpriv.report.screens import print_composition

    if len(runs) < 2:
        raise InputError("indpriv compose needs two runs or more; for one, type: indpriv audit RUN")
    tuning = _tuning(tuning_mean, tuning_shape)
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
            participation=participation,
            neighbouring=None if neighbouring is None else neighbouring.replace("-", "_"),
            tuning=tuning,
            same_run=same_run,
            progress=progress,
        )
    if output_dir is not None:
        write_composition(found, output_dir)
    if as_json:
        print_json(found.to_json())
    else:
        print_composition(found, Console(highlight=False))


def _tuning(mean: float | None, shape: float | None) -> Tuning | None:
    from indpriv.accountant import Tuning

    if mean is None:
        if shape is not None:
            raise InputError(
                f"--tuning-shape {shape:g} without --tuning-mean: the law of the number of runs "
                "needs its mean too; pass --tuning-mean, or leave out --tuning-shape"
            )
        return None
    return Tuning(mean) if shape is None else Tuning(mean, shape)
