"""What `indpriv attack` reports of an attack's scores: a screen, and a JSON document. Sensitive."""

from typing import Any

from rich.console import Console

from indpriv._formatting import format_delta, format_lower_bound, format_share
from indpriv._plain import to_json
from indpriv.analysis.attacks.lower_bound import NULL_TRIALS
from indpriv.analysis.attacks.rates import ALL, MIN_TRIALS, AttackMeasures, interval, parts
from indpriv.analysis.statistics.intervals import CONFIDENCE
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
    *("", "members", "others", "AUC", "TPR at 0.1 % FPR", "at 1 %", "advantage"),
    *("epsilon at least", "false alarms"),
)


def attack_document(measures: AttackMeasures) -> dict[str, Any]:
    """The JSON of `indpriv attack --json`: every rate of all examples, then of each group."""
    return {"sensitive": SENSITIVE, "meaning": MEANING, **to_json(measures)}


def print_attack(measures: AttackMeasures, console: Console) -> None:
    """Print what the scores of one attack prove."""
    groups = parts(measures.rates, by="group")
    rows = [(ALL, measures.overall), *list(groups.items())[:MOST_ROWS]]
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(
            f"{measures.attack}; intervals and bounds at {format_share(CONFIDENCE)} confidence"
        ),
        table(_HEAD, [_cells(name, of) for name, of in rows]),
    ]
    if len(groups) > MOST_ROWS:
        blocks.append(paragraph(f"{len(groups) - MOST_ROWS:,} more groups are in --json"))
    blocks += [
        paragraph(
            f"Lower bound at delta {format_delta(measures.delta)}: {measures.method}; corrected "
            "for the thresholds tried, and over groups. False alarms: how often the bound is "
            f"above 0 for memberships drawn at random ({NULL_TRIALS:,} trials)."
        ),
        paragraph(MEANING),
    ]
    print_blocks(blocks, console)


def _cells(name: str, of: dict[str, Any]) -> list[str]:
    bound = of["epsilon"]
    few = min(bound.n_members, bound.n_others) < MIN_TRIALS
    cells = [name + " (too few)" * few, f"{bound.n_members:,}", f"{bound.n_others:,}"]
    if "auc" not in of:
        cells += ["–"] * 4
    else:
        cells += [f"{of['auc'].value:.3f}{after(interval(of['auc']))}"]
        cells += [format_share(of[rate].value, 1) for rate in ("tpr_0.001", "tpr_0.01")]
        cells += [f"{of['advantage'].value:.2f}{after(interval(of['advantage']))}"]
    return [*cells, format_lower_bound(bound.value), format_share(of["false_alarms"].value, 1)]
