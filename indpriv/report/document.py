"""The content of a report as plain data: sections of blocks, which renderers draw."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_LONG = 40  # characters from which a column of texts needs room
_NUMBER = re.compile(r"(?:[-+−<>\d.,%*()\[\]/ –±]|to|of|e-)*")


@dataclass(frozen=True)
class Span:
    """A part of a text with a style: "strong", "code", or "status" (of a word like "verified")."""

    text: str
    style: str = "strong"


Text = str | Span


@dataclass(frozen=True)
class Paragraph:
    """Parts that follow each other without a break.

    Attributes:
        parts: texts, some of them styled.
        style: "lead", "note", "disclaimer", "statement" (a quotation), "warn", "alarm", or "".
    """

    parts: tuple[Text, ...]
    style: str = ""


def paragraph(*parts: Text, style: str = "") -> Paragraph:
    """A paragraph of these parts."""
    return Paragraph(parts, style)


@dataclass(frozen=True)
class Callout:
    """Paragraphs that stand out; warn where they are a warning."""

    paragraphs: tuple[Paragraph, ...]
    warn: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a table; style is "small" (too few to read), "total" or ""."""

    cells: tuple[Text, ...]
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table. A column whose cells are all numbers is aligned right.

    Attributes:
        head: of each column.
        rows: each with as many cells as the head.
        caption: above the table.
        style: "facts" (names and values), "key" (name, large figure, remark), or "".
        row_names: whether the first cell of a row names it.
        wide: columns that a terminal leaves out where they do not fit.
        narrow: columns that a terminal shows only where it leaves out the wide ones.
    """

    head: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    style: str = ""
    row_names: bool = True
    wide: frozenset[int] = frozenset()
    narrow: frozenset[int] = frozenset()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of each column: "name", "number", "text" (long) or "word"."""
        return tuple(map(self._kind, range(len(self.head))))

    def _kind(self, column: int) -> str:
        if self.row_names and column == 0:
            return "name"
        cells = [plain(row.cells[column]) for row in self.rows]
        if all(map(_NUMBER.fullmatch, cells)):
            return "number"
        return "text" if max(map(len, cells)) > _LONG else "word"

    def without(self, columns: frozenset[int]) -> "Table":
        """The table without some columns."""
        kept = [index for index in range(len(self.head)) if index not in columns]
        rows = (Row(tuple(row.cells[i] for i in kept), row.style) for row in self.rows)
        return Table(
            tuple(self.head[i] for i in kept), tuple(rows), self.caption, self.style, self.row_names
        )


def table(head: Sequence[str], rows: Iterable[Row | Sequence[Text]], **options: Any) -> Table:
    """A table whose rows may be plain sequences of cells; options as for `Table`."""
    made = (row if isinstance(row, Row) else Row(tuple(row)) for row in rows)
    return Table(tuple(head), tuple(made), **options)


@dataclass(frozen=True)
class Figure:
    """A figure, drawn on the page only.

    Attributes:
        name: of the function in `indpriv.report.figures.FIGURES` that draws it, or a function.
        arguments: of that function.
        caption: below the figure.
    """

    name: str | Callable[..., str]
    arguments: tuple[Any, ...]
    caption: str


@dataclass(frozen=True)
class Examples:
    """Training examples, by id: the page shows their pictures where it is given them."""

    title: str
    ids: tuple[Any, ...]


@dataclass(frozen=True)
class Reconstructions:
    """Pictures and what was reconstructed of them: the page shows them where it is given them."""


@dataclass(frozen=True)
class Search:
    """Where the page has a search box, if it is given single examples."""


@dataclass(frozen=True)
class Heading:
    """A heading inside a section; level 3 or 4."""

    text: str
    level: int = 3


@dataclass(frozen=True)
class Listing:
    """Short texts, one below the other."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """Text as it would be typed."""

    text: str


@dataclass(frozen=True)
class Details:
    """Blocks that the page folds away and Markdown leaves out."""

    summary: str
    blocks: tuple["Block", ...]


Block = (
    Paragraph
    | Callout
    | Table
    | Figure
    | Examples
    | Reconstructions
    | Search
    | Heading
    | Listing
    | Code
    | Details
)


@dataclass(frozen=True)
class Entry:
    """Lines of a terminal screen beside a keyword; without one, tables and indented lines."""

    key: str
    blocks: tuple[Paragraph | Table, ...]


@dataclass(frozen=True)
class Section:
    """One section of a report.

    Attributes:
        id: for links.
        title: its heading.
        blocks: its content on the page and in Markdown.
        screen: what the first screen of a terminal shows of it.
        nested: part of the section before it, under a smaller heading.
    """

    id: str
    title: str
    blocks: tuple[Block, ...]
    screen: tuple[Entry, ...] = ()
    nested: bool = False


@dataclass(frozen=True)
class Page:
    """A page: sections, and what stands around them.

    Attributes:
        title: of the document. eyebrow: above the heading. name: the heading.
        meta: below the heading.
        sections: in order.
        disclaimer: at the foot.
    """

    title: str
    eyebrow: str
    name: str
    meta: str
    sections: tuple[Section, ...]
    disclaimer: Paragraph


def plain(text: Text) -> str:
    """A text without its style."""
    return text.text if isinstance(text, Span) else text
