"""Benchmarks of schedules and of clipping per layer: python benchmarks/schedules.py [NAME ...] [--full] [--list].

As benchmarks/accountant.py; all figures are CPU time. A minute on an idle core.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from accountant import benchmark, main, report
from audits.training.config import AuditConfig, ModelConfig
from audits.training.config.schedules import Schedule
from audits.training.datasets import load_dataset
from audits.training.dp_sgd import train
from audits.training.models import build_model
from indpriv import NormLog, account
from indpriv.recording import NormPass

STEPS, RECORDS, EXAMPLES, DELTA = 10_000, 100, 5_000, 1e-9
BATCH, ROUNDS = 256, 9
RUN_STEPS, RUN_ROUNDS = 60, 3


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def log_of(noise: Schedule, clip: Schedule) -> NormLog:
    """A run of 10,000 steps with a record of 5,000 examples every 100."""
    norms = np.random.default_rng(0).gamma(2.0, 1.0, (RECORDS, EXAMPLES))
    return NormLog.from_arrays(
        norms,
        np.arange(RECORDS) * (STEPS // RECORDS),
        total_steps=STEPS,
        noise_multiplier=noise.values(STEPS),
        max_grad_norm=clip.values(STEPS),
        sample_rate=0.01,
    )


@benchmark
def schedules(full: bool) -> list[bool]:
    """An account of 10,000 noise multipliers, beside that of one; and with as many clipping norms."""
    still, falling = Schedule("constant", start=4.0), Schedule("exponential", start=15.8, end=3.0)
    cases = {
        "one": (Schedule("constant", start=6.0), still),
        "noise": (falling, still),
        "both": (falling, Schedule("linear", start=4.0, end=2.0)),
    }
    spent = {}
    for name, (noise, clip) in cases.items():
        log = log_of(noise, clip)
        spent[name] = min(seconds(lambda log=log: account(log, delta=DELTA)) for _ in range(2))
    return [
        report("an account with one setting", spent["one"], "s"),
        report(
            "10,000 noise multipliers, over one", spent["noise"] / spent["one"], "times", at_most=30
        ),
        report("  and 10,000 clipping norms, over one", spent["both"] / spent["one"], "times"),
    ]


@benchmark
def per_layer(full: bool) -> list[bool]:
    """A norm pass of what clipping each tensor leaves, beside one of whole gradients, in turn."""
    torch.manual_seed(0)
    model = build_model(ModelConfig("tanh_cnn"), (1, 28, 28), 10)
    inputs, targets = torch.randn(BATCH, 1, 28, 28), torch.arange(BATCH) % 10
    limits = [0.1 / math.sqrt(8)] * sum(1 for _ in model.parameters())
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    ratios = []
    with NormPass(model, loss_fn, inputs, targets) as norm_pass:
        for _ in range(ROUNDS):
            norm_pass.clip_each()
            flat = seconds(lambda: norm_pass(inputs, targets))
            norm_pass.clip_each(limits)
            ratios.append(seconds(lambda: norm_pass(inputs, targets)) / flat)
    return [
        report("recording per layer, over flat", statistics.median(ratios), "times", at_most=1.3)
    ]


@benchmark
def recorded_run(full: bool) -> list[bool]:
    """Whole runs with a record at every step, clipped per layer and flat, in turn."""
    data = load_dataset("digits")
    tables = {
        "name": "digits",
        "data": {"dataset": "digits"},
        "model": {"architecture": "mlp", "hidden": [256]},
        "recording": {"every": 1},
        "checkpoints": {"every": "epoch"},
    }
    training = {
        "steps": RUN_STEPS,
        "batch_size": 256,
        "learning_rate": 0.5,
        "max_grad_norm": 1.0,
        "noise_multiplier": 2.0,
        "delta": 1e-5,
    }
    ratios = []
    for _ in range(RUN_ROUNDS):
        spent = []
        for clipping in ("per_layer", "flat"):
            keys = {**tables, "training": {**training, "clipping": clipping}}
            config = AuditConfig.from_dict(keys)
            with tempfile.TemporaryDirectory() as folder:
                spent.append(seconds(partial(train, config, Path(folder) / "run", dataset=data)))
        ratios.append(spent[0] / spent[1])
    return [
        report(
            "a recorded run per layer, over flat", statistics.median(ratios), "times", at_most=1.3
        )
    ]


if __name__ == "__main__":
    raise SystemExit(main())
