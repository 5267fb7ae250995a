"""The command lint: settings of a run, compared with what the literature says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from indpriv._shown import Console
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import Json, Run, print_json

if TYPE_CHECKING:
    from indpriv.analysis.lint.training_facts import TrainingFacts

Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with code 1 on warnings too, not only on errors.")
]


def lint(
    path: Run = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Delta of the guarantee.", show_default="the run's own"),
    ] = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Compare settings of DP-SGD with the literature: batch size, clipping, learning rate, delta...

    Example: indpriv lint runs/adult

    Exit code 1 if a rule of severity "error" fails.
    """
    path = checked_run(path, "lint")
    show_findings(path, _facts_of_run(path, delta), strict, as_json)


def show_findings(path: Path, facts: TrainingFacts, strict: bool, as_json: bool) -> None:
    """Print what the rules say of facts, and exit with code 1 where one of them stops."""
    from indpriv.analysis.lint.registry import lint as apply_rules
    from indpriv.analysis.lint.rule import ERROR, WARNING
    from indpriv.norm_log.evidence import FAILED
    from indpriv.report.screens import lint_document, print_lint

    findings = apply_rules(facts)
    if as_json:
        print_json(lint_document(str(path), findings))
    else:
        print_lint(str(path), findings, Console(highlight=False))
    stopping = (ERROR, WARNING) if strict else (ERROR,)
    if any(each.status == FAILED and each.severity in stopping for each in findings):
        raise typer.Exit(1)


def _facts_of_run(run_dir: Path, delta: float | None) -> TrainingFacts:
    from indpriv._checks import check_delta
    from indpriv.analysis.lint.training_facts import facts_of_run
    from indpriv.analysis.recorded_run import recorded_run
    from indpriv.norm_log.norm_log import open_run

    if delta is not None:
        check_delta(delta)
    opened = open_run(run_dir, unreadable="worst_case")
    run = recorded_run(opened, unreadable="worst_case")
    return facts_of_run(opened.log, run.recorder, run.declared, run.checks, delta)
