"""What run.json says of a reference run: public settings, and what a reader must take on trust."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import opacus
import torch
from torch import nn

from indpriv.training.config import AuditConfig
from indpriv.training.datasets import Dataset
from indpriv.training.models import count_parameters, describe_model
from indpriv.training.randomness import GENERATORS, SEEDED_LABEL

ON_TRUST = {
    "random generator": f"noise and sampling come from {GENERATORS}",
    "duplicates": "each row is taken for a person of its own; near or exact duplicates were not looked for",
    "tuning": "choices made by looking at this data (settings, the final model among several) are not in the account",
    "preprocessing": "constants written in the code, not fitted on the data",
    "floating point": "noise is added in floating point; attacks on its rounding are not covered",
}


def _on_trust(config: AuditConfig, dataset: Dataset) -> dict[str, str]:
    """What a reader must take on trust of this run."""
    units = {}
    if config.data.unit_column is not None:
        units["duplicates"] = (
            f"rows with one {config.data.unit_column} are one person's; whether a person has several was not looked for"
        )
    return {**ON_TRUST, **units, **dataset.on_trust}


def first_record(
    config: AuditConfig,
    dataset: Dataset,
    module: nn.Module,
    *,
    seeded: bool,
    noise_multiplier: float,
    sample_rate: float,
    steps_per_epoch: int,
) -> dict[str, Any]:
    """What is known of a run before its first step; stands in run.json while it trains."""
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
        },
        "training": {
            "sampler": "poisson",
            "sample_rate": sample_rate,
            "steps_per_epoch": steps_per_epoch,
            "planned_steps": config.training.epochs * steps_per_epoch,
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": config.training.max_grad_norm,
            "clipping": "individual" if config.training.individual_clipping else "flat",
            "target_epsilon": config.training.target_epsilon,
            "delta": config.training.delta,
            "secure_mode": False,
            "device": str(next(module.parameters()).device),
        },
        "released": "every checkpoint may be published under the worst-case epsilon; losses and norms may not",
        "on_trust": _on_trust(config, dataset),
        "versions": {
            "indpriv": _version(),
            "torch": torch.__version__,
            "opacus": opacus.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def last_record(
    *,
    status: str,
    steps: int,
    worst_case_epsilon: float,
    delta: float,
    seeded: bool,
    test_accuracy: float,
    wall_seconds: float,
) -> dict[str, Any]:
    """What is known once it has ended ("finished" or "interrupted"); joins the first record."""
    guarantee = {
        "epsilon": worst_case_epsilon,
        "delta": delta,
        "claim": f"none ({SEEDED_LABEL})" if seeded else "worst_case",
        "unit": "example",
        "neighbouring": "add_remove",
        "sampler": "poisson",
        "accountant": "Opacus RDPAccountant",
    }
    return {
        "status": status,
        "steps": steps,
        "guarantee": guarantee,
        "test_accuracy": test_accuracy,
        "wall_seconds": round(wall_seconds, 2),
    }


def _version() -> str:
    try:
        return version("indpriv")
    except PackageNotFoundError:
        return "not installed"
