"""Table III and Figure 5: pictures from the gradient before the first step, six of each setting.

See reports/shared/pictures.py for network and attack; the clipping norm 4 is of each parameter.
Quantile clipping and AdaClip begin at it and know nothing before their first step, which is thus the
baseline's; so that they can differ, they are given here what they would learn: the median of the
norms of each parameter, and the deviation of each coordinate, in the batch that is attacked.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from indpriv.analysis.reconstruction import CLOSE
from indpriv.leakage import Observation
from indpriv.leakage.inversion import Reader, one_by_one
from reports.shared.markdown_table import table
from reports.shared.pictures import (
    ATTACKS,
    CANDIDATES,
    ITERATIONS,
    NAMES,
    PARAMETERS,
    SUCCESS,
    Gallery,
    cells,
    count,
)
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED
from reports.wei2021 import paper
from reports.wei2021.accounts import noise_of

PICTURES = 6
DATA = (
    "mnist",
    "lfw_people",
)  # that the claims need; they are judged on each one that was attacked
ALL_DATA = (*DATA, "fashion_mnist", "cifar10")
LEAKS = 5 / 6  # of the pictures, where a system is said to leak
CLAIMS = {
    "III, success without privacy": "without privacy the attack succeeds",
    "III, success of the baseline": "the baseline's noise leaves some successes",
    "III, order": "order: without privacy, AdaClip, quantile clipping, baseline, dyn[S,sigma]",
}
RULE = (
    f"a picture is back where its error is below {CLOSE:g}. Without privacy: reproduced where 5 of 6 pictures or "
    "more are back on each data set, differs where on one. The baseline's successes, of which the paper has 13 to "
    "25 %: reproduced where any picture is back on each data set, differs where on one; what the paper's own threshold "
    f"of {SUCCESS:.2f} calls a success a grey picture reaches too. Order: not run while one of its systems is not attacked; "
    "reproduced where the share that is back falls at each step of the order on each data set, differs where instead the median "
    "error of the published attack rises at each"
)
ORDER = ("none", "adaclip", "quantile", "baseline", "dyn[S,sigma]")  # the most leaking first
_NOISE = {"clipping": 0.0, "little noise": 0.01, "baseline": paper.NOISE}
_LEAST = 1e-6  # deviation of a coordinate, as in `indpriv.recording.AdaClip`
PROTECTIONS = {
    "none": "none",
    "clipping": f"clipping, C = {paper.CLIP:g}",
    "little noise": "clipping, sigma = 0.01",
    "baseline": f"clipping, sigma = {paper.NOISE:g}",
    "quantile": f"quantile clipping, sigma = {paper.NOISE:g}",
    "adaclip": f"AdaClip, sigma = {paper.NOISE:g}",
    "dyn[S,sigma]": f"dyn[S,sigma], sigma = {noise_of('linear')[0]:.1f}",
}


def leakage(names: tuple[str, ...] = ALL_DATA, pictures: int = PICTURES) -> list[dict[str, Any]]:
    """One row for each data set, protection and attack; an hour on a core."""
    galleries = (Gallery.of(name, pictures) for name in names)
    return [
        row for gallery in galleries for name in PROTECTIONS for row in protected(gallery, name)
    ]


def protected(gallery: Gallery, protection: str) -> list[dict[str, Any]]:
    """One row for each attack on one of `PROTECTIONS`; without any, the published one alone."""
    seen, attacks = Observation(), list(ATTACKS)
    if protection == "none":
        attacks = ["as published"]
    elif protection in _NOISE:
        seen = _clipped(paper.CLIP, _NOISE[protection])
    else:
        sigma = noise_of("linear")[0] if protection == "dyn[S,sigma]" else paper.NOISE
        seen = _clipped(1.0, sigma)
        model = Widened(gallery.model, widths_of(gallery)[protection])
        gallery = replace(gallery, model=model)
    return [{"protection": protection, **row} for row in gallery.attacked(seen, attacks)]


def _clipped(norm: float, noise: float) -> Observation:
    """A row's gradient; noise of sigma C in each parameter is sigma / sqrt(M) of the whole norm."""
    root = math.sqrt(PARAMETERS)
    return Observation(
        max_grad_norm=norm * root, clipping="per_layer", noise_multiplier=float(noise) / root
    )


