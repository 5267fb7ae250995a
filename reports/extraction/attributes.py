"""Attacks on attributes of Adult: an audited run with its baseline, and a model that overfits."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from audits.training.attributes import attribute_knowledge
from audits.training.baseline import fit_without_dp
from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.dp_sgd import train
from indpriv._plain import to_json
from indpriv.analysis.attacks.attributes import measure_attribute
from indpriv.analysis.summary import Audit
from indpriv.attacks.attributes import GUESSERS
from indpriv.audit import audit

AUDIT = Path(__file__).parent / "adult.toml"
CONTROL_ROWS, CONTROL_EPOCHS, CONTROL_BATCH = 1000, 200, 50
_CONTROL = ("sex", "race", "marital_status", "occupation")
_SEED = 1


def audited_run(folder: Path, tell: Callable[[str], None]) -> Audit:
    """Train on Adult where the folder holds no finished run, and audit it."""
    run_dir, output = folder / "adult", folder / "adult-audit"
    if not (run_dir / "attributes-non-dp.parquet").is_file():
        shutil.rmtree(run_dir, ignore_errors=True)
        tell("training on Adult")
        train(AuditConfig.from_toml(AUDIT), run_dir, seed=_SEED)
    return audit(run_dir, output)


def control(tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The attacks on a model that memorises a small part of Adult, trained without DP."""
    tell("training the positive control")
    config, adult = AuditConfig.from_toml(AUDIT), load_dataset("adult")
    kept = np.arange(len(adult.train)) < CONTROL_ROWS
    small = replace(adult, train=adult.train.take(kept))
    training = replace(config.training, epochs=CONTROL_EPOCHS, batch_size=CONTROL_BATCH)
    module = fit_without_dp(replace(config, training=training), small, seed=_SEED)
    return [
        row
        for known in attribute_knowledge(module, small, _CONTROL)
        for guesser in GUESSERS
        for row in to_json(measure_attribute(known, guesser, model="non_dp", groups={}))
    ]
