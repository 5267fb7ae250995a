"""How to reproduce the audit, and what was declared of the run."""

import json

from indpriv.analysis.summary import AuditSummary
from indpriv.report.document import Block, Code, Details, Section, paragraph


def reproduce(summary: AuditSummary) -> Section:
    """The command, the versions, the fingerprint of the ids, and run.json as declared."""
    versions = " · ".join(
        f"{name} {version}" for name, version in summary.provenance.versions.items()
    )
    training = (
        "The training is reproducible from its seed, which is why it gives no privacy."
        if summary.guarantee.status == "void"
        else "The training itself must not be reproducible: its noise and its sampling are "
        "unseeded, so a second run gives other epsilons."
    )
    blocks: list[Block] = [
        paragraph(
            "The same log gives the same epsilons on any machine, without the model or the data:"
        ),
        Code(summary.provenance.command or "indpriv audit RUN --output-dir DIR"),
        paragraph(training),
        paragraph(
            f"{versions} · example ids, SHA-256: {summary.run.example_ids_sha256}", style="note"
        ),
    ]
    if summary.run.declared.content:
        content = json.dumps(
            summary.run.declared.content, indent=2, ensure_ascii=False, default=str
        )
        blocks.append(Details("run.json, as declared", (Code(content),)))
    return Section("reproduce", "Reproduce", tuple(blocks))
