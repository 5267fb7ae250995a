"""The terminal's view of `indpriv validate`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from indpriv._plain import to_json
from indpriv.analysis.attacks.account_test import Identity
from indpriv.analysis.attacks.canary_bounds import BOUNDS
from indpriv.analysis.attacks.canary_findings import EACH_BY_ITSELF, CanaryResults
from indpriv.report.document import Paragraph, Table, paragraph, table
from indpriv.report.renderers.terminal import print_blocks


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
    blocks: list[Paragraph | Table] = []
    if found:
        rows = [
            (
                one.name,
                *(f"{cell:.4f}" for cell in (one.mean, one.expected, one.standard_error)),
                f"{one.z:+.1f}",
            )
            for one in found
        ]
        head = ("identity", "mean", "predicted", "error", "z")
        blocks.append(
            table(head, rows, caption="The attacker who sees every update, beside the account")
        )
    for run, of in canaries.items():
        blocks.append(_of_canaries(run, of))
        blocks += map(paragraph, of.left_out)
        blocks.append(paragraph(EACH_BY_ITSELF))
        blocks += [
            paragraph(f"{key}: {method.title}. It assumes: {method.assumption}.")
            for key, method in BOUNDS.items()
        ]
    print_blocks(blocks, console)


def _of_canaries(run: str, of: CanaryResults) -> Table:
    rows = [
        (
            f"{row.length:g}",
            f"{row.n_members} / {row.n_others}",
            *(f"{bound.epsilon:.2f}" for bound in row.bounds),
            f"{row.ceiling:.2f}",
            "yes" if row.agrees else f"NO (p = {row.p_value:.1g})",
        )
        for row in of.lengths
    ]
    head = ("length", "in / out", *BOUNDS, "account", "agrees")
    return table(head, rows, caption=f"Gradient canaries of {run}: lower bounds")
