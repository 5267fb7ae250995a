"""What may be published of an audit."""

from indpriv.analysis.summary import Audit
from indpriv.report.document import Section, paragraph


def publish(summary: Audit) -> Section:
    """The sentence that may be published, or that there is none."""
    guarantee = summary.guarantee
    if not guarantee.publishable:
        why = ": delta is at least 1/n" if guarantee.stands else ""
        blocks = [paragraph(f"Do not publish any privacy guarantee for this run{why}.")]
        if not guarantee.stands:
            blocks.append(paragraph(guarantee.statement, style="statement"))
        return Section("publish", "What you may publish", tuple(blocks))
    rows = (
        " So is the number of rows in the sentence above, unless it is a cap that was set without "
        "looking at the data."
    )
    return Section(
        "publish",
        "What you may publish",
        (
            paragraph(
                "You may publish this sentence, and those settings in the first table of the "
                "next section that are not marked “not for publication”:"
            ),
            paragraph(
                f"{guarantee.statement} Evidence for it: {guarantee.evidence}.", style="statement"
            ),
            paragraph(
                "Publish nothing else from this report. Individual epsilons, their quantiles, "
                "group figures, group sizes, losses and attack results are computed from the "
                "data without noise; share them only through a private release. The number of "
                "examples is private too, and a batch size together with sample_rate reveals "
                f"it.{rows if summary.unit_sizes else ''} Judge for yourself whether the declared "
                "texts reveal anything about the data."
            ),
        ),
    )
