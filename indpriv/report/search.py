"""What the page's search reads of each example: its epsilon, groups and norms. Sensitive.

Every text is made here as the rest of the page shows it; the script only picks texts.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray

from indpriv._columns import grouping_of
from indpriv._formatting import clean, format_epsilon, format_share, format_share_up
from indpriv.analysis.norms import evenly_spaced_records, read_one
from indpriv.analysis.summary import Audit
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, EpsilonTable
from indpriv.norm_log.norm_log import NormLog

MOST_EXAMPLES = 100_000  # a page with more would take too long to open
CLIPPED = 101  # the code of a norm above max_grad_norm
_MOST_RECORDS = 16  # norms kept of each example


def search_data(
    audit: Audit, log: NormLog, table: EpsilonTable, train: pd.DataFrame | None
) -> Markup | None:
    """What the search reads, as JSON that can stand inside a script element.

    A coding has the facts that one code per example picks: each a name, and the text of each code.

    Args:
        audit: of the run, whose groupings are shown.
        log: what the table was made of.
        table: its account.
        train: one row for each row of the table, in its order; None where groups are unknown.

    Returns:
        None for more than MOST_EXAMPLES.
    """
    if len(table) > MOST_EXAMPLES:
        return None
    ids, codings = table.example_ids, _figures(audit, table)
    for by in [groups.by for groups in audit.groups]:
        if train is not None:
            found = grouping_of(train, None, by, max_values=None)
            names = list(map(clean, found.names))
            codings.append(_coding([(clean(f"Group by {by}"), names)], found.codes(train)))
    # The norms of a unit's rows are not its own.
    rows = [] if table.account.rows_per_unit else evenly_spaced_records(log, _MOST_RECORDS)
    data = {
        "what": table.account.plural[:-1],
        "n": len(table),
        # Ids that are positions need no list.
        "ids": None
        if np.array_equal(ids, np.arange(len(ids)))
        else [clean(str(one)) for one in ids.tolist()],
        "codings": codings,
        "steps": log.recorded_steps[rows].tolist(),
        "norms": _packed(norms_in_per_cent(log, rows), 1),
        "clipped": CLIPPED,
    }
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def norms_in_per_cent(log: NormLog, rows: Sequence[int]) -> NDArray[np.uint8]:
    """(n_examples, n_records) per cent of max_grad_norm, rounded up; CLIPPED above it."""
    norms = np.zeros((log.n_examples, len(rows)), np.uint8)
    for column, row in enumerate(rows):
        codes, relative, above = read_one(log, row)
        percent = np.minimum(np.ceil(100 * relative * (1 - 1e-9)), 100)
        norms[:, column] = np.where(above, CLIPPED, percent)[codes]
    return norms


def _figures(audit: Audit, table: EpsilonTable) -> list[dict[str, Any]]:
    """Epsilon and what it would mean to an attacker; for units, their rows and their worst case."""
    shown, largest, codes = _shown(table.epsilon)
    facts = [(f"Individual epsilon ({audit.claim})", shown)]
    if audit.guarantee.stands:
        title = (
            f"Membership test at {format_share(FALSE_POSITIVE_RATE)} false alarms, if this epsilon "
            "were a guarantee"
        )
        own = np.zeros(len(shown))
        np.maximum.at(own, codes, table.details.get("true_positive_limit", np.float64(1.0)))
        limits = map(audit.guarantee.true_positive_limit, largest, own.tolist())
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
    texts = np.array([format_epsilon(value) for value in values.tolist()])
    first = np.append(True, texts[1:] != texts[:-1])
    last = np.append(first[1:], True)
    return texts[first].tolist(), values[last].tolist(), (np.cumsum(first) - 1)[inverse]


def _coding(
    facts: Sequence[tuple[str, Sequence[str]]], codes: NDArray[np.integer]
) -> dict[str, Any]:
    n_values = len(facts[0][1])
    width = 1 if n_values <= 1 << 8 else 2 if n_values <= 1 << 16 else 4
    return {"facts": facts, "bytes": width, "codes": _packed(codes, width)}


def _packed(codes: NDArray[np.integer], width: int) -> str:
    """Little-endian unsigned integers of this many bytes, in base64."""
    return base64.b64encode(codes.astype(f"<u{width}").tobytes()).decode("ascii")
