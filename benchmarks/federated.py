"""Benchmark of local training: python benchmarks/federated.py [NAME ...] [--full] [--list].

As benchmarks/accountant.py; figures are ratios of CPU time, measured in turn. A minute on an idle core.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

from accountant import benchmark, main, report
from indpriv.training.federated.local import LocalTraining
from indpriv.training.models import mlp, tanh_cnn

CLIENTS, STEPS, BATCH, ROUNDS = 100, 5, 10, 3
LEAST = {"cnn": 10.0, "mlp": 25.0}  # times as fast as one client at a time


@benchmark
def local_training(full: bool) -> list[bool]:
    """Clients of MNIST's shape in one batch, beside one client at a time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clients = 1_000 if full else CLIENTS
    inputs = torch.randn(clients * STEPS * BATCH, 1, 28, 28)
    targets = torch.arange(len(inputs)) % 10
    rows = list(np.arange(len(inputs)).reshape(clients, STEPS, BATCH))
    verdicts = []
    modules = {"cnn": tanh_cnn((1, 28, 28), 10), "mlp": mlp(784, (64,), 10, "relu")}
    for name, module in modules.items():
        local = LocalTraining(module, inputs, targets, 0.1)
        start = parameters_to_vector(module.parameters()).detach()
        ratios = []
        for _ in range(ROUNDS):
            spent = []
            for at_once in (1, None):
                before = time.process_time()
                local.updates(start, [list(steps) for steps in rows], at_once=at_once)
                spent.append(time.process_time() - before)
            ratios.append(spent[0] / spent[1])
        ratio = statistics.median(ratios)
        what = f"{name}: one client at a time, over one batch"
        verdicts.append(report(what, ratio, "times", at_least=LEAST[name]))
    return verdicts


if __name__ == "__main__":
    raise SystemExit(main())
