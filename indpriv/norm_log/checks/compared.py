"""What a Recorder found when it compared training with its own recomputation."""

from __future__ import annotations

from indpriv.norm_log.evidence import ASSUMPTIONS, COMPARISONS, NOT_COMPARED, Check
from indpriv.norm_log.session_counts import TrainingCounts

_SHARE = 0.2  # of the steps: a fault in as many is what the odds are about


def compared_checks(training: TrainingCounts) -> list[Check]:
    """One check for each comparison of a session, whether it was made or not."""
    return [_check(key, training) for key in COMPARISONS]


def _check(key: str, training: TrainingCounts) -> Check:
    assumption, counts, steps = ASSUMPTIONS[key], training.compared, training.batches.steps
    if counts is None:
        return assumption.not_checked(NOT_COMPARED)
    found = counts.found.get(key)
    if found is None:
        return assumption.not_checked(f"not compared at any of {steps:,} steps")
    if found.refuted:
        return assumption.failed(f"{found.detail} ({found.refuted:,} of {found.steps:,} steps)")
    if found.unknown:
        return assumption.not_checked(f"{found.detail} ({found.unknown:,} of {steps:,} steps)")
    odds = ""
    if found.steps < steps:
        missed = (1 - _SHARE) ** found.steps
        odds = (
            f" drawn by secret coins; a fault in a fifth of the steps would be missed in "
            f"{max(100 * missed, 0.01):.2g} % of runs"
        )
    note = f" ({found.detail})" if found.detail else ""
    compared = min(found.steps, steps)  # the state is compared once more at the end
    return assumption.passed(f"equal at {compared:,} of {steps:,} steps{odds}{note}")
