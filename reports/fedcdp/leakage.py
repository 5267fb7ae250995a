"""Table VII and Figures 1, 4 and 5: pictures from what a client computes in its first local step.

See reports/shared/pictures.py for network and attack. C and sigma are of each parameter of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
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
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED

PICTURES, BATCH, FIRST_CLIP = 6, 3, 6.0  # Fed-CDP(decay) begins with C = 6
DATA = ("mnist", "lfw_people")
BATCHES, ROWS = "types 0 and 1", "type 2"
NO_DP, SDP, CDP = "no DP", "Fed-SDP", "Fed-CDP"
ORDINARY = f"{NO_DP}, parameters drawn as PyTorch does"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
LEAKS = 5 / 6  # of the rows, where a system is said to leak
LEAST_SENT = 0.7  # "for compression ratios up to 30 %"
CLAIMS = {
    "VII, type 2": "type 2 succeeds without DP and with Fed-SDP, and fails with Fed-CDP",
    "VII, types 0 and 1, success": "types 0 and 1 succeed without DP",
    "VII, types 0 and 1, failure": "types 0 and 1 fail with Fed-SDP, Fed-CDP and Fed-CDP(decay)",
    "VII, order": "Fed-CDP(decay) keeps furthest from the picture, then Fed-CDP, then Fed-SDP",
    "Figure 5": "type 2 succeeds where up to 30 % of the coordinates are not sent",
}
RULE = (
    f"a row is back where its error is below {CLOSE:g}. Type 2: reproduced where 5 of {PICTURES} rows or more are back "
    "without DP, which Fed-SDP leaves as they are, and none from Fed-CDP with noise on each row; differs otherwise. Types 0 "
    "and 1, success: reproduced where 5 of 6 are back without DP, differs where as many are only told from other pictures of their label; "
    "failure: not judged where there was no success, else reproduced where no attack brings any row back. Order: reproduced where the "
    "median errors of the published attack rise in this order, for each type and data set, differs where none falls by more than "
    "0.02. Pruned: reproduced where 5 of 6 are back at each share up to 30 %, differs where at some"
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

    Pruning and another start of the network are tried on MNIST only.
    """
    small = Gallery.of(DATA[0], pictures, drawn_wide=False)
    ordinary = [
        {"type": ROWS, "system": ORDINARY, **row}
        for row in small.attacked(Observation(), ["as published"])
    ]
    return ordinary + [
        {"type": kind, "system": system, **row}
        for name in names
        for kind in (BATCHES, ROWS)
        for gallery in [gallery_of(name, kind, pictures)]
        for (its_kind, system), observation in seen().items()
        if its_kind == kind and (name == DATA[0] or observation.share == 1)
        for row in gallery.attacked(
            observation,
            ["as published"] if observation.max_grad_norm is None else ["as published", "informed"],
        )
    ]


def gallery_of(name: str, kind: str, pictures: int = PICTURES) -> Gallery:
    """The pictures that are attacked, of a type, and those that they are told from.

    In a batch, whose labels are known, these are of the same label: of LFW all that are left, since
    few persons have two among 100 pictures.
    """
    everyone = kind == BATCHES and name != DATA[0]
    return Gallery.of(name, pictures, candidates=None if everyone else CANDIDATES)


def verdicts_of_leakage(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The word of each of `CLAIMS`, by `RULE`."""
    return dict(
        zip(
            CLAIMS,
            (_type_2(rows), *_types_0_and_1(rows), _order(rows), _pruned(rows)),
            strict=True,
        )
    )


def _of(rows: list[dict[str, Any]], kind: str, system: str, column: str = "close") -> list[float]:
    return [row[column] for row in rows if (row["type"], row["system"]) == (kind, system)]


def _type_2(rows: list[dict[str, Any]]) -> str:
    plain = _of(rows, ROWS, f"{NO_DP}, {SDP}")
    noisy = _of(rows, ROWS, f"{CDP}, noise on each row")
    if min(len(plain), len(noisy)) < len(DATA):
        return NOT_RUN
    return REPRODUCED if min(plain) >= LEAKS and max(noisy) == 0 else DIFFERS


def _types_0_and_1(rows: list[dict[str, Any]]) -> tuple[str, str]:
    bare = _of(rows, BATCHES, NO_DP)
    systems = (f"{SDP}, noise of the client", CDP, f"{CDP}(decay)")
    noisy = [share for system in systems for share in _of(rows, BATCHES, system)]
    if not bare or not noisy:
        return NOT_RUN, NOT_RUN
    told = min(_of(rows, BATCHES, NO_DP, "identified")) >= LEAKS
    success = REPRODUCED if min(bare) >= LEAKS else DIFFERS if told else NOT_REPRODUCED
    if success == NOT_REPRODUCED:
        return success, NOT_RUN
    return success, REPRODUCED if max(noisy) == 0 else NOT_REPRODUCED


def _order(rows: list[dict[str, Any]]) -> str:
    orders = {
        BATCHES: (f"{SDP}, noise of the client", CDP, f"{CDP}(decay)"),
        ROWS: (f"{CDP}, noise on each row", f"{CDP}(decay), noise on each row"),
    }
    steps = []
    for kind, systems in orders.items():
        errors = [
            _of([r for r in rows if r["attack"] == "as published"], kind, system, "error")
            for system in systems
        ]
        if not all(errors):
            return NOT_RUN
        steps += [b - a for less, more in pairwise(errors) for a, b in zip(less, more, strict=True)]
    if min(steps) > 0:
        return REPRODUCED
    return DIFFERS if min(steps) >= -0.02 else NOT_REPRODUCED


def _pruned(rows: list[dict[str, Any]]) -> str:
    shares = [
        _of(rows, ROWS, f"{NO_DP}, {1 - share:.0%} pruned")
        for share in SHARES
        if share >= LEAST_SENT
    ]
    if not all(shares):
        return NOT_RUN
    enough = [min(each) >= LEAKS for each in shares]
    return REPRODUCED if all(enough) else DIFFERS if any(enough) else NOT_REPRODUCED


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
        "one row. A server that adds the noise of Fed-SDP itself reads what has no DP. A row's picture among",
        f"{CANDIDATES} candidates is identified by chance in 1 % of the cases; one of a batch, whose labels the attacker",
        "knows, among those of its label, more often: there are about ten of a digit, and of LFW all others",
        f"of the person. At most: the share that no attack can pass on average. An attack stops after {ITERATIONS} iterations. The informed attack",
        "knows the candidates. Noise once a batch, as in the published code, leaves the gradient of a",
        "row clipped and nothing else. Pruned: the smallest coordinates are not sent. The attacked",
        "network is smooth, untrained, and drawn far wider than any that is trained: drawn as PyTorch",
        "draws it, the same network gives the first row.",
        "",
    )
