"""Proposition 2 on a small network: is the margin over a gradient norm a limit of the noise?

For an example, let r be the margin between its label and the runner-up, over the norm of the
gradient of that margin in all parameters. The proposition puts r in the place of the margin over a
Lipschitz constant. Parameters are moved by multiples of r, in a random direction as noise does, and
down the gradient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector

from audits.training.datasets import load_dataset
from audits.training.federated.local import LocalTraining
from audits.training.models import mlp
from indpriv._types import IntArray
from reports.fedcdp import paper

MULTIPLES = (0.5, 0.9, 1.0, 2.0, 10.0, 100.0)
_STEPS, _RATE, _HIDDEN = 300, 0.5, 64
_CLIENTS, _LOCAL_STEPS, _BATCH = 10, 20, 5


def proposition_2(seed: int = 0) -> dict[str, Any]:
    """Median of r, the length of the stated noise of one local step, and predictions lost."""
    torch.manual_seed(seed)
    data = load_dataset("digits")
    train, test = (
        (torch.from_numpy(split.inputs).flatten(1), torch.from_numpy(split.targets))
        for split in (data.train, data.test)
    )
    model = mlp(train[0].shape[1], (_HIDDEN,), 10, "relu")
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train[0]), train[1]).backward()
        optimizer.step()
    with torch.no_grad():
        right = model(test[0]).argmax(1) == test[1]
    return _moved(model, test[0][right], test[1][right]) | {"accuracy": float(right.float().mean())}


def averaging(seed: int = 0) -> dict[str, float]:
    """One round of ten clients on digits, by what is averaged: relative lengths of differences.

    models: of averaged models from averaged updates. fedsgd: of one step on all local rows, with the
    learning rate of all steps together, from as many steps on parts of them.
    """
    torch.manual_seed(seed)
    data = load_dataset("digits").train
    model = mlp(data.inputs[0].size, (_HIDDEN,), 10, "relu")
    start = parameters_to_vector(model.parameters()).detach()
    inputs, targets = torch.from_numpy(data.inputs).flatten(1), torch.from_numpy(data.targets)
    rows = np.arange(_CLIENTS * _LOCAL_STEPS * _BATCH).reshape(_CLIENTS, _LOCAL_STEPS, _BATCH)

    def updates(rate: float, steps: list[list[IntArray]]) -> Tensor:
        return LocalTraining(model, inputs, targets, rate).updates(start, steps)[0]

    several = updates(_RATE, [list(each) for each in rows])
    one = updates(_RATE * _LOCAL_STEPS, [[each.reshape(-1)] for each in rows]).mean(0)
    by_models = (start + several).mean(0) - start
    mean = several.mean(0)
    return {
        "models": float((by_models - mean).norm() / mean.norm()),
        "fedsgd": float((one - mean).norm() / mean.norm()),
    }


def _moved(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Of test examples that are classified rightly."""
    start = parameters_to_vector(model.parameters()).detach()
    shapes = {name: part.shape for name, part in model.named_parameters()}

    def outputs(flat: Tensor, row: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        named = {k: part.view(shapes[k]) for k, part in zip(shapes, parts, strict=True)}
        found: Tensor = functional_call(model, named, (row[None],))[0]
        return found

    def margin(flat: Tensor, row: Tensor, own: Tensor) -> Tensor:
        found = outputs(flat, row)
        return (found * own).sum() - found.masked_fill(own, -math.inf).max()

    labels = nn.functional.one_hot(targets, 10).bool()
    gradients = vmap(grad(margin), in_dims=(None, 0, 0))(start, inputs, labels)
    margins = vmap(margin, in_dims=(None, 0, 0))(start, inputs, labels).detach()
    norms = gradients.norm(dim=1)
    radius = margins / norms
    directions = {
        "random": nn.functional.normalize(torch.randn(gradients.shape), dim=1),
        "gradient": -gradients / norms[:, None],
    }

    def share_lost(multiple: float, way: Tensor) -> float:
        moved = start + (multiple * radius)[:, None] * way
        return float((vmap(margin)(moved, inputs, labels) <= 0).float().mean())

    lost = {
        name: [share_lost(multiple, way) for multiple in MULTIPLES]
        for name, way in directions.items()
    }
    step = paper.LOCAL_RATE * paper.NOISE * paper.CLIP / paper.SETTINGS["MNIST"].batch
    return {
        "parameters": len(start),
        "median": float(radius.median()),
        "noise_length": step * math.sqrt(len(start)),
        "lost": lost,
    }
