"""Table VII and Figures 1, 4 and 5: pictures from what a client computes in its first local step.

See reports/shared/pictures.py for network and attack. C and sigma are of each parameter of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from indpriv.analysis.reconstruction import CLOSE
from indpriv.leakage import Observation
from reports.fedcdp import paper
from reports.shared.markdown_table import table
from reports.shared.pictures import (
    CANDIDATES,
    ITERATIONS,
    NAMES,
    PARAMETERS,
    SUCCESS,
    Gallery,
    cells,
)
from reports.shared.verdicts import DIFFERS, NOT_RUN, REPRODUCED

PICTURES, BATCH, FIRST_CLIP = 6, 3, 6.0  # Fed-CDP(decay) begins with C = 6
DATA = ("mnist", "lfw_people")
BATCHES, ROWS = "types 0 and 1", "type 2"
NO_DP, SDP, CDP = "no DP", "Fed-SDP", "Fed-CDP"
ORDINARY = f"{NO_DP}, parameters drawn as PyTorch does"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
RULE = (
    f"reproduced where 5 of {PICTURES} rows or more come back (error below {CLOSE:g}) without DP, which "
    "Fed-SDP leaves as they are, and none from Fed-CDP with noise on each row"
)


def _per_layer(clip: float = paper.CLIP, noise: float = paper.NOISE) -> dict[str, Any]:
    """Clipping of each parameter at C with noise sigma C on it, as one norm of all."""
    root = math.sqrt(PARAMETERS)
    return {"max_grad_norm": clip * root, "clipping": "per_layer", "noise_multiplier": noise / root}


def seen() -> Mapping[tuple[str, str], Observation]:
    """What is read at a client, by type and system."""
    update = {"local_steps": 1, "learning_rate": paper.LOCAL_RATE}
    return {
        (BATCHES, NO_DP): Observation("batch", BATCH),
        (BATCHES, f"{SDP}, noise of the client"): Observation(
            "update", BATCH, **update, **_per_layer()
        ),
        (BATCHES, CDP): Observation("batch", BATCH, **_per_layer()),
        (BATCHES, f"{CDP}(decay)"): Observation("batch", BATCH, **_per_layer(FIRST_CLIP)),
        (ROWS, f"{NO_DP}, {SDP}"): Observation(),
        (ROWS, f"{CDP}, noise on each row"): Observation(**_per_layer()),
        (ROWS, f"{CDP}(decay), noise on each row"): Observation(**_per_layer(FIRST_CLIP)),
        (ROWS, f"{CDP}, noise once a batch"): Observation(**_per_layer(noise=0.0)),
        **{
            (ROWS, f"{NO_DP}, {1 - share:.0%} pruned"): Observation(share=share) for share in SHARES
        },
    }


def leakage(names: tuple[str, ...] = DATA, pictures: int = PICTURES) -> list[dict[str, Any]]:
    """One row for each data set, type, system and attack; minutes on a core.

    Batches, pruning and another start of the network are tried on MNIST only.
    """
    small = Gallery.of(DATA[0], pictures, drawn_wide=False)
    ordinary = [
        {"type": ROWS, "system": ORDINARY, **row}
        for row in small.attacked(Observation(), ["as published"])
    ]
    return ordinary + [
        {"type": kind, "system": system, **row}
        for gallery in (Gallery.of(name, pictures) for name in names)
        for (kind, system), observation in seen().items()
        if gallery.data == DATA[0] or (kind == ROWS and observation.share == 1)
        for row in gallery.attacked(
            observation,
            ["as published"] if observation.max_grad_norm is None else ["as published", "informed"],
        )
    ]


def verdict_of_leakage(rows: list[dict[str, Any]]) -> str:
    """By `RULE`."""
    if {row["data"] for row in rows} != set(DATA):
        return NOT_RUN
    plain, noisy = (
        [row["close"] for row in rows if row["system"] == system and row["type"] == ROWS]
        for system in (f"{NO_DP}, {SDP}", f"{CDP}, noise on each row")
    )
    both = min(plain) >= 5 / 6 and max(noisy) == 0
    return REPRODUCED if both else DIFFERS


def leakage_section(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Table VII beside ours; empty without rows."""
    if not rows:
        return
    head = [
        *("data", "what is read", "system", "attack"),
        *(f"error < {SUCCESS:.2f}", f"error < {CLOSE:g}", "median error", "identified"),
        *("at most", "iterations"),
    ]
    body = [
        [row["data"], row["type"], row["system"], NAMES[row["attack"]], *cells(row)] for row in rows
    ]
    yield from ("## Table VII and Figures 1, 4 and 5: leakage", "", table(head, body), "")
    systems = (NO_DP, SDP, CDP, f"{CDP}(decay)")
    printed = (
        f"{name}: "
        + ", ".join(f"{s} {error:g}" for s, error in zip(systems, errors, strict=True))
        + "."
        for name, errors in paper.TABLE_7.items()
    )
    yield from (
        "Errors of the paper, whatever succeeded:",
        *printed,
        f"Types 0 and 1 read the gradient of a batch of {BATCH}, or the update it makes; type 2 that of",
        "one row. A server that adds the noise of Fed-SDP itself reads what has no DP. One picture among",
        f"{CANDIDATES} candidates is identified by chance in 1 % of the cases; at most: the share that no",
        f"attack can pass on average. An attack stops after {ITERATIONS} iterations. The informed attack",
        "knows the candidates. Noise once a batch, as in the published code, leaves the gradient of a",
        "row clipped and nothing else. Pruned: the smallest coordinates are not sent. The attacked",
        "network is smooth, untrained, and drawn far wider than any that is trained: drawn as PyTorch",
        "draws it, the same network gives the first row.",
        "",
    )
