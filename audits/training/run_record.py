"""run.json of a reference run: public settings, and what a reader must take on trust."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import torch
from torch import nn

from audits.training.config import AuditConfig, TrainingConfig
from audits.training.datasets import Dataset
from audits.training.models import count_parameters, describe_model
from audits.training.private_setting import PrivateSetting
from audits.training.randomness import GENERATORS, SEEDED_LABEL
from indpriv._files import first_at, read_json, sha256, write_json
from indpriv._folders import remove_file
from indpriv.errors import InputError
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.run_files import RESUME, RUN_JSON, read_run_json, seal

ON_TRUST = {
    "random generator": f"noise and sampling come from {GENERATORS}",
    "duplicates": "each row is treated as a different person; near or exact duplicates were not "
    "looked for",
    "tuning": "choices made by looking at this data (settings, the final model among several) are "
    "not in the account",
    "preprocessing": "constants written in the code, not fitted on the data",
    "floating point": "noise is added in floating point; attacks on its rounding are not covered",
}


def _on_trust(config: AuditConfig, dataset: Dataset) -> dict[str, str]:
    """What a reader must take on trust of this run."""
    given = {}
    if config.model.pretrained is not None:
        given["pretraining"] = (
            "the first parameters are of a model trained on other data; no epsilon covers those "
            "data, and whether they hold examples of this run was not checked"
        )
    if config.training.max_grad_norm == "median":
        given["clipping norm"] = (
            "the private median of gradient norms is of first parameters that hold nothing of "
            "these data; other draws of it, such as those of runs that were thrown away, are not "
            "in the account"
        )
    if config.data.unit_column is not None:
        given["duplicates"] = (
            f"rows with the same {config.data.unit_column} belong to one person; whether a person "
            "has several was not checked"
        )
    return {**ON_TRUST, **given, **dataset.on_trust}


def noise_and_clipping(
    planned: StepSettings, settings: TrainingConfig
) -> dict[str, float | list[float]]:
    """What run.json says of noise and clipping: one number, or one for each step.

    What training chooses as it goes, and only the log knows, is left out.
    """
    columns = {}
    if settings.noise_scale == "max_grad_norm":
        columns["noise_multiplier"] = planned.noise_multiplier
    if settings.clipping != "quantile":
        columns["max_grad_norm"] = planned.max_grad_norm
    return {
        name: column.tolist() if np.ptp(column) else float(column[0])
        for name, column in columns.items()
    }


def with_drawn_norm(settings: TrainingConfig, run_dir: str | Path | None) -> TrainingConfig:
    """A training at the clipping norm that a run of it drew, in place of a private median.

    Raises:
        InputError: no run, or one that drew none.
    """
    if settings.max_grad_norm != "median":
        return settings
    drawn = None
    if run_dir is not None:
        drawn = first_at(read_run_json(Path(run_dir)), ("training", "max_grad_norm"))
    if not isinstance(drawn, float):
        raise InputError(
            'the audit has max_grad_norm = "median", which each run draws anew: reference models '
            "are trained at the one that their run drew; pass that run, or give a number"
        )
    return settings.with_clipping_norm(drawn)


def training_facts(config: AuditConfig, private: PrivateSetting) -> dict[str, Any]:
    """What run.json says of training with DP-SGD."""
    return {
        "sampler": "poisson",
        "sample_rate": private.loader.sample_rate,
        "steps_per_epoch": len(private.loader),
        "planned_steps": private.total_steps,
        **noise_and_clipping(private.planned, config.training),
        "clipping": "individual"
        if config.training.individual_clipping
        else config.training.clipping,
        "target_epsilon": config.training.target_epsilon,
        "delta": config.training.delta,
        "clipping_norm_epsilon": private.clipping_norm_epsilon,
        "secure_mode": False,
        "device": str(next(private.module.parameters()).device),
    }


def first_record(
    config: AuditConfig,
    dataset: Dataset,
    module: nn.Module,
    training: Mapping[str, Any],
    *,
    seeded: bool,
) -> dict[str, Any]:
    """What is known before the first step: the content of run.json while the run trains.

    training: its settings.
    """
    return {
        "name": config.name,
        "status": "running",
        "seeded": seeded,
        "label": SEEDED_LABEL if seeded else None,
        "config": config.to_dict(),
        "data": {
            "dataset": dataset.name,
            "n_train": len(dataset.train),
            "n_test": len(dataset.test),
            "class_names": list(dataset.class_names),
            "preprocessing": dataset.preprocessing,
            "source": dataset.source,
            "fingerprint": dataset.fingerprint(),
        },
        "model": {
            "architecture": config.model.architecture,
            "parameters": count_parameters(module),
            "layers": describe_model(module).splitlines(),
            "pretrained": None
            if config.model.pretrained is None
            else {
                "file": Path(config.model.pretrained).name,
                "sha256": sha256(Path(config.model.pretrained)),
            },
        },
        "training": dict(training),
        "released": "every checkpoint may be published under the worst-case epsilon; losses and "
        "norms may not",
        "on_trust": _on_trust(config, dataset),
        "versions": {
            "indpriv": _version(),
            "torch": torch.__version__,
            "opacus": opacus.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def guarantee_of(
    private: PrivateSetting, epsilon: float, *, lost: int, seeded: bool
) -> dict[str, Any]:
    """What run.json says of the guarantee of DP-SGD.

    epsilon includes `lost` steps of crashes, and what a private clipping norm cost. Only an audit
    can say of which neighbours it is: updates may tell n (see `Divisor` in analysis/guarantee.py).
    """
    void = SEEDED_LABEL if seeded else getattr(private.optimizer, "no_privacy", "")
    return {
        "epsilon": epsilon,
        "delta": private.settings.delta,
        "clipping_norm_epsilon": private.clipping_norm_epsilon,
        "lost_steps": lost,
        "claim": f"none ({void})" if void else "worst_case",
        "unit": "example",
        "sampler": "poisson",
        "accountant": "Opacus RDPAccountant",
    }


def record_to_resume(run_dir: Path, config: AuditConfig, state: str) -> dict[str, Any]:
    """run.json of a run of this audit that can go on.

    state: name of the file that it needs for that.

    Raises:
        InputError: no run, a finished one, one without that file, or one of other settings.
    """
    record = dict(read_run_json(run_dir))
    if not record:
        raise InputError(
            f"{run_dir} is no run of python -m audits train; there is nothing to resume"
        )
    if record.get("status") == "finished":
        raise InputError(f"{run_dir} is finished; there is nothing to resume")
    if not (run_dir / state).is_file():
        raise InputError(
            f"{run_dir} holds no {state}: it stopped before its first checkpoint, or another "
            "version of indpriv trained it; delete it and train it anew"
        )
    if (found := _difference(record.get("config"), config.to_dict())) is not None:
        key, before, now = found
        raise InputError(
            f"{run_dir} is the run of other settings than this audit's: {key} was {before!r} and "
            f"is {now!r} now; resume it with the audit file that it was begun with"
        )
    return record


def _difference(before: Any, now: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """The first key in which two tables of settings differ, with both values; None if none does."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return None if before == now else (key, before, now)
    names = dict.fromkeys([*before, *now])
    parts = (
        _difference(before.get(name), now.get(name), f"{key}.{name}".strip(".")) for name in names
    )
    return next((part for part in parts if part is not None), None)


