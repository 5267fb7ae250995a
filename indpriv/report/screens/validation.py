"""The terminal's view of `indpriv validate`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from indpriv._plain import to_json
from indpriv.analysis.attacks.account_test import Identity
from indpriv.analysis.attacks.canary_bounds import BOUNDS
from indpriv.analysis.attacks.canary_findings import EACH_BY_ITSELF, CanaryResults


def validation_document(
    found: Sequence[Identity], canaries: Mapping[str, CanaryResults]
) -> dict[str, Any]:
    """What --json prints."""
    return {
        "identities": [{**to_json(one), "z": one.z} for one in found],
        "canaries": {run: to_json(of.lengths) for run, of in canaries.items()},
        "canaries_left_out": {run: list(of.left_out) for run, of in canaries.items()},
    }


def print_validation(
    found: Sequence[Identity],
    canaries: Mapping[str, CanaryResults],
    console: Console,
) -> None:
    """Print the identities, and the bounds that canaries prove."""
    if found:
        table = Table("identity", title="The attacker who sees every update, beside the account")
        for name in ("mean", "predicted", "error", "z"):
            table.add_column(name, justify="right")
        for one in found:
            cells = (one.mean, one.expected, one.standard_error)
            table.add_row(one.name, *(f"{cell:.4f}" for cell in cells), f"{one.z:+.1f}")
        console.print(table)
    for run, of in canaries.items():
        table = Table("length", "in / out", title=f"Gradient canaries of {run}: lower bounds")
        for name in (*BOUNDS, "account", "agrees"):
            table.add_column(name, justify="right")
        for row in of.lengths:
            table.add_row(
                f"{row.length:g}",
                f"{row.n_members} / {row.n_others}",
                *(f"{bound.epsilon:.2f}" for bound in row.bounds),
                f"{row.ceiling:.2f}",
                "yes" if row.agrees else f"NO (p = {row.p_value:.1g})",
            )
        console.print(table)
        for text in of.left_out:
            console.print(text)
        console.print(EACH_BY_ITSELF)
        for key, method in BOUNDS.items():
            console.print(f"{key}: {method.title}. It assumes: {method.assumption}.")
