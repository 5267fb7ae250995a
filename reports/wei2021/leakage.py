"""Table III and Figure 5: pictures from the gradient before the first step, six of each setting.

See reports/shared/pictures.py for network and attack; the clipping norm 4 is of each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from indpriv.analysis.reconstruction import CLOSE
from indpriv.leakage import Observation
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

PICTURES = 6
DATA = ("mnist", "lfw_people")
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
    "reproduced where the share that is back falls in this order on each data set, differs where it never rises"
)
ORDER = ("none", "adaclip", "quantile", "baseline", "dyn[S,sigma]")  # the most leaking first
_NOISE = {"none": None, "clipping": 0.0, "little noise": 0.01, "baseline": paper.NOISE}


def leakage(names: tuple[str, ...] = DATA, pictures: int = PICTURES) -> list[dict[str, Any]]:
    """One row for each data set, protection and attack; minutes on a core."""
    return [
        {"protection": protection, **row}
        for gallery in (Gallery.of(name, pictures) for name in names)
        for protection, noise in _NOISE.items()
        for row in gallery.attacked(
            _seen(noise), ATTACKS if noise is not None else ["as published"]
        )
    ]


def _seen(noise: float | None) -> Observation:
    """A row's gradient; noise of sigma C in each parameter is sigma / sqrt(M) of the whole norm."""
    if noise is None:
        return Observation()
    root = math.sqrt(PARAMETERS)
    return Observation(
        max_grad_norm=paper.CLIP * root, clipping="per_layer", noise_multiplier=noise / root
    )


def verdicts_of_leakage(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The word of each of `CLAIMS`, by `RULE`."""
    if {row["data"] for row in rows} != set(DATA):
        return dict.fromkeys(CLAIMS, NOT_RUN)

    def back(protection: str) -> list[float]:
        """The share of each data set that the best attack of all brings back."""
        return [
            max(r["close"] for r in rows if (r["data"], r["protection"]) == (data, protection))
            for data in DATA
        ]

    return dict(
        zip(
            CLAIMS,
            (
                _on_each([share >= LEAKS for share in back("none")]),
                _on_each([share > 0 for share in back("baseline")]),
                _order(rows, back),
            ),
            strict=True,
        )
    )


def _order(rows: list[dict[str, Any]], back: Callable[[str], list[float]]) -> str:
    if not set(ORDER) <= {row["protection"] for row in rows}:
        return NOT_RUN
    steps = [
        higher - lower
        for pair in pairwise(ORDER)
        for higher, lower in zip(*map(back, pair), strict=True)
    ]
    if min(steps) < 0:
        return NOT_REPRODUCED
    return REPRODUCED if min(steps) > 0 else DIFFERS


def _on_each(found: list[bool]) -> str:
    return REPRODUCED if all(found) else DIFFERS if any(found) else NOT_REPRODUCED


def leakage_section(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Table III beside ours; empty without rows."""
    if not rows:
        return
    protections = {
        "none": "none",
        "clipping": f"clipping, C = {paper.CLIP:g}",
        "little noise": "clipping, sigma = 0.01",
        "baseline": f"clipping, sigma = {paper.NOISE:g}",
    }
    yield from ("## Table III and Figure 5: pictures from one gradient", "")
    yield table(
        [
            *("data", "protection", "attack", f"error < {SUCCESS:.2f}", f"error < {CLOSE:g}"),
            *("median error", "identified", "at most", "iterations"),
        ],
        [
            [
                row["data"],
                protections[row["protection"]],
                NAMES[row["attack"]],
                *cells(row),
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
    return f"{sum(count(r, column) for r in chosen)} of {sum(r['n'] for r in chosen)}"
