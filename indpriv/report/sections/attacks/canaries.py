"""What canaries prove about the worst case, and gradient canaries about the account."""

from indpriv._formatting import (
    format_delta,
    format_epsilon,
    format_lower_bound,
    format_p_value,
    format_share,
)
from indpriv.analysis.attacks.canary_bounds import BOUNDS
from indpriv.analysis.attacks.canary_findings import EACH_BY_ITSELF, CanaryResults
from indpriv.analysis.statistics.intervals import CONFIDENCE
from indpriv.analysis.summary import Audit
from indpriv.report.document import Block, Entry, Paragraph, Section, Span, Table, paragraph, table
from indpriv.report.wording import finding

_WRONG = "The scores of gradient canaries contradict the account: the run or its account is wrong."
_WHAT = (
    "Each canary is a made-up gradient along a parameter of its own, which a fair coin includes "
    "and the run’s own sampler draws. Its score is the likelihood ratio of all noisy updates, the "
    "strongest test there is, and the account predicts the distribution of the scores. Canaries "
    "of full length stand for the worst case, shorter ones for examples of smaller norms. They "
    "test clipping only if they were recorded with through_clipping=True."
)


def canaries(summary: Audit) -> Section | None:
    """None where the run had none. More than the guarantee allows is a finding against the run."""
    found = summary.canaries
    if found is None:
        return None
    bound, right, alarms = (found.overall[name] for name in ("epsilon", "right", "false_alarms"))
    hits = round((right.value or 0.0) * right.n)
    n, confidence = bound.n_members + bound.n_others, format_share(CONFIDENCE)
    least = format_lower_bound(bound.value)
    worst = format_epsilon(summary.guarantee.worst_case_epsilon)
    blocks: list[Block] = []
    line = f"{n:,} canaries: worst-case epsilon at least {least} with {confidence} confidence"
    entry = Entry("CANARIES", (paragraph(f"{line} (accounted: {worst})"),))
    if bound.value > summary.guarantee.worst_case_epsilon:
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
            f" at delta {format_delta(found.delta)} ({hits} of {right.n} guesses "
            f"right, corrected for {bound.n} numbers of guesses; Steinke, Nasr and Jagielski "
            "2023). It bounds the worst case that the guarantee promises for every example, not "
            "the individual epsilon of any one. Null calibration: for coins drawn at random the "
            f"bound was above 0 in {format_share(alarms.value, 1)} of "
            f"{alarms.n:,} trials.",
        )
    )
    return Section("canaries", "Canaries", tuple(blocks), (entry,), nested=True)


def gradient_canaries(summary: Audit) -> Section | None:
    """None where the run had none. Scores that the account does not explain are a finding."""
    found = summary.gradient_canaries
    if found is None:
        return None
    blocks: list[Block] = [] if found.agree else [finding(_WRONG)]
    blocks.append(paragraph(_WHAT))
    if found.lengths:
        blocks += [
            _bounds(found),
            paragraph(EACH_BY_ITSELF, style="note"),
            table(("Bound", "It assumes"), [(of.title, of.assumption) for of in BOUNDS.values()]),
        ]
    blocks += [paragraph(text, style="note") for text in found.left_out]
    entry = Entry("CANARIES", (_line(found),)) if found.lengths else None
    return Section(
        "gradient-canaries",
        "Gradient canaries",
        tuple(blocks),
        () if entry is None else (entry,),
        nested=True,
    )


def _line(found: CanaryResults) -> Paragraph:
    longest = found.lengths[-1]
    if not found.agree:
        return paragraph(f"gradient canaries: {_WRONG}", style="alarm")
    n = sum(one.n_members + one.n_others for one in found.lengths)
    best = max(bound.epsilon for bound in longest.bounds)
    return paragraph(
        f"{n:,} gradient canaries agree with the account; those of length {longest.length:g} "
        f"prove epsilon {format_lower_bound(best)} of {format_epsilon(longest.ceiling)} (the "
        f"largest of {len(longest.bounds)} bounds, each at 95 % by itself)"
    )


def _bounds(found: CanaryResults) -> Table:
    head = ("Length", "In / out", "Account", *(of.title for of in BOUNDS.values()), "Agreement")
    rows = [
        (
            f"{one.length:g}",
            f"{one.n_members:,} / {one.n_others:,}",
            format_epsilon(one.ceiling),
            *(format_lower_bound(bound.epsilon) for bound in one.bounds),
            f"p = {format_p_value(one.p_value)}" if one.agrees else "CONTRADICTED",
        )
        for one in found.lengths
    ]
    caption = f"Epsilon of canaries at delta {format_delta(found.delta)}: lower bounds"
    return table(head, rows, caption=caption)
