"""Table III: milliseconds of a local step of one client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
import torch

from audits.training.config import FederatedConfig
from audits.training.datasets.base import Split
from audits.training.federated.rounds import Clients, Federation
from audits.training.models import tanh_cnn
from audits.training.randomness import Randomness
from indpriv.norm_log.fields import StepSetting
from reports.fedcdp import paper
from reports.shared.markdown_table import table
from reports.shared.verdicts import DIFFERS, NOT_RUN, REPRODUCED

CLIENTS, STEPS, ROUNDS = 10, 10, 5
SYSTEMS = {"no DP": "nobody", "Fed-SDP": "client", "Fed-CDP": "row", "Fed-CDP(decay)": "row"}
RULE = (
    "reproduced where Fed-SDP takes at most 1.2 times a local step without DP, and Fed-CDP at least "
    "twice as long"
)


def cost() -> dict[str, float]:
    """CPU milliseconds of a local step, by system: the median of rounds of ten clients."""
    torch.set_num_threads(1)
    batch = paper.SETTINGS["MNIST"].batch
    n = CLIENTS * STEPS * batch
    rng = np.random.default_rng(0)
    data = Split(rng.normal(size=(n, 1, 28, 28)).astype(np.float32), np.arange(n) % 10)
    rows = list(np.arange(n).reshape(CLIENTS, STEPS * batch))
    runs = {
        name: Federation(
            FederatedConfig(
                clients=CLIENTS,
                rounds=ROUNDS,
                protect=protect,  # type: ignore[arg-type]
                client_rate=1.0,
                local_steps=STEPS,
                local_batch_size=batch,
                local_learning_rate=paper.LOCAL_RATE,
            ),
            "per_layer",
            Clients(np.arange(CLIENTS), rows, np.arange(n)),
            tanh_cnn((1, 28, 28), 10),
            data,
            Randomness.from_seed(0),
        )
        for name, protect in SYSTEMS.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):  # in turn, and the first to warm up
        for name, run in runs.items():
            clip = 6.0 - number * 0.04 if "decay" in name else paper.CLIP
            begun = time.process_time()
            run.round(StepSetting(paper.NOISE, clip, 1.0), None)
            if number:
                spent[name].append(time.process_time() - begun)
    return {name: 1000 * median(each) / (CLIENTS * STEPS) for name, each in spent.items()}


def verdict_of_cost(found: Mapping[str, float]) -> str:
    """By `RULE`."""
    if not found:
        return NOT_RUN
    base = found["no DP"]
    same = found["Fed-SDP"] <= 1.2 * base, found["Fed-CDP"] >= 2 * base
    return REPRODUCED if all(same) else DIFFERS


def cost_section(found: Mapping[str, float]) -> Iterator[str]:
    """Table III beside ours; empty without figures."""
    if not found:
        return
    rows: list[list[Any]] = [
        [
            name,
            f"{printed:.1f}",
            f"{printed / paper.TABLE_3['no DP']:.2f}",
            f"{found[name]:.2f}",
            f"{found[name] / found['no DP']:.2f}",
        ]
        for name, printed in paper.TABLE_3.items()
    ]
    head = ["system", "paper, ms", "of no DP", "ours, ms", "of no DP"]
    yield from ("## Table III: cost of a local step", "", table(head, rows), "")
    yield from (
        f"MNIST's shape, batches of {paper.SETTINGS['MNIST'].batch}; ours are CPU milliseconds a client, the tanh",
        f"network of audits/mnist.toml, {CLIENTS} clients in one batch. Ratios can be compared, not seconds.",
        "",
    )
