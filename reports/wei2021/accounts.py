"""The paper's accounts computed again, and the claims that do not hold, each by a computation or a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from audits.rules import ComposedEpsilons, composed_epsilons
from audits.training.datasets import load_dataset
from audits.training.models import tanh_cnn
from indpriv import NormLog, account
from indpriv._types import FloatArray
from reports.shared.pictures import SUCCESS
from reports.wei2021 import paper

_LAYERS = (3, 5)  # tensors that are clipped by themselves; the paper's network has 3 without biases
_TRIALS = 75  # with the largest member, and as many without
_BATCH, _STEPS, _LARGE_CLIP = 60, 150, 32.0


def accounts() -> dict[str, Any]:
    """Tables V and VIII, and what the same runs are worth."""
    return {
        "table_5": {str(steps): _five(paper.NOISE, steps) for steps in paper.TABLE_5},
        "table_8": {law: _iterations(noise_of(law)) for law in paper.STEP_EPSILON},
        "worst_case": {name: _worst_case(paper.NOISE, name) for name in ("rdp", "pld")},
        "per_layer": {
            str(layers): {
                "moments": _composed(paper.NOISE / np.sqrt(layers), 10_000).moments,
                "rdp": _worst_case(paper.NOISE / np.sqrt(layers), "rdp"),
            }
            for layers in _LAYERS
        },
        "figure_4": {
            law: [float(noise[step]) for step in (0, 2500, 5000, 7500, 9999)]
            for law in paper.STEP_EPSILON
            for noise in [noise_of(law)]
        },
    }


def noise_of(law: str) -> FloatArray:
    """(10,000,) noise multipliers of the published code."""
    first, slope = paper.STEP_EPSILON[law]
    exponent = first + slope * np.arange(10_000) / 10_000
    epsilon = np.exp(exponent) if law == "exponential" else exponent
    return np.asarray(np.sqrt(2 * np.log(1.25 / paper.DELTA)) / epsilon)


def _composed(noise: float | FloatArray, steps: int) -> ComposedEpsilons:
    return composed_epsilons(noise, paper.RATE, total_steps=steps, delta=paper.DELTA)


def _five(noise: float, steps: int) -> list[float]:
    found = _composed(noise, steps)
    return [getattr(found, name) for name in paper.FIELDS]


def _iterations(noise: FloatArray) -> list[int]:
    """How many steps each rule allows before the schedule has spent the epsilon of Table V.

    AdvC as printed, against the classic AdvC that Table V holds.
    """
    fields = ("basic", "advanced_as_printed", *paper.FIELDS[2:])
    found = []
    for field, budget in zip(fields, paper.TABLE_5[10_000], strict=True):
        low, high = 1, len(noise)
        while low < high:
            middle = (low + high + 1) // 2
            spent = getattr(_composed(noise[:middle], middle), field)
            low, high = (middle, high) if spent <= budget else (low, middle - 1)
        found.append(low)
    return found


def _worst_case(noise: float, accountant: str) -> float:
    log = NormLog.from_arrays(
        [[1.0]],
        [0],
        total_steps=10_000,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=paper.RATE,
    )
    return account(log, delta=paper.DELTA, accountant=accountant).worst_case_epsilon


def grey_pictures() -> dict[str, float]:
    """Errors of pictures that know nothing of MNIST's test images, pixels in [0, 1]."""
    images = load_dataset("mnist").test.inputs.astype(np.float64)
    grey = np.square(images - 0.5).mean(axis=(1, 2, 3))
    mean = np.square(images - images.mean(axis=0)).mean(axis=(1, 2, 3))
    return {
        "low": float(images.min()),
        "high": float(images.max()),
        "grey": float(grey.mean()),
        "grey_success": float(np.mean(grey < SUCCESS)),
        "mean": float(mean.mean()),
    }


def largest_norm_attack(seed: int = 0) -> dict[str, float]:
    """Who has the largest gradient of a batch, read off the noise of one update.

    The scale of the noise is the largest clipped norm in the batch. The attacker sees the length of
    one update over the root of its coordinates, with and without that member, and nothing else.
    """
    torch.manual_seed(seed)
    data = load_dataset("mnist").train
    images, labels = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    model = tanh_cnn(data.inputs.shape[1:], 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(len(images))
    for step in range(_STEPS):
        batch = order[step * _BATCH : (step + 1) * _BATCH]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    batch = order[_STEPS * _BATCH : (_STEPS + 1) * _BATCH]
    rows = torch.stack([_gradient(model, images[i : i + 1], labels[i : i + 1]) for i in batch])
    norms = rows.norm(dim=1)
    rows *= (_LARGE_CLIP / norms).clamp(max=1.0)[:, None]
    norms, largest = norms.clamp(max=_LARGE_CLIP), int(norms.argmax())
    rest = torch.arange(_BATCH) != largest
    scales = {True: float(norms.max()), False: float(norms[rest].max())}
    sums = {True: rows.sum(0), False: rows[rest].sum(0)}
    middle = sum(scales.values()) / 2 * paper.NOISE
    hits = {
        inside: sum(
            (sums[inside] + paper.NOISE * scale * torch.randn(rows.shape[1])).square().mean().item()
            > middle**2
            for _ in range(_TRIALS)
        )
        for inside, scale in scales.items()
    }
    return {
        "trials": _TRIALS,
        "largest": scales[True],
        "second": scales[False],
        "hits": hits[True],
        "false_alarms": hits[False],
        "claimed_epsilon": _one_step_epsilon(),
    }


def _gradient(model: nn.Module, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(image), label)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in found])


def _one_step_epsilon() -> float:
    """Of one step without sampling at the stated noise."""
    log = NormLog.from_arrays(
        [[1.0]],
        [0],
        total_steps=1,
        noise_multiplier=paper.NOISE,
        max_grad_norm=1.0,
        sample_rate=1.0,
    )
    return account(log, delta=paper.DELTA, accountant="pld").worst_case_epsilon
