"""Benchmarks of federated runs: python benchmarks/federated.py [NAME ...] [--full] [--list].

As benchmarks/accountant.py; figures are ratios of CPU time, measured in turn. A minute on an idle core.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from accountant import benchmark, main, report
from audits.training.config import FederatedConfig
from audits.training.datasets.base import Split
from audits.training.federated.local import LocalTraining
from audits.training.federated.rounds import Clients, Federation
from audits.training.models import mlp, tanh_cnn
from audits.training.randomness import Randomness
from indpriv import RoundRecorder
from indpriv.norm_log.fields import StepSetting

CLIENTS, STEPS, BATCH, ROUNDS, RATE = 100, 5, 10, 3, 0.1
MEMBERS, ROWS, RECORDED = 1_000, 60, 20  # what a RoundRecorder is timed on
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
        local = LocalTraining(module, inputs, targets, RATE)
        start = parameters_to_vector(module.parameters()).detach()
        ways = (
            partial(_one_at_a_time, module, start, inputs, targets, rows),
            partial(local.updates, start, [list(steps) for steps in rows]),
        )
        ratios = []
        for _ in range(ROUNDS):
            spent = []
            for way in ways:
                before = time.process_time()
                way()
                spent.append(time.process_time() - before)
            ratios.append(spent[0] / spent[1])
        ratio = statistics.median(ratios)
        what = f"{name}: one client at a time, over one batch"
        verdicts.append(report(what, ratio, "times", at_least=LEAST[name]))
    return verdicts


def _one_at_a_time(
    module: nn.Module,
    start: Tensor,
    inputs: Tensor,
    targets: Tensor,
    rows: list[NDArray[np.int64]],
) -> None:
    """What a loop over clients does: ordinary autograd and SGD, nothing batched."""
    for client in rows:
        vector_to_parameters(start.clone(), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), RATE)
        for step in torch.from_numpy(client):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs[step]), targets[step]).backward()
            optimizer.step()


@benchmark
def recording(full: bool) -> list[bool]:
    """RoundRecorder's share of a round: 1,000 clients of 60 images, a tenth takes part, an MLP."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(MEMBERS * ROWS, 784)).astype(np.float32)
    train = Split(inputs, rng.integers(0, 10, len(inputs)))
    settings = FederatedConfig(
        clients=MEMBERS,
        rounds=RECORDED,
        protect="client",
        client_rate=0.1,
        local_steps=5,
        local_batch_size=10,
        local_learning_rate=0.1,
    )
    clients = Clients(
        np.arange(MEMBERS),
        list(np.arange(len(inputs)).reshape(MEMBERS, ROWS)),
        np.arange(len(inputs)),
    )
    model = mlp(784, (64,), 10, "relu")
    run = Federation(settings, "flat", clients, model, train, Randomness.from_seed(0))
    setting = StepSetting(noise_multiplier=1.0, max_grad_norm=0.2, sample_rate=0.1)
    spent = {"whole": 0.0, "recorder": 0.0}
    with (
        tempfile.TemporaryDirectory() as folder,
        RoundRecorder(Path(folder) / "run", np.arange(MEMBERS), sampler="poisson") as recorder,
    ):
        append = recorder.round

        def timed(*values: object, **named: object) -> None:
            start = time.process_time()
            append(*values, **named)  # type: ignore[arg-type]
            spent["recorder"] += time.process_time() - start

        recorder.round = timed  # type: ignore[method-assign, assignment]
        run.round(setting, recorder)  # warm
        spent.update(whole=0.0, recorder=0.0)
        start = time.process_time()
        for _ in range(RECORDED):
            run.round(setting, recorder)
        spent["whole"] = time.process_time() - start
    share = spent["recorder"] / (spent["whole"] - spent["recorder"])
    return [report("RoundRecorder, over the rest of a round", 100 * share, "%", at_most=2)]


if __name__ == "__main__":
    raise SystemExit(main())
