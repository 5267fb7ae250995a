"""The command advise: what would lower the epsilons of a group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from indpriv.cli.advise_trials import checked_output, parse_shares, subset_trials
from indpriv.cli.audit import Accountant, Delta
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import (
    By,
    DataDir,
    Device,
    Json,
    check_device,
    check_folder,
    print_json,
    progress_bar,
)
from indpriv.cli.trials import make_trials

if TYPE_CHECKING:
    from indpriv.analysis.advice.findings import Advice

NAME = "advice"  # of its files
_NEW_RUNS = "With an audit file"  # heading in --help

Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|AUDIT.toml",
        help="Run directory of a Recorder; or an audit file, to train on parts of its data.",
    ),
]
Target = Annotated[
    float, typer.Option(help="Largest epsilon that the quantile of a group is to have, e.g. 1.0.")
]
Quantile = Annotated[
    float, typer.Option(help="Which quantile of a group's epsilons; 0.95 is the 95th percentile.")
]
OutputDir = Annotated[
    Path | None,
    typer.Option(help="Directory to write to.", show_default="RUN/advice or advice/NAME"),
]
Subsets = Annotated[
    str,
    typer.Option(
        help="Shares of the data to train on, each within the next.", rich_help_panel=_NEW_RUNS
    ),
]
Seeds = Annotated[
    int,
    typer.Option(
        min=1, help="Number of runs on each share: seeds 0, 1, ...", rich_help_panel=_NEW_RUNS
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs at the same time.",
        show_default="number of cores",
        rich_help_panel=_NEW_RUNS,
    ),
]


class _Question(NamedTuple):
    """What is asked of every run."""

    target: float
    by: tuple[str, ...]
    quantile: float
    delta: float | None
    accountant: str

    def options(self) -> Any:
        """As arguments of `advise_on_run` and `advise_over_subsets`."""
        return self._asdict()


def advise(
    path: Source,
    target: Target,
    by: By = None,
    quantile: Quantile = 0.95,
    output_dir: OutputDir = None,
    delta: Delta = None,
    accountant: Accountant = "rdp",
    subsets: Subsets = "0.25,0.5,1",
    seeds: Seeds = 2,
    jobs: Jobs = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Say how much noise, clipping norm or data would bring each group to a target epsilon.

    Example: indpriv advise runs/adult --target 1.0 --by race

    Records are advised on with an audit file, from runs on nested parts of its data. What it says
    are predictions of a run to come, not guarantees.
    """
    from indpriv.audit.advice.of_run import advise_on_run, check_question
    from indpriv.report.renderers.page_files import write_page
    from indpriv.report.screens.advice import page_of, print_advice

    check_question(target, quantile)
    question = _Question(target, tuple(by or ()), quantile, delta, accountant)
    if path.suffix == ".toml" and path.is_file():
        found, output_dir = _over_subsets(
            path, question, output_dir, subsets, seeds, jobs, data_dir, device
        )
    else:
        run_dir = checked_run(path, "advise")
        output_dir = output_dir or run_dir / NAME
        check_folder("--output-dir", output_dir)
        with progress_bar() as progress:
            found = advise_on_run(run_dir, progress=progress, **question.options())
    write_page(page_of(found), found.to_json(), output_dir, NAME)
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False)
    print_advice(found, console)
    console.print(f"\n[bold]{escape(str(output_dir / f'{NAME}.html'))}[/]", soft_wrap=True)


def _over_subsets(
    path: Path,
    question: _Question,
    output_dir: Path | None,
    subsets: str,
    seeds: int,
    jobs: int | None,
    data_dir: Path | None,
    device: str,
) -> tuple[Advice, Path]:
    """Train on parts of the data; the advice, and where it goes."""
    from indpriv.audit.advice.over_subsets import (
        SubsetRun,
        advise_over_subsets,
        check_groups,
        check_subsets,
    )
    from indpriv.training.config import AuditConfig
    from indpriv.training.datasets import DATASETS, load_dataset

    config = AuditConfig.from_toml(path)
    folder = checked_output(config, output_dir)
    shares = check_subsets(parse_shares(subsets), seeds)
    check_groups(question.by, ("label", *DATASETS[config.data.dataset].metadata_columns))
    check_device(device)
    dataset = load_dataset(config.data.dataset, data_dir)
    trials = subset_trials(config, dataset, shares, seeds, folder)
    make_trials(trials, folder, "advise", jobs=jobs, data_dir=data_dir, device=device)
    runs = [
        SubsetRun(trial.run_dir, trial.config.data.share or 1.0, trial.seed) for trial in trials
    ]
    with progress_bar() as progress:
        return advise_over_subsets(runs, progress=progress, **question.options()), folder
