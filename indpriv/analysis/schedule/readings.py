"""Accuracy at an epsilon and epsilon at an accuracy, read off the curve of an audited run."""

from __future__ import annotations

from dataclasses import dataclass

from indpriv._plain import AtLeastZero, Share
from indpriv.analysis.summary import Audit


@dataclass(frozen=True)
class CurveReading:
    """What the checkpoints of one run say.

    Attributes:
        held_fixed: see `ScheduleFindings.held_fixed`.
        accuracy: test accuracy when the worst case was the epsilon asked for.
        epsilon, step: worst case, and number of steps, when test accuracy first reached the one
            asked for.
        worst_case_epsilon, median_epsilon: of the whole run.

    A value is None where it was not asked for or lies beyond the checkpoints; each epsilon is None
    for a run that has no privacy.
    """

    held_fixed: str
    accuracy: Share | None
    epsilon: AtLeastZero | None
    step: AtLeastZero | None
    worst_case_epsilon: AtLeastZero | None
    median_epsilon: AtLeastZero | None


def read_curve(
    summary: Audit, at_epsilon: float | None, at_accuracy: float | None
) -> CurveReading | None:
    """The reading of an audit; None where its run kept no curve."""
    found = summary.schedule
    if found is None or found.curve is None:
        return None
    curve, private = found.curve, bool(found.curve.epsilon)
    return CurveReading(
        found.held_fixed,
        None if at_epsilon is None else curve.accuracy_at(at_epsilon),
        None if at_accuracy is None else curve.epsilon_at(at_accuracy),
        None if at_accuracy is None else curve.step_at(at_accuracy),
        summary.guarantee.worst_case_epsilon if private else None,
        summary.individual.median if private else None,
    )
