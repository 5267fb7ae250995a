"""What `indpriv attack` prints of an attack's scores: a screen for people, a document for machines. Sensitive."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from indpriv._formatting import format_delta, format_interval, format_lower_bound, format_share
from indpriv._plain import to_json
from indpriv.analysis.attacks.measures import AttackMeasure, AttackMeasures
from indpriv.analysis.summary import SENSITIVE
from indpriv.report.renderers.terminal import clean, print_whole

MEANING = (
    "The lower bound is on the worst-case epsilon that differential privacy promises to everybody (add/remove one "
    "example), not on anybody's output-specific epsilon. A bound of 0 proves nothing: none seen is not none."
)
_MOST_ROWS = 40


def attack_document(measures: AttackMeasures) -> dict[str, Any]:
    """The JSON of `indpriv attack --json`: figures of all examples, then the same of each group."""
    return {
        "sensitive": SENSITIVE,
        "attack": measures.attack,
        "method": measures.method,
        "confidence": measures.confidence,
        "delta": measures.delta,
        "seed": measures.seed,
        "meaning": MEANING,
        **_row(measures.overall, measures.null_trials),
        "groups": [
            {"name": row.name, **_row(row, measures.null_trials)} for row in measures.groups
        ],
    }


def _row(row: AttackMeasure, trials: int) -> dict[str, Any]:
    found, bound = row.discrimination, row.bound
    names = (
        "auc",
        "auc_interval",
        "tpr_at_fpr",
        "tpr_at_fpr_intervals",
        "advantage",
        "advantage_interval",
    )
    return {
        "n_members": row.n_members,
        "n_nonmembers": row.n_nonmembers,
        "too_small": row.too_small,
        **{name: None if found is None else to_json(getattr(found, name)) for name in names},
        "epsilon_lower_bound": bound.epsilon,
        "guesses": bound.guesses,
        "correct": bound.correct,
        "thresholds_tried": bound.tried,
        "null_calibration": {
            "false_alarm_rate": bound.false_alarm_rate,
            "interval": to_json(bound.false_alarm_interval),
            "trials": trials,
        },
        **({"roc": to_json(found.roc)} if found is not None and found.roc else {}),
    }


def print_attack(measures: AttackMeasures, console: Console) -> None:
    """Print what the scores of one attack prove."""
    console.print(Text(SENSITIVE, style="bold red"))
    console.print(
        Text(
            f"{clean(measures.attack)}; intervals and bounds at {format_share(measures.confidence)} confidence"
        )
    )
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("", no_wrap=True)
    columns = (
        "members",
        "others",
        "AUC",
        "TPR at 0.1 % FPR",
        "at 1 %",
        "advantage",
        "epsilon at least",
        "false alarms",
    )
    for column in columns:
        grid.add_column(column, justify="right", no_wrap=True)
    for row in (measures.overall, *measures.groups[:_MOST_ROWS]):
        grid.add_row(Text(clean(row.name) + (" (too few)" if row.too_small else "")), *_cells(row))
    print_whole(grid, console)
    if len(measures.groups) > _MOST_ROWS:
        console.print(Text(f"{len(measures.groups) - _MOST_ROWS:,} more groups are in --json"))
    console.print(
        Text(
            f"Lower bound at delta {format_delta(measures.delta)}: {measures.method}; corrected for the thresholds tried, "
            "and over groups. False alarms: how often it is above 0 for memberships drawn at random "
            f"({measures.null_trials:,} trials)."
        )
    )
    console.print(Text(MEANING))


def _cells(row: AttackMeasure) -> list[str]:
    cells = [f"{row.n_members:,}", f"{row.n_nonmembers:,}"]
    found, bound = row.discrimination, row.bound
    if found is None:
        cells += ["–"] * 4
    else:
        interval = found.auc_interval
        behind = "" if interval is None else f" {format_interval(interval.low, interval.high)}"
        advantage = format_interval(found.advantage_interval.low, found.advantage_interval.high)
        cells += [f"{found.auc:.3f}{behind}"]
        cells += [format_share(rate, 1) for rate in found.tpr_at_fpr.values()]
        cells += [f"{found.advantage:.2f} {advantage}"]
    return [*cells, format_lower_bound(bound.epsilon), format_share(bound.false_alarm_rate, 1)]
