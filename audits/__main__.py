"""`python -m audits`: the command line of the experiments, with the exit codes of indpriv."""

from __future__ import annotations

import typer

from audits.advice.command import deletion, subsets
from audits.exposure.command import exposure
from audits.options import PROGRAM
from audits.sweep.command import sweep
from audits.training.commands import attack, images, leak, lint, shadow, train
from indpriv.cli import main

app = typer.Typer(
    name="audits",
    help="Reference experiments of indpriv, on public data sets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


for _command in (train, lint, shadow, attack, leak, images, sweep, subsets, deletion, exposure):
    app.command()(_command)

if __name__ == "__main__":
    main(app, PROGRAM)
