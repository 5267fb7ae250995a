"""Comparing audit directories of the same data. Sensitive."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from indpriv._plain import to_json
from indpriv.analysis.comparison import compare_tables
from indpriv.analysis.stability import AuditComparison, stability_of
from indpriv.audit.audit_directory import read_audit, read_summary
from indpriv.audit.groups import choose_groups
from indpriv.errors import InputError

_MEANING = ("claim", "claim_reason", "name")
_SETTINGS = (
    "noise_multiplier",
    "max_grad_norm",
    "sample_rate",
    "total_steps",
    "n_records",
    "rounding",
    "rounding_mode",
)


def compare_audits(audit_dirs: Sequence[Path], by: Sequence[str] = ()) -> AuditComparison:
    """Compare two or more audits of the same data.

    Args:
        audit_dirs: audit directories, each once.
        by: columns to group by; default the label and every metadata column.

    Raises:
        InputError: fewer than two directories, one of them twice, or audits that cannot be
            compared.
    """
    folders = [Path(folder).resolve() for folder in audit_dirs]
    if len(folders) < 2 or len(set(folders)) < len(folders):
        raise InputError(
            f"there are {len(set(folders))} different audit directories; pass two or more, each "
            "once: indpriv compare reports/one reports/two"
        )
    summaries = tuple(read_summary(folder) for folder in folders)
    audits = [read_audit(folder) for folder in folders]
    table, examples = audits[0]
    train = examples.aligned(table.example_ids)
    columns, _ = choose_groups(train, by, ())
    comparisons = tuple(compare_tables(audits[0], other, columns) for other in audits[1:])
    settings = [_settings(summary) for summary in summaries]
    stability = stability_of(
        [found for found, _ in audits],
        train,
        columns,
        same_settings=all(found == settings[0] for found in settings),
    )
    return AuditComparison(summaries, comparisons, stability)


def _settings(summary: Mapping[str, Any]) -> list[Any]:
    """The settings of the run and of its account that can change epsilons."""
    run, account = summary.get("run", {}), summary.get("account", {})
    return [*(run.get(name) for name in _SETTINGS), account.get("between_records")]


def comparison_json(found: AuditComparison) -> dict[str, Any]:
    """A comparison as JSON values; comparisons[i] compares audits[0] with audits[i + 1]."""
    first = found.summaries[0]
    return {
        "sensitive": first["sensitive"],
        "disclaimer": first["disclaimer"],
        "meaning": first["meaning"],
        "audits": [_side(summary) for summary in found.summaries],
        "comparisons": to_json(found.comparisons),
        "stability": to_json(found.stability),
    }


def _side(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: summary.get(name) for name in _MEANING}, "guarantee": summary["guarantee"]}
