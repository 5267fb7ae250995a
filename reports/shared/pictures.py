"""Pictures from gradients, as both papers of Wei et al. try them: their network, and their attack.

The network is that of Wei et al. 2020 (ESORICS): four sigmoid convolutions, parameters uniform between
-0.5 and 0.5. Errors are mean squared errors of pixels between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from audits.training.datasets import load_dataset
from indpriv.analysis.reconstruction import reconstruction_of
from indpriv.leakage import LBFGS, Informed, Observation, leak
from indpriv.leakage.inversion import Inversion
from reports.shared.rates import limit

CANDIDATES, ITERATIONS = 100, 30
SUCCESS = 0.70  # in both papers an attack succeeds if its error is below this
PARAMETERS = 10  # of the network, each of which is clipped on its own
NAMES = {
    "as published": "L-BFGS as published",
    "lbfgs": "L-BFGS that clips its guess",
    "informed": "informed",
}
ATTACKS: dict[str, Inversion] = {
    "as published": LBFGS(ITERATIONS, knows_clipping=False),
    "lbfgs": LBFGS(ITERATIONS),
    "informed": Informed(),
}
_CHANNELS = 12


@dataclass(frozen=True)
class Gallery:
    """Pictures of a data set that are attacked, and those that each is told from.

    Attributes:
        data: name of the data set.
        model: their network, before training.
        inputs, targets: (n, ...) and (n,) attacked.
        candidates: inputs and targets of others.
    """

    data: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    candidates: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls,
        name: str,
        pictures: int,
        *,
        drawn_wide: bool = True,
        candidates: int | None = CANDIDATES,
    ) -> Gallery:
        """Drawn at random, by a fixed seed; drawn_wide: see `network`; candidates: None for all."""
        data = load_dataset(name)
        order = np.random.default_rng(0).permutation(len(data.train))
        chosen = order[: None if candidates is None else pictures + candidates - 1]
        inputs = torch.from_numpy(data.train.inputs[chosen] + 1) / 2
        targets = torch.from_numpy(data.train.targets[chosen])
        others = inputs[pictures:], targets[pictures:]
        model = network(inputs.shape[-1], data.n_classes, drawn_wide, inputs.shape[1])
        return cls(name, model, inputs[:pictures], targets[:pictures], others)

    def attacked(self, seen: Observation, attacks: Iterable[str]) -> list[dict[str, Any]]:
        """Figures of each attack, by its key in `ATTACKS`, on what is seen of each picture."""
        return [self._attacked(seen, name) for name in attacks]

    def _attacked(self, seen: Observation, name: str) -> dict[str, Any]:
        scores = leak(
            self.model,
            nn.CrossEntropyLoss(reduction="none"),
            self.inputs,
            self.targets,
            seen,
            ATTACKS[name],
            candidates=self.candidates,
            seed=0,
        )
        found, errors = reconstruction_of(scores), -scores.scores[scores.member]
        return {
            "data": self.data,
            "attack": name,
            "n": len(self.inputs),
            "success": float(np.mean(errors < SUCCESS)),
            "close": found.close,
            "error": found.error,
            "identified": found.identified,
            "ceiling": found.ceiling,
            "iterations": found.iterations,
        }


def network(
    side: int, classes: int = 10, drawn_wide: bool = True, colours: int = 1
) -> nn.Sequential:
    """Theirs; its parameters are drawn as they do, or else as PyTorch does."""
    layers: list[nn.Module] = []
    for channels, stride in ((colours, 2), (_CHANNELS, 2), (_CHANNELS, 1), (_CHANNELS, 1)):
        layers += [nn.Conv2d(channels, _CHANNELS, 5, stride, padding=2), nn.Sigmoid()]
    outputs = _CHANNELS * math.ceil(side / 4) ** 2
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(outputs, classes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model:
            weight = getattr(layer, "weight", None)
            inputs = 1 if weight is None else weight[0].numel()
            limit = 0.5 if drawn_wide else 1 / math.sqrt(inputs)
            for parameter in layer.parameters():
                parameter.uniform_(-limit, limit, generator=generator)
    return model


def cells(row: dict[str, Any]) -> list[str]:
    """Success by the paper's threshold, close ones, median error, identified, at most, iterations."""
    return [
        share(row, "success"),
        share(row, "close"),
        "failed" if row["error"] is None else f"{row['error']:.1e}",
        share(row, "identified"),
        f"{limit(100 * row['ceiling'])}%",
        f"{row['iterations']:g}",
    ]


def share(row: dict[str, Any], column: str) -> str:
    """So many of so many pictures."""
    return f"{count(row, column)} of {row['n']}"


def count(row: dict[str, Any], column: str) -> int:
    """A share as a number of pictures."""
    return round(row[column] * row["n"])
