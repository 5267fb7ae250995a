"""Comparing two audit directories. Sensitive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from indpriv.analysis.comparison import Comparison, compare_tables
from indpriv.analysis.summary import to_plain
from indpriv.audit.audit_directory import read_audit, read_summary
from indpriv.audit.findings import choose_groups

_MEANING = ("claim", "claim_reason", "name")


def compare_audits(
    first: Path, second: Path, by: Sequence[str] = ()
) -> tuple[Comparison, dict[str, Any], dict[str, Any]]:
    """Compare two audits of the same data.

    Args:
        first: an audit directory; second: another.
        second: see first.
        by: columns to group by; default the label and every metadata column.

    Returns:
        the comparison, and what audit.json says of each.
    """
    tables = read_audit(Path(first)), read_audit(Path(second))
    summaries = read_summary(Path(first)), read_summary(Path(second))
    table, examples = tables[0]
    columns, _ = choose_groups(examples.aligned(table.example_ids), by, ())
    return compare_tables(*tables, columns), *summaries


def comparison_json(comparison: Comparison, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """A comparison as JSON values, with what the epsilons of each audit mean."""
    return {
        "sensitive": first["sensitive"],
        "disclaimer": first["disclaimer"],
        "meaning": first["meaning"],
        "first": _side(first),
        "second": _side(second),
        **to_plain(comparison),
    }


def _side(summary: dict[str, Any]) -> dict[str, Any]:
    return {**{name: summary.get(name) for name in _MEANING}, "guarantee": summary["guarantee"]}
