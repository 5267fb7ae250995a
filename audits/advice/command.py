"""`python -m audits subsets` and `deletion`: advice from new runs on parts of the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from audits.options import AuditFile, By, DataDir, Device, Json, checked_audit_file, show
from audits.trials import Trial, make_trials
from indpriv.cli.commands import option
from indpriv.cli.common import check_device, check_folder, progress_bar
from indpriv.errors import InputError

if TYPE_CHECKING:
    from audits.training.config import AuditConfig
    from audits.training.datasets import Dataset

ADVICE, DELETION = "advice", "deletion"  # names of the files

Target = Annotated[float, option("target", "advise")]
Quantile = Annotated[
    float, typer.Option(help="Which quantile of a group's epsilons; 0.95 is the 95th percentile.")
]
Delta = Annotated[float | None, option("delta")]
Accountant = Annotated[
    str, typer.Option(help="Accountant: rdp, or pld, which is tighter and takes longer.")
]
OutputDir = Annotated[
    Path | None,
    typer.Option(help="Directory of runs and the page.", show_default="advice/NAME"),
]
Subsets = Annotated[str, typer.Option(help="Shares of the data to train on, each within the next.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of runs of each kind: seeds 0, 1, ...")]
Without = Annotated[
    list[str] | None,
    typer.Option(
        help="Delete the training records with this value, e.g. race=Black. Can be given several "
        "times."
    ),
]
WithoutIds = Annotated[
    Path | None,
    typer.Option(help="File with the ids of records to delete, one on each line."),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at the same time.", show_default="number of cores"),
]


def subsets(
    target: Target,
    audit_file: AuditFile = None,
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
    """Say how many more records would bring each group to a target epsilon.

    Example: python -m audits subsets audits/adult.toml --target 1.5 --by sex --quantile 0.5

    Trains on nested parts of the data, and also says what `indpriv advise` says of the noise and
    the clipping norm. What is said of a run to come is a prediction, not a guarantee.
    """
    from audits.advice.new_runs import planned_worst_case, subset_trials
    from audits.advice.records_page import records_page
    from audits.advice.subsets import SubsetRun, advise_over_subsets, check_subsets
    from indpriv.audit.accounts import check_question

    check_question(target, quantile)
    path = checked_audit_file(audit_file, "subsets")
    shares = check_subsets(_shares_in(subsets), seeds)
    new = _NewRuns(path, output_dir, jobs, data_dir, device)
    config, dataset, folder = new.prepare(by or ())
    trials = subset_trials(config, dataset, shares, seeds, folder)
    new.make(trials, folder)
    runs = [
        SubsetRun(trial.run_dir, trial.config.data.share or 1.0, trial.seed) for trial in trials
    ]
    with progress_bar() as progress:
        found = advise_over_subsets(
            runs,
            target=target,
            planned_worst_case=planned_worst_case(config, dataset, delta),
            by=by or (),
            quantile=quantile,
            progress=progress,
            delta=delta,
            accountant=accountant,
        )
    show(found, records_page(found), folder / ADVICE, as_json=as_json)


def deletion(
    audit_file: AuditFile = None,
    without: Without = None,
    without_ids: WithoutIds = None,
    by: By = None,
    quantile: Quantile = 0.95,
    output_dir: OutputDir = None,
    delta: Delta = None,
    accountant: Accountant = "rdp",
    seeds: Seeds = 2,
    jobs: Jobs = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Say whose epsilon rises if some records are deleted: trains with and without them.

    Example: python -m audits deletion audits/adult.toml --without race=Black --by race --by sex
    """
    from audits.advice.deletion import DeletionRun, compare_deletion
    from audits.advice.deletion_page import deletion_page
    from audits.advice.new_runs import deletion_trials
    from audits.training.datasets.rows import chosen_ids
    from indpriv.audit.accounts import check_question

    check_question(1.0, quantile)
    if not without and without_ids is None:
        raise InputError(
            "pass the records to delete: --without COLUMN=VALUE, e.g. --without race=Black, or "
            "--without-ids FILE"
        )
    path = checked_audit_file(audit_file, "deletion")
    ids = [] if without_ids is None else _ids_in(without_ids)
    new = _NewRuns(path, output_dir, jobs, data_dir, device)
    config, dataset, folder = new.prepare(by or ())
    sides = deletion_trials(config, dataset, without or (), ids, seeds, folder)
    new.make([trial for side in sides for trial in side], folder)
    before, after = (
        [DeletionRun(trial.run_dir, chosen_ids(dataset, trial.config.data)) for trial in side]
        for side in sides
    )
    with progress_bar() as progress:
        found = compare_deletion(
            before,
            after,
            name=config.name,
            deleted=", ".join(
                [*(without or ()), *([f"{len(ids):,} ids of {without_ids}"] if ids else [])]
            ),
            by=by or (),
            quantile=quantile,
            progress=progress,
            delta=delta,
            accountant=accountant,
        )
    show(found, deletion_page(found), folder / DELETION, as_json=as_json)


class _NewRuns(NamedTuple):
    """How runs of an audit file are made."""

    path: Path
    output_dir: Path | None
    jobs: int | None
    data_dir: Path | None
    device: str

    def prepare(self, by: Sequence[str]) -> tuple[AuditConfig, Dataset, Path]:
        """The audit, its data, and where everything goes."""
        from audits.advice.subsets import check_groups
        from audits.training.config import AuditConfig
        from audits.training.datasets import DATASETS, load_dataset

        config = AuditConfig.from_toml(self.path)
        check_groups(by, ("label", *DATASETS[config.data.dataset].metadata_columns))
        folder = self.output_dir or Path("advice") / config.name
        check_folder("--output-dir", folder)
        check_device(self.device)
        return config, load_dataset(config.data.dataset, self.data_dir), folder

    def make(self, trials: Sequence[Trial], folder: Path) -> None:
        """Train what is not trained yet."""
        make_trials(
            trials, folder, ADVICE, jobs=self.jobs, data_dir=self.data_dir, device=self.device
        )


def _ids_in(path: Path) -> list[int]:
    """Ids of examples, one on each line."""
    remedy = "pass a file with the id of one example on each line"
    try:
        found = [int(line) for line in path.read_text(encoding="utf-8").split()]
    except (ValueError, OSError) as error:
        raise InputError(f"--without-ids {path}: {error}; {remedy}") from error
    if not found:
        raise InputError(f"--without-ids {path} is empty; {remedy}")
    return found


def _shares_in(text: str) -> list[float]:
    """Numbers between commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"--subsets {text}: pass shares of the data, e.g. --subsets 0.25,0.5,1"
        ) from error
