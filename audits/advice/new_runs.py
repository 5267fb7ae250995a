"""The runs that advice needs: one audit file on parts of its data, with the noise of the whole."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audits.trials import Trial
from indpriv.errors import InputError

if TYPE_CHECKING:
    from audits.training.config import AuditConfig
    from audits.training.datasets import Dataset
    from indpriv.analysis.recorded_run import AuditedRun
    from indpriv.audit.pipeline import MethodOptions
    from indpriv.epsilon_table import EpsilonTable

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
    from audits.training.datasets.rows import chosen_rows
    from audits.training.step_plan import steps_per_epoch

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
            trials.append(trial)
    return trials


def deletion_trials(
    config: AuditConfig,
    dataset: Dataset,
    without: Sequence[str],
    ids: Sequence[int],
    seeds: int,
    output_dir: Path,
) -> tuple[list[Trial], list[Trial]]:
    """Runs with, and runs without, some records, with each seed.

    Raises:
        InputError: an audit that leaves records out already, or nobody to delete or to keep.
    """
    from audits.training.datasets.rows import chosen_rows
    from audits.training.step_plan import steps_per_epoch

    if config.data.without is not None or config.data.without_ids is not None:
        raise InputError(f"{config.name} has [data] without already; leave it out for advice")
    whole = with_noise_of(config, dataset)
    part: dict[str, Any] = {}
    if without:
        part["without"] = list(without)
    if ids:
        part["without_ids"] = list(ids)
    code = zlib.crc32(repr(sorted(part.items())).encode("utf-8", "surrogatepass"))
    folders = "share=1_seed={}", f"without-{code:08x}_seed={{}}"
    before, after = (
        [_trial(whole, keys, folder.format(seed), seed, output_dir) for seed in range(seeds)]
        for keys, folder in (({}, folders[0]), (part, folders[1]))
    )
    rows = len(chosen_rows(dataset, after[0].config.data).train)
    steps_per_epoch(config.training, rows)  # refuses fewer rows than a batch
    return before, after


def with_noise_of(config: AuditConfig, dataset: Dataset) -> AuditConfig:
    """The audit with the noise that it has on its own data, and nothing but DP-SGD.

    Raises:
        InputError: a run that advice knows nothing of.
    """
    from audits.training.config import AuditConfig
    from audits.training.datasets.rows import chosen_rows
    from audits.training.step_plan import with_noise

    config.check_central("advice")
    settings = config.training
    for name in ("allow_no_privacy", "filter_epsilon", "stop_at_epsilon"):
        if getattr(settings, name):
            raise InputError(
                f"{config.name} has [training] {name}, of which advice knows nothing; leave it out"
            )
    if settings.max_grad_norm == "median":
        raise InputError(
            f'{config.name} has max_grad_norm = "median", and each part of the data would have a '
            "clipping norm of its own; give the number that the run on all data had"
        )
    noise = with_noise(settings, len(chosen_rows(dataset, config.data).train))
    tables = replace(config, training=noise).to_dict()
    training = {k: v for k, v in tables["training"].items() if not k.startswith(_BASELINE)}
    kept = {name: table for name, table in tables.items() if name not in _EXTRAS}
    return AuditConfig.from_dict({**kept, "training": training})


def planned_worst_case(
    config: AuditConfig, dataset: Dataset, delta: float | None
) -> Callable[[float], float]:
    """The worst case of an audit with its noise on its own data times a factor.

    delta: default that of the audit.
    """
    from audits.training.datasets.rows import chosen_rows
    from audits.training.step_plan import plan_of, worst_case_epsilon

    training = with_noise_of(config, dataset).training
    rows, delta = len(chosen_rows(dataset, config.data).train), delta or config.training.delta

    def epsilon(factor: float) -> float:
        plan = plan_of(training, math.ceil(factor * rows))
        return worst_case_epsilon(plan.noise_multiplier, plan.at(0).sample_rate, delta)

    return epsilon


def _trial(
    config: AuditConfig, data: Mapping[str, Any], name: str, seed: int, output_dir: Path
) -> Trial:
    """A run with further keys of [data]."""
    from audits.training.config import AuditConfig

    tables = config.to_dict()
    changed = AuditConfig.from_dict({**tables, "data": {**tables["data"], **data}})
    folders = output_dir / "runs" / name, output_dir / "audits" / name
    return Trial(changed, seed, *folders, audited=False)


def account_run(
    path: Path, method: MethodOptions, by: Sequence[str] = ()
) -> tuple[EpsilonTable, AuditedRun]:
    """The epsilons of a recorded run, and the run with them; by: columns to group by."""
    from indpriv.audit.pipeline import accounted, method_of_run, read_run

    _, log, recorded = read_run(path)
    return accounted(log, recorded, method_of_run(log, recorded, path, method)[0], by)
