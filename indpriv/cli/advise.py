"""The command advise: what would lower the epsilons of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from indpriv.cli.advise_trials import (
    deletion_trials,
    ids_in,
    parse_shares,
    planned_worst_case,
    subset_trials,
)
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
from indpriv.cli.trials import Trial, make_trials
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.analysis.advice.deletion import Deletion
    from indpriv.analysis.advice.findings import Advice
    from indpriv.report.document import Page
    from indpriv.training.config import AuditConfig
    from indpriv.training.datasets import Dataset

Found = TypeVar("Found", "Advice", "Deletion")

NAME, DELETION = "advice", "deletion"  # of the files
_NEW_RUNS = "With an audit file"  # heading in --help

Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|AUDIT.toml",
        help="Run directory of a Recorder; or an audit file, to train on parts of its data.",
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        help="Largest epsilon that the quantile of a group is to have, e.g. 1.0. Needed unless "
        "records are deleted."
    ),
]
Quantile = Annotated[
    float, typer.Option(help="Which quantile of a group's epsilons; 0.95 is the 95th percentile.")
]
OutputDir = Annotated[
    Path | None,
    typer.Option(help="Directory to write to.", show_default="RUN/advice or advice/NAME"),
]
Subsets = Annotated[
    str | None,
    typer.Option(
        help="Shares of the data to train on, each within the next.",
        show_default="0.25,0.5,1",
        rich_help_panel=_NEW_RUNS,
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of runs of each kind: seeds 0, 1, ...",
        show_default="2",
        rich_help_panel=_NEW_RUNS,
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        help="Delete the training records with this value, e.g. race=Black, and say whose epsilon "
        "rises. Can be given several times.",
        rich_help_panel=_NEW_RUNS,
    ),
]
WithoutIds = Annotated[
    Path | None,
    typer.Option(
        help="File with the ids of records to delete, one on each line.",
        rich_help_panel=_NEW_RUNS,
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


def advise(
    path: Source,
    target: Target = None,
    by: By = None,
    quantile: Quantile = 0.95,
    output_dir: OutputDir = None,
    delta: Delta = None,
    accountant: Accountant = "rdp",
    subsets: Subsets = None,
    seeds: Seeds = None,
    without: Without = None,
    without_ids: WithoutIds = None,
    jobs: Jobs = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Say how much noise, clipping norm or data would bring each group to a target epsilon.

    Example: indpriv advise runs/adult --target 1.0 --by race

    An audit file in place of the run trains on nested parts of its data, to advise on records too;
    or, with a value as in race=Black to leave out, it says whose epsilon rises if these records are
    deleted. What is said of a run to come is a prediction, not a guarantee.
    """
    from indpriv.audit.advice.of_run import check_question

    question = _Question(target, by or [], quantile, delta, accountant)
    check_question(1.0 if target is None else target, quantile)
    deletes = bool(without) or without_ids is not None
    if deletes == (target is not None):
        raise InputError(
            "pass --target, the epsilon to reach, e.g. --target 1.0; or else --without or "
            "--without-ids, the records to delete"
        )
    trains = path.suffix == ".toml" and path.is_file()
    for option, given, takes in (
        ("--subsets", subsets, trains and not deletes),
        ("--seeds", seeds, trains),
        ("--jobs", jobs, trains),
        ("--without", without or without_ids, trains),
    ):
        if given is not None and not takes:
            why = "deletes records" if trains else f"trains nothing: {path} is no audit file"
            raise InputError(f"{option} has no part in advice that {why}; leave it out")
    if not trains:
        found, folder = _on_run(question, path, output_dir)
    else:
        new = _NewRuns(path, output_dir, seeds or 2, jobs, data_dir, device)
        if deletes:
            _show_deletion(*_delete(question, new, without or [], without_ids), as_json=as_json)
            return
        found, folder = _over_subsets(question, new, subsets or "0.25,0.5,1")
    _show_advice(found, folder, as_json=as_json)


class _Question(NamedTuple):
    """What is asked of every run."""

    target: float | None
    by: Sequence[str]
    quantile: float
    delta: float | None
    accountant: str

    def options(self) -> Any:
        """As arguments of `advise_on_run` and its like; without a target if there is none."""
        return {name: value for name, value in self._asdict().items() if name != "target" or value}


