"""What `indpriv attack` reports of an attack's scores: a screen, and a JSON document. Sensitive."""

from typing import Any

from rich.console import Console

from indpriv._formatting import format_delta, format_lower_bound, format_share
from indpriv._plain import to_json
from indpriv.analysis.attacks.measures import AttackMeasure, AttackMeasures
from indpriv.analysis.summary import SENSITIVE
from indpriv.report.document import Paragraph, Table, paragraph, table
from indpriv.report.renderers.terminal import print_blocks
from indpriv.report.wording import MOST_ROWS, NO_EVIDENCE, after

MEANING = (
    "The lower bound is on the worst-case epsilon that differential privacy promises for every "
    "example (add/remove one example), not on the output-specific epsilon of any one. A bound of "
    "0 proves nothing. " + NO_EVIDENCE
)
_HEAD = (
    "",
    "members",
    "others",
    "AUC",
    "TPR at 0.1 % FPR",
    "at 1 %",
    "advantage",
    "epsilon at least",
    "false alarms",
)


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
    rows = (measures.overall, *measures.groups[:MOST_ROWS])
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(
            f"{measures.attack}; intervals and bounds at {format_share(measures.confidence)} "
            "confidence"
        ),
        table(_HEAD, [(row.name + " (too few)" * row.too_small, *_cells(row)) for row in rows]),
    ]
    if len(measures.groups) > MOST_ROWS:
        text = f"{len(measures.groups) - MOST_ROWS:,} more groups are in --json"
        blocks.append(paragraph(text))
    blocks += [
        paragraph(
            f"Lower bound at delta {format_delta(measures.delta)}: {measures.method}; corrected "
            "for the thresholds tried, and over groups. False alarms: how often the bound is "
            f"above 0 for memberships drawn at random ({measures.null_trials:,} trials)."
        ),
        paragraph(MEANING),
    ]
    print_blocks(blocks, console)


def _cells(row: AttackMeasure) -> list[str]:
    cells = [f"{row.n_members:,}", f"{row.n_nonmembers:,}"]
    found, bound = row.discrimination, row.bound
    if found is None:
        cells += ["–"] * 4
    else:
        cells += [f"{found.auc:.3f}{after(found.auc_interval)}"]
        cells += [format_share(rate, 1) for rate in found.tpr_at_fpr.values()]
        cells += [f"{found.advantage:.2f}{after(found.advantage_interval)}"]
    return [*cells, format_lower_bound(bound.epsilon), format_share(bound.false_alarm_rate, 1)]
