"""Noise, clipping and accuracy over training, and five historical rules beside the account."""

from indpriv._formatting import format_epsilon, format_number, format_share
from indpriv.analysis.schedule import ScheduleFindings
from indpriv.analysis.summary import Audit
from indpriv.report.document import Block, Details, Figure, Section, paragraph, table
from indpriv.report.wording import BETWEEN_CHECKPOINTS

_RULES = {
    "basic": "basic composition",
    "advanced": "advanced composition",
    "advanced_as_printed": "advanced composition as Wei and Liu print it",
    "optimal": "optimal composition, as the papers use it",
    "zcdp": "zero-concentrated DP with q²/σ² for each step",
    "moments": "moments accountant of 2017, the only bound among these",
}


def schedule(summary: Audit) -> Section | None:
    """Where noise or clipping moved, or the run kept a curve."""
    found = summary.schedule
    if found is None or (not found.moves and found.curve is None):
        return None
    blocks: tuple[Block, ...] = (
        Figure(
            "schedule",
            (found,),
            "Noise and clipping norm of each step. The worst case depends on the noise multiplier, "
            "their ratio; individual epsilons also on the clipping norm.",
        ),
        *([_settings(found)] if found.moves else []),
        *_accuracy(found),
        *(_rules(summary, found)),
    )
    return Section("schedule", "Noise and clipping over training", blocks, nested=True)


def _settings(found: ScheduleFindings) -> Block:
    """First, middle and last step."""
    last = len(found.steps) - 1
    return table(
        ("Step", "Clipping norm", "Noise multiplier", "Noise standard deviation"),
        [
            (
                f"{found.steps[index]:,}",
                format_number(found.max_grad_norm[index]),
                format_number(found.noise_multiplier[index]),
                format_number(found.noise_std[index]),
            )
            for index in sorted({0, last // 2, last})
        ],
    )


def _accuracy(found: ScheduleFindings) -> tuple[Block, ...]:
    """Test accuracy at shares of the final worst case, and the worst case at shares of the best."""
    curve = found.curve
    if curve is None or len(curve.epsilon) < 2 or not curve.epsilon[-1]:
        return ()
    at_epsilon = [
        (format_epsilon(epsilon), format_share(accuracy))
        for epsilon in (share * curve.epsilon[-1] for share in (0.25, 0.5, 0.75, 1.0))
        if (accuracy := curve.accuracy_at(epsilon)) is not None
    ]
    best = max(curve.test_accuracy)
    at_accuracy = [
        (format_share(accuracy), format_epsilon(epsilon), f"{step:,.0f}")
        for accuracy in (share * best for share in (0.9, 0.95, 0.99, 1.0))
        if (epsilon := curve.epsilon_at(accuracy)) is not None
        and (step := curve.step_at(accuracy)) is not None
    ]
    return (
        paragraph(f"Held fixed over training: {found.held_fixed}."),
        table(("Worst-case epsilon", "Test accuracy"), at_epsilon),
        table(("Test accuracy", "First reached at epsilon", "Step"), at_accuracy),
        paragraph(BETWEEN_CHECKPOINTS, style="note"),
    )


def _rules(summary: Audit, found: ScheduleFindings) -> tuple[Block, ...]:
    if found.rules is None:
        return ()
    ours = summary.guarantee.worst_case_epsilon
    rows = [(title, format_epsilon(getattr(found.rules, name))) for name, title in _RULES.items()]
    return (
        Details(
            "Worst case by historical rules, which are not bounds",
            (
                paragraph(
                    "Papers on dynamic parameters compare these rules. They are shown to compare "
                    "tables, and claim nothing: the first five are no bounds on this run. The "
                    f"account of this audit gives {format_epsilon(ours)}.",
                    style="note",
                ),
                table(("Rule", "Epsilon"), rows),
            ),
        ),
    )