class _NewRuns(NamedTuple):
    """How runs of an audit file are made."""

    path: Path
    output_dir: Path | None
    seeds: int
    jobs: int | None
    data_dir: Path | None
    device: str

    def prepare(self, by: Sequence[str]) -> tuple[AuditConfig, Dataset, Path]:
        """The audit, its data, and where everything goes."""
        from indpriv.audit.advice.over_subsets import check_groups
        from indpriv.training.config import AuditConfig
        from indpriv.training.datasets import DATASETS, load_dataset

        config = AuditConfig.from_toml(self.path)
        check_groups(by, ("label", *DATASETS[config.data.dataset].metadata_columns))
        folder = self.output_dir or Path("advice") / config.name
        check_folder("--output-dir", folder)
        check_device(self.device)
        return config, load_dataset(config.data.dataset, self.data_dir), folder

    def make(self, trials: Sequence[Trial], folder: Path) -> None:
        """Train what is not trained yet."""
        make_trials(
            trials, folder, "advise", jobs=self.jobs, data_dir=self.data_dir, device=self.device
        )


def _on_run(question: _Question, path: Path, output_dir: Path | None) -> tuple[Advice, Path]:
    """Account a run anew; the advice, and where it goes."""
    from indpriv.audit.advice.of_run import advise_on_run

    run_dir = checked_run(path, "advise")
    folder = output_dir or run_dir / NAME
    check_folder("--output-dir", folder)
    with progress_bar() as progress:
        return advise_on_run(run_dir, progress=progress, **question.options()), folder


def _over_subsets(question: _Question, new: _NewRuns, subsets: str) -> tuple[Advice, Path]:
    """Train on parts of the data; the advice, and where it goes."""
    from indpriv.audit.advice.over_subsets import SubsetRun, advise_over_subsets, check_subsets

    shares = check_subsets(parse_shares(subsets), new.seeds)
    config, dataset, folder = new.prepare(question.by)
    trials = subset_trials(config, dataset, shares, new.seeds, folder)
    new.make(trials, folder)
    runs = [
        SubsetRun(trial.run_dir, trial.config.data.share or 1.0, trial.seed) for trial in trials
    ]
    with progress_bar() as progress:
        found = advise_over_subsets(
            runs,
            progress=progress,
            planned_worst_case=planned_worst_case(config, dataset, question.delta),
            **question.options(),
        )
    return found, folder


def _delete(
    question: _Question, new: _NewRuns, without: Sequence[str], without_ids: Path | None
) -> tuple[Deletion, Path]:
    """Train with and without some records; the comparison, and where it goes."""
    from indpriv.audit.advice.after_deletion import DeletionRun, compare_deletion
    from indpriv.training.datasets.rows import chosen_ids

    ids = [] if without_ids is None else ids_in(without_ids)
    config, dataset, folder = new.prepare(question.by)
    sides = deletion_trials(config, dataset, without, ids, new.seeds, folder)
    new.make([trial for side in sides for trial in side], folder)
    before, after = (
        [DeletionRun(trial.run_dir, chosen_ids(dataset, trial.config.data)) for trial in side]
        for side in sides
    )
    deleted = ", ".join([*without, *([f"{len(ids):,} ids of {without_ids}"] if ids else [])])
    with progress_bar() as progress:
        found = compare_deletion(
            before,
            after,
            name=config.name,
            deleted=deleted,
            progress=progress,
            **question.options(),
        )
    return found, folder


def _show_advice(found: Advice, folder: Path, *, as_json: bool) -> None:
    from indpriv.report.screens.advice import page_of, print_advice

    _show(found, page_of(found), print_advice, folder / NAME, as_json=as_json)


def _show_deletion(found: Deletion, folder: Path, *, as_json: bool) -> None:
    from indpriv.report.screens.deletion import deletion_page, print_deletion

    _show(found, deletion_page(found), print_deletion, folder / DELETION, as_json=as_json)


def _show(
    found: Found, page: Page, print_it: Callable[[Found, Console], None], to: Path, *, as_json: bool
) -> None:
    """Write a page and its JSON to TO.html, TO.md and TO.json, and print one of them."""
    from indpriv.report.renderers.page_files import write_page

    write_page(page, found.to_json(), to.parent, to.name)
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False)
    print_it(found, console)
    console.print(f"\n[bold]{escape(f'{to}.html')}[/]", soft_wrap=True)
