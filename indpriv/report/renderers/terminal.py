"""Blocks on a terminal or in a pipe, and the first screen of an audit. Sensitive.

Texts of the data are shown as they are: no markup in them is obeyed, no control character reaches
    the terminal.
"""

from collections.abc import Iterable
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text as Line

from indpriv._shown import Console as CleanConsole
from indpriv._shown import clean
from indpriv.analysis.summary import SENSITIVE, Audit
from indpriv.report.document import Entry, Paragraph, Span, Table, Text, plain
from indpriv.report.sections import sections_of

_KEY_WIDTH = 11
_INDENT = (0, 0, 0, 2)
_WIDEST = 500
_STYLES = {"warn": "yellow", "alarm": "bold red", "disclaimer": "italic", "lead": "bold"}


def print_audit(summary: Audit, console: Console) -> None:
    """Print the first screen of an audit."""
    head = Grid.grid(expand=True)
    head.add_column()
    head.add_column(justify="right", overflow="ellipsis", no_wrap=True)
    head.add_row(Line(SENSITIVE, style="bold red"), Line(clean(summary.name), style="bold"))
    console.print(head)
    for section in sections_of(summary):
        print_blocks(section.screen, console)


def print_blocks(blocks: Iterable[Entry | Paragraph | Table], console: Console) -> None:
    """Print blocks one below the other."""
    for block in blocks:
        if isinstance(block, Table):
            _print_table(block, console)
        elif isinstance(block, Paragraph):
            console.print(_line(block))
        elif block.key:
            _print_entry(block, console)
        else:
            for inner in block.blocks:
                if isinstance(inner, Table):
                    _print_table(inner, console)
                else:
                    console.print(Padding(_line(inner), _INDENT))


def _print_entry(entry: Entry, console: Console) -> None:
    grid = Grid.grid(padding=(0, 0))
    grid.add_column(width=max(_KEY_WIDTH, cell_len(entry.key) + 1), no_wrap=True)
    grid.add_column(overflow="fold")
    for index, block in enumerate(entry.blocks):
        if isinstance(block, Paragraph):
            grid.add_row(Line(entry.key if index == 0 else "", style="bold"), _line(block))
    console.print(grid)


def _line(block: Paragraph) -> Line:
    made = Line("! " if block.style == "warn" else "", style=_STYLES.get(block.style, ""))
    for part in block.parts:
        made.append(_text(part))
    return made


def _text(text: Text) -> Line:
    bold = isinstance(text, Span) and text.style == "strong"
    return Line(clean(plain(text)), style="bold" if bold else "")


def _print_table(block: Table, console: Console) -> None:
    """Print a table at its full width even if the terminal is narrower: no figure is cut off."""
    grid = _grid(block.without(block.narrow))
    if block.wide and _width(grid, console) > console.width:
        grid = _grid(block.without(block.wide))
    width = max(_width(grid, console), console.width)
    colours: Literal["truecolor"] | None = "truecolor" if console.color_system else None
    CleanConsole(
        file=console.file, width=width, force_terminal=console.is_terminal, color_system=colours
    ).print(grid)


def _width(grid: Grid, console: Console) -> int:
    return Measurement.get(console, console.options.update(width=_WIDEST), grid).maximum


def _grid(block: Table) -> Grid:
    grid = Grid(
        title=Line(clean(block.caption)) if block.caption else None,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    for head, kind in zip(block.head, block.kinds, strict=True):
        grid.add_column(
            Line(clean(head)), justify="right" if kind == "number" else "left", no_wrap=True
        )
    for row in block.rows:
        grid.add_row(*map(_text, row.cells))
    return grid
