"""What the commands of the experiments share beside `indpriv.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape

from indpriv.cli.commands import option
from indpriv.cli.common import print_json, typed
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.report.page import Page

PROGRAM = "python -m audits"  # as it is typed
_LONGEST = 1500  # characters of a list
FILES = Path(__file__).parent  # of the audit files


class Findings(Protocol):
    """What an experiment found."""

    def to_json(self) -> dict[str, Any]:
        """As the content of a file."""


AuditFile = Annotated[
    Path | None,
    typer.Argument(metavar="AUDIT.toml", help="Audit file, e.g. audits/adult.toml."),
]
Device = Annotated[str, typer.Option(help="Device to train on, e.g. cpu or cuda.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="INDPRIV_DATA", help="Folder of the data sets that do not ship with indpriv."
    ),
]
Json = Annotated[bool, option("as_json")]
By = Annotated[list[str] | None, option("by")]
Seed = Annotated[int | None, option("seed")]
Run = Annotated[Path | None, option("run_dir")]
Attacks = Annotated[list[str] | None, option("attacks")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with code 1 on warnings too, not only on errors.")
]


def show(found: Findings, page: Page, to: Path, *, as_json: bool) -> None:
    """Write a page and its JSON to TO.html, TO.md and TO.json, and print one of them."""
    from indpriv.report.page import write_page
    from indpriv.report.report import print_whole

    write_page(page, to.parent, to.name, found.to_json())
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False)
    print_whole(page, console)
    console.print(f"\n[bold]{escape(f'{to}.html')}[/]", soft_wrap=True)


def checked_audit_file(path: Path | None, command: str) -> Path:
    """The path, if it is a file.

    Raises:
        InputError: it is missing or no file; the message lists the audit files to choose from.
    """
    if path is not None and path.is_file():
        return path
    if path is None:
        reason = f"{PROGRAM} {command} needs an audit file"
    elif path.is_dir():
        reason = f"{path} is a directory, and {PROGRAM} {command} needs an audit file"
    else:
        reason = f"{path} does not exist"
    for folder in (path or Path("audits"), Path("audits"), FILES):
        if files := sorted(folder.glob("*.toml")):
            break
    lines = "".join(f"\n  {typed(command, file, PROGRAM)}" for file in files)
    if len(lines) > _LONGEST:  # a message is cut somewhat later
        names = ", ".join(file.name for file in files)
        lines = f"\n  {typed(command, files[0], PROGRAM)}\n  or with another of {folder}: {names}"
    raise InputError(f"{reason}; type one of:{lines}")
