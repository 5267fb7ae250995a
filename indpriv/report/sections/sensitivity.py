"""How far epsilons move under another rounding of norms, or another rule between records."""

from indpriv._formatting import capitalised, format_share
from indpriv.analysis.summary import Audit
from indpriv.report.document import Entry, Section, Span, paragraph, table
from indpriv.report.wording import correlation, spaced


def sensitivity(summary: Audit) -> Section | None:
    """None where no other choice was tried."""
    if not summary.sensitivity:
        return None
    head = ("Choice", "Here", "Instead", capitalised(summary.account.plural), "Pearson’s r")
    rows, lines = [], []
    for row in summary.sensitivity:
        choice, here, instead = map(spaced, (row.choice, row.here, row.instead))
        shift, p95, largest = (
            f"{row.mean_shift:+.3f}",
            f"{row.p95_absolute:.3f}",
            f"{row.largest_absolute:.3f}",
        )
        tail = (shift, p95, largest, format_share(row.share_smaller))
        rows.append((choice, here, instead, f"{row.n:,}", correlation(row.pearson), *tail))
        lines.append(
            f"{choice} {instead} instead of {here}: mean shift {shift}, 95 % within {p95}, "
            f"largest {largest}"
        )
    return Section(
        "sensitivity",
        "Sensitivity to choices",
        (
            paragraph(
                "The table accounts for the same log under another choice. A shift is not an "
                "error: it says how much a figure depends on the choice. How stable the figures "
                "are over training runs takes several audits: ",
                Span("indpriv compare AUDIT_DIR AUDIT_DIR ...", "code"),
            ),
            table((*head, "Mean shift", "95 % within", "Largest", "Smaller"), rows),
        ),
        (Entry("SENSITIVITY", tuple(map(paragraph, lines))),),
        nested=True,
    )
