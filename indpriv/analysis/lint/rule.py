"""Rule: what one setting of DP-SGD should be, who says so, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from indpriv.analysis.lint.training_facts import TrainingFacts
from indpriv.norm_log.evidence import FAILED, NOT_CHECKED, PASSED

# A run with an error has no guarantee worth the name; a warning costs accuracy or privacy; a note
# names something that may be worth trying.
SEVERITIES = ERROR, WARNING, NOTE = ("error", "warning", "note")


# What several rules need.
N_AND_DELTA = (
    "delta (--set delta=... for a run) and the number of examples (--data-dir for an audit file)"
)
PLAN_AND_DELTA = f"{N_AND_DELTA}, and noise and sampling rate that do not change"


class Judgement(NamedTuple):
    """Whether a rule holds, and the figures that show it."""

    holds: bool
    figures: str


@dataclass(frozen=True)
class Rule:
    """One rule. Its threshold is a rule of thumb unless the rule says otherwise.

    Attributes:
        key: identifies it in code and files; never changes.
        severity: of a violation.
        title: what should hold, as a sentence without its full stop.
        literature: what the source says.
        source: author, year and arXiv number.
        advice: what to do if the rule does not hold.
        needs: what it has to know.
        judge: None if what it needs is not known.
    """

    key: str
    severity: str
    title: str
    literature: str
    source: str
    advice: str
    needs: str
    judge: Callable[[TrainingFacts], Judgement | None]


@dataclass(frozen=True)
class Finding:
    """One rule applied to an audit file or a run; other attributes are those of the rule.

    Attributes:
        status: "passed", "failed" or "not checked".
        figures: what this file or run shows; if not checked, what would have to be known.
    """

    key: str
    severity: str
    title: str
    status: str
    figures: str
    literature: str
    source: str
    advice: str


def apply(rule: Rule, facts: TrainingFacts) -> Finding:
    """What a rule finds."""
    judged = rule.judge(facts)
    if judged is None:
        status, figures = NOT_CHECKED, f"This rule needs {rule.needs}."
    else:
        status, figures = PASSED if judged.holds else FAILED, judged.figures
    return Finding(
        rule.key,
        rule.severity,
        rule.title,
        status,
        figures,
        rule.literature,
        rule.source,
        rule.advice,
    )
