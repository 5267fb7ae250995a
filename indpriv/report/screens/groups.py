"""What `indpriv groups` prints: whole group tables. Sensitive."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from indpriv._formatting import format_epsilon, sentence
from indpriv.analysis.groups import GroupTable
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.document import Entry, Paragraph, Table, paragraph
from indpriv.report.renderers.terminal import print_blocks
from indpriv.report.sections.groups import group_table, readings, tests


def worst_case_of(audit: Mapping[str, Any]) -> str:
    """The worst case in the content of an audit.json, with a warning if it is no guarantee."""
    guarantee = audit["guarantee"]
    status = guarantee.get("status")
    none = f", no guarantee ({status})" if status in ("void", "unproven") else ""
    return f"{format_epsilon(guarantee['worst_case_epsilon'])}{none}"


def print_groups(
    tables: Sequence[GroupTable], audit: Mapping[str, Any], console: Console, *, raw: bool = True
) -> None:
    """Print whole group tables; raw: also those over all labels, not only those within label.

    `audit` is the content of audit.json, which says what the epsilons mean.
    """
    blocks: list[Entry | Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(f"individual epsilon ({audit['claim']}), {audit['meaning']}"),
        paragraph(f"worst case {worst_case_of(audit)}"),
        paragraph(DISCLAIMER, style="disclaimer"),
    ]
    for found in tables:
        blocks.append(paragraph())
        if raw:
            standardised = bool(found.rows["smallest_label_count"].notna().any())
            caption = f"{found.by}, all labels"
            blocks.append(group_table(found.by, found.rows, caption, standardised=standardised))
        blocks.append(Entry("", (*readings(found), *map(paragraph, tests(found)))))
        for within in found.within_label:
            blocks.append(group_table(found.by, within.rows, f"{found.by} among {within.label}"))
        blocks += [paragraph(sentence(note)) for note in found.notes]
    print_blocks(blocks, console)