class Widened(nn.Module):
    """A network whose parameters are held times widths, so that their gradients come divided by these."""

    def __init__(self, network: nn.Module, widths: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network, self.widths = copy.deepcopy(network), widths
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.mul_(widths[name])

    def forward(self, inputs: Tensor) -> Tensor:
        """The same outputs as the network's."""
        held = {name: p / self.widths[name] for name, p in self.network.named_parameters()}
        found: Tensor = functional_call(self.network, held, (inputs,))
        return found


def widths_of(gallery: Gallery) -> dict[str, dict[str, Tensor]]:
    """What each adaptive system divides gradients by before it clips them at 1, by parameter.

    The batch is of all pictures. AdaClip: b = sqrt(s) sqrt(sum of all s), with s the deviation.
    """
    reader = Reader(gallery.model, nn.CrossEntropyLoss(reduction="none"), Observation())
    batch = [
        torch.cat(both)
        for both in zip((gallery.inputs, gallery.targets), gallery.candidates, strict=True)
    ]
    rows = [reader.gradients(reader.read(*row)) for row in one_by_one(*batch)]
    found: dict[str, dict[str, Tensor]] = {"quantile": {}, "adaclip": {}, "dyn[S,sigma]": {}}
    for name in reader.parameters:
        every = torch.stack([row[name] for row in rows]).detach()
        norms, deviation = every.flatten(1).norm(dim=1), every.std(0).clamp(min=_LEAST)
        found["quantile"][name] = norms.median()
        found["adaclip"][name] = (deviation * deviation.sum()).sqrt()
        found["dyn[S,sigma]"][name] = norms.max().clamp(max=paper.CLIP)
    return found


def verdicts_of_leakage(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The word of each of `CLAIMS`, by `RULE`."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    if not set(DATA) <= set(names):
        return dict.fromkeys(CLAIMS, NOT_RUN)

    def of(protection: str, column: str) -> list[list[float]]:
        """A figure of each attack, by data set."""
        return [
            [r[column] for r in rows if (r["data"], r["protection"]) == (data, protection)]
            for data in names
        ]

    back = {one: [max(each) for each in of(one, "close") if each] for one in ORDER}
    errors = {
        one: [math.inf if each[0] is None else each[0] for each in of(one, "error") if each]
        for one in ORDER
    }
    return dict(
        zip(
            CLAIMS,
            (
                _on_each([share >= LEAKS for share in back["none"]]),
                _on_each([share > 0 for share in back["baseline"]]),
                _order(back, errors, len(names)),
            ),
            strict=True,
        )
    )


def _order(back: Mapping[str, list[float]], errors: Mapping[str, list[float]], n_data: int) -> str:
    if any(len(back[one]) < n_data for one in ORDER):
        return NOT_RUN
    if _falls(back):
        return REPRODUCED
    return (
        DIFFERS
        if _falls({one: [-e for e in each] for one, each in errors.items()})
        else NOT_REPRODUCED
    )


def _falls(figures: Mapping[str, list[float]]) -> bool:
    """Whether it does at each step of the order, on each data set."""
    return all(
        more > less
        for pair in pairwise(ORDER)
        for more, less in zip(*(figures[one] for one in pair), strict=True)
    )


def _on_each(found: list[bool]) -> str:
    return REPRODUCED if all(found) else DIFFERS if any(found) else NOT_REPRODUCED


def leakage_section(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Table III beside ours; empty without rows."""
    if not rows:
        return
    yield from ("## Table III and Figure 5: pictures from one gradient", "")
    yield table(
        [
            *("data", "protection", "attack", f"error < {SUCCESS:.2f}", f"error < {CLOSE:g}"),
            *("median error", "identified", "at most", "iterations"),
        ],
        [
            [
                row["data"],
                PROTECTIONS[row["protection"]],
                NAMES[row["attack"]],
                *cells(row),
            ]
            for row in rows
        ],
    )
    printed = [
        [PROTECTIONS[system], *(f"{n:g}, {success:g}, {error:g}" for n, success, error in every)]
        for system, *every in zip(paper.TABLE_3_SYSTEMS, *paper.TABLE_3.values(), strict=True)
    ]
    yield from (
        "",
        "The paper: iterations, share of successes, and their error (of dyn[S,sigma], of failures):",
        "",
        table(["protection", *paper.TABLE_3], printed),
        "",
        "Quantile clipping and AdaClip begin at C = 4 and know nothing before their first step, which is",
        "thus a baseline's and leaks no more. So that they can, they are given here what they would",
        "learn: the median of the norms of each parameter, or the deviation of each coordinate, in the batch",
        "of all pictures, from which dyn[S,sigma] takes the largest norm as the scale of its noise; its",
        "clipping norm begins at 4. For these three, attacks compare gradients in units of the noise.",
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
    return f"{sum(count(r, column) for r in chosen)} of {sum(r['n'] for r in chosen)}"