def complete_record(
    run_dir: Path,
    guarantee: Mapping[str, Any],
    test_accuracy: float,
    steps: int,
    planned_steps: int,
    seconds: float,
    key: Any = None,
) -> None:
    """Add to run.json what is known once training has ended, perhaps before its last step.

    key: signs the log again, whose end holds the hash of run.json; see `seal`.
    """
    last = {
        "status": "interrupted" if steps < planned_steps else "running",
        "steps": steps,
        "guarantee": dict(guarantee),
        "test_accuracy": test_accuracy,
        "wall_seconds": round(seconds, 2),
    }
    write_json(run_dir / RUN_JSON, {**read_json(run_dir / RUN_JSON), **last})
    seal(run_dir, key)


def check_complete(run_dir: Path, done: int, planned: int, what: str) -> None:
    """Raise KeyboardInterrupt if a run was stopped before its last step or round."""
    if done < planned:
        raise KeyboardInterrupt(
            f"stopped after {done} of {planned} {what}; {run_dir} holds them, and can be verified "
            f"and audited{'; --resume goes on' if (run_dir / RESUME).is_file() else ''}"
        )


def finish_record(run_dir: Path, state: str, key: Any = None) -> None:
    """Say that nothing of the run is left to do; remove the file that it would be resumed with."""
    write_json(run_dir / RUN_JSON, {**read_json(run_dir / RUN_JSON), "status": "finished"})
    remove_file(run_dir / state)
    seal(run_dir, key)


def _version() -> str:
    try:
        return version("indpriv")
    except PackageNotFoundError:
        return "not installed"
