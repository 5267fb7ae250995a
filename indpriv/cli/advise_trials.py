"""The runs that advice needs: one audit file on parts of its data, with the noise of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indpriv.cli.options import check_folder
from indpriv.cli.trials import Trial
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.training.config import AuditConfig
    from indpriv.training.datasets import Dataset

_EXTRAS = ("attacks", "leakage")  # tables that do not bear on epsilons
_BASELINE = "non_private_"  # of [training]


def subset_trials(
    config: AuditConfig,
    dataset: Dataset,
    shares: Sequence[float],
    seeds: int,
    output_dir: Path,
) -> list[Trial]:
    """Runs on each share of the data with each seed.

    Raises:
        InputError: an audit whose parts cannot be compared, or a share smaller than a batch.
    """
    from indpriv.training.datasets.rows import chosen_rows
    from indpriv.training.step_plan import steps_per_epoch

    if config.data.share is not None:
        raise InputError(f"{config.name} has [data] share already; leave it out for advice")
    whole = with_noise_of(config, dataset)
    trials = []
    for share in shares:
        for seed in range(seeds):
            part = {} if share == 1 else {"share": share, "share_seed": seed}
            trial = _trial(whole, part, f"share={share:g}_seed={seed}", seed, output_dir)
            rows = len(chosen_rows(dataset, trial.config.data).train)
            steps_per_epoch(trial.config.training, rows)  # refuses fewer rows than a batch
            trials.append(replace(trial, audited=False))
    return trials


def with_noise_of(config: AuditConfig, dataset: Dataset) -> AuditConfig:
    """The audit with the noise that it has on its own data, and nothing but DP-SGD.

    Raises:
        InputError: a run that advice knows nothing of.
    """
    from indpriv.training.config import AuditConfig
    from indpriv.training.datasets.rows import chosen_rows
    from indpriv.training.step_plan import with_noise

    config.check_central("indpriv advise")
    settings = config.training
    for name in ("allow_no_privacy", "filter_epsilon", "stop_at_epsilon"):
        if getattr(settings, name):
            raise InputError(
                f"{config.name} has [training] {name}, of which indpriv advise knows nothing; "
                "leave it out"
            )
    noise = with_noise(settings, len(chosen_rows(dataset, config.data).train))
    tables = replace(config, training=noise).to_dict()
    training = {k: v for k, v in tables["training"].items() if not k.startswith(_BASELINE)}
    kept = {name: table for name, table in tables.items() if name not in _EXTRAS}
    return AuditConfig.from_dict({**kept, "training": training})


def _trial(
    config: AuditConfig, data: Mapping[str, Any], name: str, seed: int, output_dir: Path
) -> Trial:
    """A run with further keys of [data]."""
    from indpriv.training.config import AuditConfig

    tables = config.to_dict()
    changed = AuditConfig.from_dict({**tables, "data": {**tables["data"], **data}})
    return Trial(changed, seed, output_dir / "runs" / name, output_dir / "audits" / name)


def checked_output(config: AuditConfig, output_dir: Path | None) -> Path:
    """Where the runs and the advice go."""
    folder = output_dir or Path("advice") / config.name
    check_folder("--output-dir", folder)
    return folder


def parse_shares(text: str) -> list[float]:
    """Numbers between commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"--subsets {text}: pass shares of the data, e.g. --subsets 0.25,0.5,1"
        ) from error
