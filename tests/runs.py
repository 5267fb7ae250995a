"""Small real Opacus runs for tests."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from indpriv import NormLog
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder

PER_EXAMPLE = nn.CrossEntropyLoss(reduction="none")
LOADING = (  # workers of the loader, and physical batch sizes; each with and without is quick once
    *((0, 5), (2, None)),
    *(pytest.param(0, None, marks=pytest.mark.slow), pytest.param(2, 5, marks=pytest.mark.slow)),
)


def blobs(n: int = 120, features: int = 6) -> TensorDataset:
    """Two noisy classes; the same each time."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, features, generator=generator)
    targets = (inputs[:, 0] + 0.3 * torch.randn(n, generator=generator) > 0).long()
    return TensorDataset(inputs, targets)


def mlp(features: int = 6) -> nn.Module:
    torch.manual_seed(2**40 + 0)
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 2))


@dataclass
class Run:
    model: Any
    optimizer: Any
    loader: Any
    criterion: Any
    engine: PrivacyEngine
    dataset: Any

    def step(self, inputs: Any, targets: Any) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(inputs), targets).backward()
        self.optimizer.step()

    def train(self, epochs: int = 2, loader: Any = None) -> None:
        self.model.train()
        for _ in range(epochs):
            for inputs, targets in loader or self.loader:
                self.step(inputs, targets)


def make_run(
    dataset: Any = None,
    model: nn.Module | None = None,
    *,
    mode: str = "hooks",
    batch_size: int = 12,
    workers: int = 0,
    noise_multiplier: float = 1.0,
    max_grad_norm: float = 1.0,
    learning_rate: float = 0.5,
    **options: Any,
) -> Run:
    """A run as users make it: PrivacyEngine.make_private on a plain model and loader."""
    dataset = blobs() if dataset is None else dataset
    model = mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    loader = options.pop("data_loader", None) or DataLoader(
        dataset, batch_size=batch_size, num_workers=workers
    )
    engine = PrivacyEngine(accountant="rdp")
    criterion: Any = nn.CrossEntropyLoss()
    ghost = mode in ("ghost", "ghost_fsdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            grad_sample_mode=mode,
            **({"criterion": criterion} if ghost else {}),
            **options,
        )
    if ghost:
        model, optimizer, criterion, loader = made
    else:
        model, optimizer, loader = made
    return Run(model, optimizer, loader, criterion, engine, dataset)


def record(run: Run, run_dir: Path, epochs: int = 2, loader: Any = None, **options: Any) -> NormLog:
    """Train a run with a Recorder attached."""
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, **{"every": 3} | options)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(epochs, loader)
    return NormLog.open(run_dir)


def failed(run_dir: Path) -> set[str]:
    """Titles of the checks that a recorded run does not pass."""
    return {check.title for check in verify(open_run(run_dir)) if check.status == "failed"}
