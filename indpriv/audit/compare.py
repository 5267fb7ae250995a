"""Comparing audit directories of the same data. Sensitive."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from indpriv._plain import to_json
from indpriv.analysis.audited_run import choose_groups
from indpriv.analysis.comparison import AuditComparison, compare_tables, stability_of
from indpriv.analysis.schedule import CurveReading, read_curve
from indpriv.analysis.summary import Audit
from indpriv.audit.audit_directory import audit_in, read_audit, read_summary
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


def compare_audits(
    audit_dirs: Sequence[Path],
    by: Sequence[str] = (),
    *,
    at_epsilon: float | None = None,
    at_accuracy: float | None = None,
) -> AuditComparison:
    """Compare two or more audits of the same data.

    Args:
        audit_dirs: audit directories, each once; a run stands for the audit in it.
        by: columns to group by; default the label and every metadata column.
        at_epsilon: worst case at which test accuracies are read off the curves of the runs.
        at_accuracy: test accuracy at which worst cases are read off them.

    Raises:
        InputError: fewer than two directories, one of them twice, or audits that cannot be
            compared.
    """
    _check_places(at_epsilon, at_accuracy)
    folders = [audit_in(Path(folder).resolve()) for folder in audit_dirs]
    if len(folders) < 2 or len(set(folders)) < len(folders):
        raise InputError(
            f"there are {len(set(folders))} different audit directories; pass two or more, each "
            "once: indpriv show reports/one reports/two"
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
    readings: tuple[CurveReading | None, ...] = ()
    if at_epsilon is not None or at_accuracy is not None:
        wanted = at_epsilon, at_accuracy
        readings = tuple(
            read_curve(
                one.schedule, one.guarantee.worst_case_epsilon, one.individual.median, *wanted
            )
            for one in map(Audit.from_json, summaries)
        )
    return AuditComparison(summaries, comparisons, stability, at_epsilon, at_accuracy, readings)


def _check_places(at_epsilon: float | None, at_accuracy: float | None) -> None:
    if at_epsilon is not None and not 0 < at_epsilon < np.inf:
        raise InputError(f"at_epsilon={at_epsilon:g} is not positive and finite")
    if at_accuracy is not None and not 0 <= at_accuracy <= 1:
        raise InputError(f"at_accuracy={at_accuracy:g} is not in [0, 1]; 0.95 means 95 %")


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
        "at_epsilon": found.at_epsilon,
        "at_accuracy": found.at_accuracy,
        "readings": to_json(found.readings),
    }


def _side(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: summary.get(name) for name in _MEANING}, "guarantee": summary["guarantee"]}
