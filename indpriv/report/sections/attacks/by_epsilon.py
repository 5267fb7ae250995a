"""The attack in bins of individual epsilon, beside what epsilon would allow."""

from indpriv._formatting import format_epsilon, format_share
from indpriv.analysis.attacks.by_epsilon import AttackByEpsilon, ThresholdBins
from indpriv.analysis.summary import AuditSummary
from indpriv.report import document as doc
from indpriv.report.wording import counted, finding, percent_span


def attack_by_epsilon(summary: AuditSummary) -> doc.Section | None:
    """None where the norms of the hold-out were not recorded."""
    found = summary.attacks.by_epsilon
    if found is None:
        return None
    blocks: list[doc.Block] = []
    if found.findings:
        blocks.append(
            finding(
                f"In {counted(found.findings, 'bin')} below, the attack succeeds more often than "
                "the worst-case epsilon allows: the run or its account is wrong, if the test "
                "examples were split off at random."
            )
        )
    blocks.append(
        doc.paragraph(
            f"The attack: {found.method}. Members are binned by their epsilon, non-members by the "
            "epsilon they would have had on the same trajectory. At the false positives of a bin, "
            "the line says how often its members could be accused if the bin’s upper edge were a "
            "guarantee for them. Individual epsilon is no "
            f"guarantee, so a bin above the line is no proof of an error, but it deserves a closer "
            f"look ({found.places_to_look} here, corrected for all bins and thresholds at "
            f"{format_share(found.confidence)} confidence). Each bin’s interval is taken alone."
        )
    )
    blocks += map(_bins, found.thresholds)
    entry = doc.Entry("BY EPSILON", (_line(found),))
    return doc.Section(
        "attack-by-epsilon", "The attack by epsilon", tuple(blocks), (entry,), nested=True
    )


def _bins(part: ThresholdBins) -> doc.Table:
    head = (
        "Epsilon to",
        "Members",
        "Non-members",
        "True positives",
        "95 % interval",
        "False positives",
        "Line",
    )
    return doc.table(
        (*head, "Worst-case line", "Remark"),
        [
            (
                format_epsilon(row.high),
                f"{row.n_members:,}",
                f"{row.n_nonmembers:,}",
                format_share(row.tpr, 1),
                percent_span(row.tpr_interval),
                *(
                    format_share(rate, 1)
                    for rate in (row.fpr, row.reference, row.worst_case_reference)
                ),
                "finding" if row.above_worst_case else "look here" if row.above_reference else "",
            )
            for row in part.bins
        ],
        caption=f"Threshold for a false-positive rate of {format_share(part.target_fpr)}",
        row_names=False,
    )


def _line(found: AttackByEpsilon) -> doc.Paragraph:
    if found.findings:
        bins = counted(found.findings, "bin")
        text = f"{bins} of epsilon above what the WORST CASE allows: a finding."
        return doc.paragraph(text, style="alarm")
    if found.places_to_look:
        bins = counted(found.places_to_look, "bin")
        text = f"{bins} of epsilon above what their epsilon would allow: take a closer look."
        return doc.paragraph(text, style="warn")
    return doc.paragraph("No bin of epsilon is above what its epsilon would allow.")
