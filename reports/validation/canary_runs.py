"""Gradient canaries in real Opacus runs on Adult, and in simulations of them."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

from audits.training.datasets import load_dataset
from audits.training.models import mlp
from audits.training.tensors import tensor_set, whole_batch
from indpriv.analysis.attacks.canaries import measure_gradient_canaries, simulated_evidence
from indpriv.attack_scores import AttackScores
from indpriv.audit.attacks import canaries_of_run
from indpriv.norm_log.fields import StepSettings
from indpriv.recording import GradientCanaries, Recorder

CANARIES, DRAWS = 5000, 20
NOISE, EPOCHS, STEPS_PER_EPOCH = 1.3998, 20, 34  # epsilon 3.00 by RDP, 2.73 by PLD, at 1e-5


def real_run(mode: str, seed: int) -> dict[str, Any]:
    """One run on Adult with canaries of full length: what they prove, and the model's accuracy."""
    data = load_dataset("adult")
    train_set = tensor_set(data.train)
    torch.manual_seed(seed)
    model = mlp(data.train.inputs.shape[1], (64,), 2, "tanh")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    criterion: Any = nn.CrossEntropyLoss()
    loader = DataLoader(
        train_set, batch_size=-(-len(train_set) // STEPS_PER_EPOCH), collate_fn=whole_batch
    )
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=NOISE,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
            **({"criterion": criterion} if mode == "ghost" else {}),
        )
        if mode == "ghost":
            private, optimizer, criterion, loader = made
        else:
            private, optimizer, loader = made
        recorder = Recorder(
            Path(scratch) / "run",
            dataset=train_set,
            loss_fn=nn.CrossEntropyLoss(reduction="none"),
            every="once",
            seeded=True,
            attack=GradientCanaries(CANARIES, seed=seed),
        )
        with recorder.attach(private, optimizer, loader):
            for _ in range(EPOCHS):
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    criterion(private(inputs), labels).backward()
                    optimizer.step()
        (found,) = canaries_of_run(Path(scratch) / "run")
    with torch.no_grad():
        right = model(torch.from_numpy(data.test.inputs)).argmax(1).numpy() == data.test.targets
    return {
        "mode": mode,
        "bounds": {key: bound.epsilon for key, bound in found.bounds.items()},
        "false_alarms": {key: bound.false_alarm_rate for key, bound in found.bounds.items()},
        "separation": [
            found.separation_interval.low,
            found.separation_predicted,
            found.separation_interval.high,
        ],
        "p_value": found.p_value,
        "ceiling": found.ceiling,
        "test_accuracy": float(right.mean()),
    }


def simulated_runs(length: float, count: int) -> dict[str, Any]:
    """What canaries of one length prove in simulations of the same run."""
    settings = StepSettings.from_values(EPOCHS * STEPS_PER_EPOCH, NOISE, 1.0, 1 / STEPS_PER_EPOCH)
    found = []
    for draw in range(DRAWS):
        rng = np.random.default_rng([18, draw, count, round(1000 * length)])
        member = rng.random(count) < 0.5
        scores = AttackScores(
            scores=simulated_evidence(settings, length, member, rng),
            member=member,
            method="simulated",
            groups=np.full(count, f"{length:g}", dtype=object),
            fair_coins=True,
            adversary="updates",
        )
        found.extend(measure_gradient_canaries(scores, settings, seed=draw).lengths)
    keys = [*found[0].bounds]
    bounds = np.array([[bound.epsilon for bound in one.bounds.values()] for one in found])
    alarms = np.array([[bound.false_alarm_rate for bound in one.bounds.values()] for one in found])
    columns = {
        "median": np.median(bounds, axis=0),
        "above": (bounds > found[0].ceiling).sum(axis=0),
        "missed": (bounds == 0).sum(axis=0),
        "false_alarms": alarms.mean(axis=0),
    }
    return {
        "length": length,
        "count": count,
        "ceiling": found[0].ceiling,
        "disagreed": sum(not one.agrees for one in found),
        **{name: dict(zip(keys, values.tolist(), strict=True)) for name, values in columns.items()},
    }
