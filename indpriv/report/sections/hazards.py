"""How the account can be wrong or misread, and what was checked."""

from indpriv.analysis.summary import Audit
from indpriv.norm_log.evidence import FAILED, HASH_CHAIN, NOT_CHECKED, PASSED
from indpriv.norm_log.lines import ON_TRUST
from indpriv.report.document import Block, Entry, Heading, Section, Span, paragraph, table

_NOTHING = "nothing, so what the log says is not confirmed"
_JOURNAL = (HASH_CHAIN.key, PASSED)
_KINDS = {
    "assumption": "What the account rests on",
    "reading": "How figures are misread",
    "scope": "What is not counted",
}


def hazards(summary: Audit) -> Section:
    """Every hazard by kind, with the status of assumptions."""
    blocks: list[Block] = [
        paragraph("How this account can be wrong, be misread, or leave something out.")
    ]
    for kind, title in _KINDS.items():
        found = [hazard for hazard in summary.hazards if hazard.kind == kind]
        rows = [(each.title, each.detail, Span(each.status, "status")) for each in found]
        made = table(("Hazard", "Detail", "Status"), rows)
        blocks += [
            Heading(title, 4),
            made if kind == "assumption" else made.without(frozenset({2})),
        ]
    return Section("hazards", "Hazards", tuple(blocks), _screen(summary))


def _screen(summary: Audit) -> tuple[Entry, ...]:
    checks = summary.checks
    passed = sum(check.status == PASSED for check in checks)
    unknown = ", ".join(check.title for check in checks if check.status == NOT_CHECKED)
    count = f"{passed} of {len(checks)} checks passed; indpriv verify lists them"
    origin = [f"{one.title}: {one.detail}" for one in checks if (one.key, one.status) == _JOURNAL]
    failed = [check for check in checks if check.status == FAILED]
    lines = summary.guarantee.lines
    trusted = [line.title.lower() for line in lines if line.word == ON_TRUST] + [
        hazard.short
        for hazard in summary.hazards
        if hazard.kind == "assumption" and hazard.key not in {line.key for line in lines}
        if hazard.status not in ("verified", "failed", ON_TRUST)
    ]
    entries = [
        Entry(
            "CHECKED",
            tuple(map(paragraph, [count, *origin] if passed else [_NOTHING])),
        ),
        Entry(
            "FAILED",
            tuple(paragraph(f"{check.title}: {check.detail}", style="alarm") for check in failed),
        ),
        Entry("NOT CHECKED", (paragraph(unknown),) if unknown else ()),
        Entry("ON TRUST", (paragraph(", ".join(trusted) or "nothing"),)),
        Entry("MISSING", tuple(map(paragraph, summary.missing))),
    ]
    return tuple(entry for entry in entries if entry.blocks)
