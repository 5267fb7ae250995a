"""Table III and Figure 5: pictures from the gradient before the first step, six of each setting.

The network is theirs (Wei et al. 2020, ESORICS: four sigmoid convolutions, parameters uniform between
-0.5 and 0.5), as is the attack; the clipping norm 4 is of each of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from markdown_table import table
from reproduction.rules import DIFFERS, NOT_RUN, REPRODUCED
from torch import nn

from indpriv.analysis.reconstruction import CLOSE, reconstruction_of
from indpriv.leakage import LBFGS, Informed, Observation, leak
from indpriv.training.datasets import load_dataset
from wei2021 import paper

PICTURES, CANDIDATES, ITERATIONS = 6, 100, 30
DATA = ("mnist", "lfw_people")
_CHANNELS, _PARAMETERS = 12, 10
RULE = (
    "reproduced where 5 of 6 pictures or more come back without protection (error below "
    f"{CLOSE:g}) and none from the baseline's noise, on each data set; differs otherwise"
)
_NOISE = {"none": None, "clipping": 0.0, "little noise": 0.01, "baseline": paper.NOISE}


def network(side: int, classes: int = 10) -> nn.Module:
    """Theirs, for grey pictures."""
    layers: list[nn.Module] = []
    for channels, stride in ((1, 2), (_CHANNELS, 2), (_CHANNELS, 1), (_CHANNELS, 1)):
        layers += [nn.Conv2d(channels, _CHANNELS, 5, stride, padding=2), nn.Sigmoid()]
    outputs = _CHANNELS * math.ceil(side / 4) ** 2
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(outputs, classes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def leakage(names: tuple[str, ...] = DATA, pictures: int = PICTURES) -> list[dict[str, Any]]:
    """One row for each data set, protection and attack; minutes on a core."""
    return [row for name in names for row in _rows(name, pictures)]


def _rows(name: str, pictures: int) -> Iterator[dict[str, Any]]:
    data = load_dataset(name)
    model = network(data.train.inputs.shape[-1], data.n_classes)
    chosen = np.random.default_rng(0).permutation(len(data.train))[: pictures + CANDIDATES - 1]
    inputs = torch.from_numpy(data.train.inputs[chosen] + 1) / 2
    targets = torch.from_numpy(data.train.targets[chosen])
    naive = LBFGS(ITERATIONS, knows_clipping=False)
    for protection, noise in _NOISE.items():
        for attack in (naive,) if noise is None else (naive, LBFGS(ITERATIONS), Informed()):
            scores = leak(
                model,
                nn.CrossEntropyLoss(reduction="none"),
                inputs[:pictures],
                targets[:pictures],
                _seen(noise),
                attack,
                candidates=(inputs[pictures:], targets[pictures:]),
                seed=0,
            )
            found, errors = reconstruction_of(scores), -scores.scores[scores.member]
            knows = getattr(attack, "knows_clipping", True)
            yield {
                "data": name,
                "protection": protection,
                "attack": attack.name if knows else "as published",
                "n": pictures,
                "success": float(np.mean(errors < paper.SUCCESS)),
                "close": found.close,
                "error": found.error,
                "identified": found.identified,
                "ceiling": found.ceiling,
                "iterations": found.iterations,
            }


def _seen(noise: float | None) -> Observation:
    """A row's gradient; noise of sigma C in each parameter is sigma / sqrt(M) of the whole norm."""
    if noise is None:
        return Observation()
    root = math.sqrt(_PARAMETERS)
    return Observation(
        max_grad_norm=paper.CLIP * root, clipping="per_layer", noise_multiplier=noise / root
    )


def verdict_of_leakage(rows: list[dict[str, Any]]) -> str:
    """By `RULE`."""
    if {row["data"] for row in rows} != set(DATA):
        return NOT_RUN
    bare = [row["close"] for row in rows if row["protection"] == "none"]
    noisy = [row["close"] for row in rows if row["protection"] == "baseline"]
    return REPRODUCED if min(bare) >= 5 / 6 and max(noisy) == 0 else DIFFERS


def leakage_section(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Table III beside ours; empty without rows."""
    if not rows:
        return
    names = {"as published": "L-BFGS as published", "lbfgs": "L-BFGS that clips its guess"}
    protections = {
        "none": "none",
        "clipping": f"clipping, C = {paper.CLIP:g}",
        "little noise": "clipping, sigma = 0.01",
        "baseline": f"clipping, sigma = {paper.NOISE:g}",
    }
    yield from ("## Table III and Figure 5: pictures from one gradient", "")
    yield table(
        [
            *("data", "protection", "attack", f"error < {paper.SUCCESS:.2f}", f"error < {CLOSE:g}"),
            *("median error", "identified", "at most", "iterations"),
        ],
        [
            [
                row["data"],
                protections[row["protection"]],
                names.get(row["attack"], "informed"),
                _of(row, "success"),
                _of(row, "close"),
                "failed" if row["error"] is None else f"{row['error']:.1e}",
                _of(row, "identified"),
                f"{row['ceiling']:.1%}",
                f"{row['iterations']:g}",
            ]
            for row in rows
        ],
    )
    printed = (
        f"{name}, {system}: {iterations:g} iterations, success {success:g}, error {error:g}."
        for name, both in paper.TABLE_3.items()
        for system, (iterations, success, error) in zip(
            ("without privacy", "baseline"), both, strict=True
        )
    )
    yield from (
        "",
        "The paper, whose errors are of successes only:",
        *printed,
        f"Errors are mean squared errors of pixels between 0 and 1. One picture among {CANDIDATES}",
        "candidates is identified by chance in 1 % of the cases; at most: the share that no attack",
        "can pass on average. The informed attack knows the candidates. An iteration is one call of",
        "torch's L-BFGS, up to 20 steps; ours go on until the loss falls no more,",
        f"{ITERATIONS} at most. By the paper's threshold",
        f"{_together(rows, 'baseline', 'success', 'as published')} pictures succeed under "
        "the baseline's noise.",
        "",
    )


def what_clipping_fools(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What does not hold; empty without rows."""
    if not rows:
        return
    naive, aware = (
        _together(rows, "clipping", "close", attack) for attack in ("as published", "lbfgs")
    )
    yield "- **Clipping fools only an attacker who forgets it**: from clipped gradients without noise,"
    yield f"  the published attack finds {naive} pictures, and {aware} when it clips the gradient of its"
    yield "  guess as well."


def _together(rows: list[dict[str, Any]], protection: str, column: str, attack: str) -> str:
    """A count over all data sets."""
    chosen = [r for r in rows if (r["protection"], r["attack"]) == (protection, attack)]
    return f"{sum(_count(r, column) for r in chosen)} of {sum(r['n'] for r in chosen)}"


def _count(row: Mapping[str, Any], column: str) -> int:
    return round(row[column] * row["n"])


def _of(row: Mapping[str, Any], column: str) -> str:
    return f"{_count(row, column)} of {row['n']}"
