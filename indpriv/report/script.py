"""The page's script, its hash for the page's policy, and the data that its search reads. Sensitive.

Every text of the data is made here as the rest of the page shows it; the script only picks texts.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from indpriv._formatting import format_epsilon, format_share, format_share_up
from indpriv._shown import clean
from indpriv.analysis.lookup import CLIPPED, Lookup
from indpriv.analysis.summary import Audit
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, EpsilonTable


@cache
def page_script() -> str:
    """The script of every page."""
    return (Path(__file__).parent / "templates/report.js").read_text(encoding="utf-8")


def script_hash() -> str:
    """What a Content-Security-Policy calls the script."""
    digest = hashlib.sha256(page_script().encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def search_data(summary: Audit, lookup: Lookup) -> Markup:
    """What the search reads, as JSON that can stand inside a script element.

    A coding has the facts that one code per example picks: each a name, and the text of each code.
    """
    table = lookup.table
    ids = table.example_ids
    data = {
        "what": table.account.plural[:-1],
        "n": len(table),
        # Ids that are positions need no list.
        "ids": None
        if np.array_equal(ids, np.arange(len(ids)))
        else [clean(str(one)) for one in ids.tolist()],
        "codings": [
            *_figures(summary, table),
            *(
                _coding([(clean(f"Group by {g.by}"), list(map(clean, g.names)))], g.codes)
                for g in lookup.groupings
            ),
        ],
        "steps": lookup.steps,
        "norms": _packed(lookup.norms, 1),
        "clipped": CLIPPED,
    }
    text = json.dumps(data, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _figures(summary: Audit, table: EpsilonTable) -> list[dict[str, Any]]:
    """Epsilon and what it would mean to an attacker; for units, their rows and their worst case."""
    shown, largest, codes = _shown(table.epsilon)
    facts = [(f"Individual epsilon ({summary.claim})", shown)]
    if summary.guarantee.stands:
        title = (
            f"Membership test at {format_share(FALSE_POSITIVE_RATE)} false alarms, if this epsilon "
            "were a guarantee"
        )
        own = np.zeros(len(shown))
        np.maximum.at(own, codes, table.details.get("true_positive_limit", np.float64(1.0)))
        limits = map(summary.guarantee.true_positive_limit, largest, own.tolist())
        facts.append((title, [f"finds it in at most {format_share_up(each)}" for each in limits]))
    found = [_coding(facts, codes)]
    if "unit_worst_case" in table.details:
        shown, _, codes = _shown(table.details["unit_worst_case"].astype(np.float64))
        found.append(_coding([("Worst case of this number of rows", shown)], codes))
        rows, codes = np.unique(table.details["n_rows"], return_inverse=True)
        found.append(_coding([("Rows", [f"{each:,}" for each in rows.tolist()])], codes))
    return found


def _shown(epsilon: NDArray[np.float64]) -> tuple[list[str], list[float], NDArray[np.integer]]:
    """The distinct texts of some epsilons, each rounded up, the largest epsilon of each, and codes.

    Texts grow with the epsilon, so that equal ones are neighbours.
    """
    values, inverse = np.unique(epsilon, return_inverse=True)
    texts = list(map(format_epsilon, values.tolist()))
    first = np.array([k == 0 or text != texts[k - 1] for k, text in enumerate(texts)])
    last = np.append(first[1:], True)
    codes = (np.cumsum(first) - 1)[inverse]
    kept = [text for text, new in zip(texts, first, strict=True) if new]
    return kept, values[last].tolist(), codes


def _coding(
    facts: Sequence[tuple[str, Sequence[str]]], codes: NDArray[np.integer]
) -> dict[str, Any]:
    n_values = len(facts[0][1])
    width = 1 if n_values <= 1 << 8 else 2 if n_values <= 1 << 16 else 4
    return {"facts": facts, "bytes": width, "codes": _packed(codes, width)}


def _packed(codes: NDArray[np.integer], width: int) -> str:
    """Little-endian unsigned integers of this many bytes, in base64."""
    return base64.b64encode(codes.astype(f"<u{width}").tobytes()).decode("ascii")
