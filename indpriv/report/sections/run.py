"""What was run, what the account assumes, and what was checked."""

from indpriv.analysis.summary import Audit
from indpriv.report.document import Block, Heading, Section, Span, paragraph, table


def evidence(summary: Audit) -> Section | None:
    """Every line of evidence with its word, those that a recorder can verify first."""
    if not (lines := summary.guarantee.lines):
        return None
    rows = [(line.title, line.statement, Span(line.word, "status"), line.found) for line in lines]
    blocks = (
        paragraph(
            "“Verified”: training was compared with its own recomputation, and was equal. "
            "“Declared”: somebody said so, or nothing was compared. “On trust”: nobody can see it. "
            "“Refuted”: it does not hold. A guarantee is supported only if the first five are "
            "verified and none is refuted. Not for publication: the counts come from the data."
        ),
        table(("Line", "What has to hold", "Word", "What was found"), rows),
    )
    return Section("evidence", "What this rests on", blocks)


def run(summary: Audit) -> Section:
    """Every disclosure and every check with its status."""
    blocks: list[Block] = [
        paragraph(
            "“Verified”: this tool read it from the optimizer, the loader or the files. "
            "“Declared”: someone stated it, and nothing confirms it. “Assumed”: nobody stated it, "
            "and this tool’s default stands. “Unknown”: there is no record of it. "
            "What is marked “not for publication” reveals something about the data."
        ),
        table(
            ("Item", "Value", "Status", "Publication"),
            [
                (
                    item.title,
                    item.value or "not stated",
                    Span(item.status, "status"),
                    "not for publication" if item.private else "",
                )
                for item in summary.disclosures
            ],
        ),
    ]
    if summary.checks:
        checks = [
            (check.title, check.detail, Span(check.status, "status")) for check in summary.checks
        ]
        blocks += [
            Heading("Checks of the assumptions"),
            paragraph("Not for publication: the counts come from the data."),
            table(("Check", "Finding", "Status"), checks),
        ]
    return Section("run", "Run and assumptions", tuple(blocks))
