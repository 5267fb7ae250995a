"""Markdown in which texts of the data stay text, and an audit's report as audit.md. Sensitive."""

import re
from collections.abc import Sequence

from indpriv._shown import clean
from indpriv.analysis.summary import SENSITIVE, Audit
from indpriv.report.document import (
    Block,
    Callout,
    Code,
    Heading,
    Listing,
    Paragraph,
    Section,
    Table,
    Text,
)
from indpriv.report.sections import sections_of


def escape(text: str) -> str:
    r"""A text on one line, in which neither Markdown nor HTML is obeyed.

    >>> print(escape("a|b <b> *x* _y_ sample_rate"))
    a\|b \<b\> \*x\* \_y\_ sample_rate
    """
    return re.sub(
        r"[\\`*\[\]<>|~$&]|(?<!\w)[_#]|_(?!\w)", r"\\\g<0>", clean(" ".join(text.split()))
    )


def render_markdown(summary: Audit) -> str:
    """The report of an audit as Markdown, without figures and what the page folds away."""
    return render_sections(f"Privacy audit of {summary.name}", sections_of(summary))


def render_sections(title: str, sections: Sequence[Section]) -> str:
    """Sections below a title; the first one has no heading of its own."""
    first, *rest = sections
    top = f"**{SENSITIVE}**\n\n# {escape(title)}"
    return "\n\n".join([top, *_blocks(first), *map(_section, rest)]) + "\n"


def _section(section: Section) -> str:
    title = f"{'###' if section.nested else '##'} {escape(section.title)}"
    return "\n\n".join([title, *_blocks(section)])


def _blocks(section: Section) -> list[str]:
    return [text for block in section.blocks if (text := render_block(block))]


def render_block(block: Block) -> str:
    """A block; nothing of figures, pictures and what the page folds away."""
    if isinstance(block, Paragraph):
        text = "".join(map(_text, block.parts))
        return {"statement": f"> {text}", "disclaimer": f"*{text}*"}.get(block.style, text)
    if isinstance(block, Callout):
        return "\n\n".join(map(render_block, block.paragraphs))
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Heading):
        return f"{'#' * block.level} {escape(block.text)}"
    if isinstance(block, Listing):
        return "\n".join(f"- {escape(item)}" for item in block.items)
    if isinstance(block, Code):
        text = clean(block.text, kept="\n").replace("`", " ")
        return f"```text\n{text}\n```"
    return ""


def _table(block: Table) -> str:
    head = ["" if block.style else escape(text) for text in block.head]
    rule = ["---:" if kind == "number" else "---" for kind in block.kinds]
    rows = [[_text(cell) for cell in row.cells] for row in block.rows]
    caption = f"{escape(block.caption)}:\n\n" if block.caption else ""
    return caption + "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def _text(text: Text) -> str:
    if isinstance(text, str):
        lead = " " if text[:1] == " " else ""
        return lead + escape(text) + (" " if text.strip() and text[-1:] == " " else "")
    found = escape(text.text)
    return {"strong": f"**{found}**", "code": f"`{clean(text.text).replace('`', ' ')}`"}.get(
        text.style, found
    )
