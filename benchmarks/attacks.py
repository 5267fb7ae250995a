"""Attacks with reference models: what they find with and without DP, and what they cost.

    python benchmarks/attacks.py                     digits, two minutes on one core
    python benchmarks/attacks.py audits/adult.toml   any audit file: a study of it, DP and not

Every model is attacked in turn with the others as references; intervals are over models.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from audits.training.config import AuditConfig
from audits.training.shadows import train_shadows
from indpriv.analysis.attacks.rates import ALL, exceeds, parts, rates_of
from indpriv.attack_signals import AttackSignals, open_signals
from indpriv.attacks import ATTACKS, Material
from indpriv.audit.attacks import attack_study

OVERFITTED = {
    "name": "digits-overfitted",
    "data": {"dataset": "digits"},
    "model": {"architecture": "mlp", "hidden": [64], "activation": "relu"},
    "training": {
        "epochs": 60,
        "batch_size": 64,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "max_grad_norm": 1.0,
        "delta": 1e-5,
        "target_epsilon": 8.0,
    },
    "recording": {"every": 1},
    "checkpoints": {"every": "epoch"},
}
MODELS = 16


def study(config: AuditConfig, *, without_dp: bool, models: int) -> None:
    """Train a study, attack every model and print the rates."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        train_shadows(
            config,
            Path(folder) / "s",
            models,
            without_dp=without_dp,
            labels=True,
            checkpoints=True,
            seed=0,
        )
        trained = time.process_time() - started
        started = time.process_time()
        rates = attack_study(open_signals(Path(folder) / "s"))
        attacked = time.process_time() - started
    print(
        f"\n{config.name}, {'without DP' if without_dp else 'DP'}: {models} models, "
        f"{trained / models:.1f} s of one core each, all attacks {attacked:.1f} s"
    )
    for attack in rates["attack"].unique():
        found = parts(rates, attack=attack)[ALL]
        auc = found["auc"]
        print(
            f"  {attack:52s} AUC {auc.value:.4f} [{auc.low:.4f}, {auc.high:.4f}]  TPR at 1 % "
            f"{100 * found['tpr_0.01'].value:.2f} %, at 0.1 % {100 * found['tpr_0.001'].value:.2f} %"
        )


def memory(n_examples: int = 1_000_000, n_models: int = 64) -> None:
    """Time and peak memory of all attacks on confidences and of their rates, signals included."""
    rng = np.random.default_rng(0)
    signal = np.empty((n_models, n_examples), np.float32)
    for row in signal:
        row[:] = rng.normal(size=n_examples)
    member = rng.random((n_models, n_examples), dtype=np.float32) < 0.5
    material = Material(confidence=AttackSignals(signal, member, np.arange(n_examples), audited=0))
    started = time.process_time()
    used = [attack for attack in ATTACKS.values() if attack.can_use(material)]
    for attack in used:
        scores = attack.scores(material)
        rates_of(scores, tests=len(used))
        exceeds(scores, (3.0, 1e-5), tests=len(used))
    print(
        f"{n_examples:,} examples x {n_models} models: {len(used)} attacks in "
        f"{time.process_time() - started:.1f} s, peak memory of the process "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB (limit 4)"
    )


if __name__ == "__main__":
    memory()
    if len(sys.argv) > 1:
        chosen = AuditConfig.from_toml(sys.argv[1])
    else:
        chosen = AuditConfig.from_dict(OVERFITTED)
    for plain in (True, False):
        quick = chosen if plain else replace(chosen, training=replace(chosen.training, epochs=30))
        study(chosen if len(sys.argv) > 1 else quick, without_dp=plain, models=MODELS)
