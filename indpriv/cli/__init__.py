"""The command line: one short command per arrow of the data flow. What it prints is sensitive.

Exit codes: 0 done, 1 a verification or a gate failed, 2 bad input (one message, no traceback),
3 a verification left a line of evidence open, 130 interrupted, 141 the output was not read.

The commands stand in commands.toml; what they do, in the modules that it names.
"""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from indpriv._formatting import escape
from indpriv.cli.commands import app, errors
from indpriv.errors import InputError


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.")
    ] = False,
) -> None:
    if show_version:
        from importlib.metadata import version

        typer.echo(f"indpriv {version('indpriv')}")
        raise typer.Exit


_LONGEST = 2000  # characters of a message, which may name what a stranger wrote


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def run(
    arguments: Sequence[str] | None = None, commands: typer.Typer = app, name: str = "indpriv"
) -> int:
    """Run the command line on `arguments` (default: sys.argv) and return its exit code.

    commands, name: of another command line with these exit codes and messages.
    """
    try:
        commands(arguments, prog_name=name)
    except SystemExit as end:  # where nobody read to the end (head), typer gives 1, a fault's code
        return 141 if isinstance(end.__context__, BrokenPipeError) else int(end.code or 0)
    except InputError as error:
        errors().print(f"[bold red]error:[/] {escape(str(error)[:_LONGEST])}")
    except OSError as error:
        advice = "check the path, its permissions and the free space"
        errors().print(f"[bold red]error:[/] {escape(str(error))}; {advice}")
    return 2


def main(commands: typer.Typer = app, name: str = "indpriv") -> NoReturn:
    """Run the command line as its own process; the entry point `indpriv`."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
    # Like Ctrl-C: temporary files are removed, and the exit code is 130. Ignored stays ignored.
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _interrupted)
    warnings.filterwarnings("ignore", module=r"(torch|opacus)(\.|$)")
    warnings.showwarning = lambda message, *_, **__: errors().print(
        f"[yellow]warning:[/] {escape(str(message))}"
    )
    sys.exit(run(None, commands, name))
