"""What canaries prove about the worst case."""

from indpriv._formatting import format_delta, format_epsilon, format_lower_bound, format_share
from indpriv.analysis.summary import AuditSummary
from indpriv.report.document import Block, Entry, Section, Span, paragraph
from indpriv.report.wording import finding


def canaries(summary: AuditSummary) -> Section | None:
    """None where the run had none. More than the guarantee allows is a finding against the run."""
    found = summary.attacks.canaries
    if found is None:
        return None
    bound, n = found.overall.bound, found.overall.n_members + found.overall.n_nonmembers
    least, worst = (
        format_lower_bound(bound.epsilon),
        format_epsilon(summary.guarantee.worst_case_epsilon),
    )
    confidence = format_share(found.confidence)
    blocks: list[Block] = []
    line = f"{n:,} canaries: worst-case epsilon at least {least} with {confidence} confidence"
    entry = Entry("CANARIES", (paragraph(f"{line} (accounted: {worst})"),))
    if bound.epsilon > summary.guarantee.worst_case_epsilon:
        blocks.append(
            finding(
                f"The canaries prove a worst-case epsilon of at least {least}, above the {worst} "
                "accounted: the run or its account is wrong."
            )
        )
        alarm = f"{line}: ABOVE THE {worst} ACCOUNTED. The run or its account is wrong."
        entry = Entry("CANARIES", (paragraph(alarm, style="alarm"),))
    blocks.append(
        paragraph(
            f"Independent fair coins decided which of {n:,} canaries were trained on. Guessing "
            f"the coins from the model proves, with {confidence} confidence, a worst-case epsilon "
            "of at least ",
            Span(least),
            f" at delta {format_delta(found.delta)} ({bound.correct} of {bound.guesses} guesses "
            f"right, corrected for {bound.tried} numbers of guesses; Steinke, Nasr and Jagielski "
            "2023). It bounds the worst case that the guarantee promises for every example, not "
            "the individual epsilon of any one. Null calibration: for coins drawn at random the "
            f"bound was above 0 in {format_share(bound.false_alarm_rate, 1)} of "
            f"{found.null_trials:,} trials.",
        )
    )
    return Section("canaries", "Canaries", tuple(blocks), (entry,), nested=True)
