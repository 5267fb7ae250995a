"""What the commands of the experiments share beside `indpriv.cli.options`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console
from rich.markup import escape

from indpriv.cli.options import print_json

if TYPE_CHECKING:
    from indpriv.report.document import Page

PROGRAM = "python -m audits"  # as it is typed


class Findings(Protocol):
    """What an experiment found."""

    def to_json(self) -> dict[str, Any]:
        """As the content of a file."""


Found = TypeVar("Found", bound=Findings)


def show(
    found: Found, page: Page, print_it: Callable[[Found, Console], None], to: Path, *, as_json: bool
) -> None:
    """Write a page and its JSON to TO.html, TO.md and TO.json, and print one of them."""
    from indpriv.report.renderers.page_files import write_page

    write_page(page, found.to_json(), to.parent, to.name)
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False)
    print_it(found, console)
    console.print(f"\n[bold]{escape(f'{to}.html')}[/]", soft_wrap=True)
