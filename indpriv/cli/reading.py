"""Commands that read what stands: groups, attack, compare, verify; and convert, which makes a run of norms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from indpriv._journal import NAME as JOURNAL
from indpriv._plain import to_json
from indpriv.analysis.attacks.measures import measure_attack
from indpriv.attack_scores import AttackScores
from indpriv.audit import compare_audits, comparison_json, groups_json, groups_of, read_summary
from indpriv.cli.options import By, Json, check_folder, progress_bar
from indpriv.errors import InputError
from indpriv.norm_log.convert import convert as convert_norms
from indpriv.norm_log.evidence import FAILED, NOT_CHECKED, PASSED
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.verify import verify as verify_run
from indpriv.report.screens.attack import attack_document, print_attack
from indpriv.report.screens.comparison import print_comparison
from indpriv.report.screens.groups import print_groups


def groups(
    audit_dir: Annotated[
        Path, typer.Argument(metavar="AUDIT_DIR", help="A directory with an audit.json.")
    ],
    by: By = None,
    within: Annotated[
        str | None, typer.Option(help="label: show only the tables within each label.")
    ] = None,
    min_size: Annotated[
        int, typer.Option(help="Groups with fewer training examples are too small to read.")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Compare groups of an audit: epsilon and accuracy, raw, within each label and label-standardised.

    Example: indpriv groups reports/adult --by race --by sex --by race,sex --by age:bins=10
    """
    tables = groups_of(audit_dir, by or [], within=within, min_size=min_size)
    summary = read_summary(audit_dir)
    if as_json:
        typer.echo(json.dumps(groups_json(tables, summary), indent=2, allow_nan=False))
    else:
        print_groups(tables, summary, Console(), raw=within is None)


def attack(
    scores: Annotated[
        Path,
        typer.Option(help="CSV or Parquet: score (higher = member), member, optionally group."),
    ],
    delta: Annotated[
        float, typer.Option(help="Delta of the (epsilon, delta) that is bounded from below.")
    ] = 1e-5,
    fair_coins: Annotated[
        bool, typer.Option("--fair-coins", help="An independent fair coin decided each membership.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Of the order of ties and of what is left out; not of training.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Measure any attack's scores: AUC, low false-positive rates, and a lower bound on the worst-case epsilon.

    Example: indpriv attack --scores runs/adult/canaries.parquet
    """
    found = AttackScores.from_file(scores)
    measures = measure_attack(
        replace(found, fair_coins=fair_coins or found.fair_coins), delta=delta, seed=seed
    )
    if as_json:
        typer.echo(json.dumps(attack_document(measures), indent=2, allow_nan=False))
    else:
        print_attack(measures, Console())


def compare(
    audit_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="AUDIT_DIR...", help="Two or more audits of the same data."),
    ],
    by: By = None,
    as_json: Json = False,
) -> None:
    """Compare audits of the same data: who is better or worse off than in the first, and what is stable over all.

    Example: indpriv compare reports/adult reports/adult-clipped --by race

    Runs that differ in their randomness alone show how stable ranks and the order of groups are.
    """
    found = compare_audits(audit_dirs, by or [])
    if as_json:
        typer.echo(json.dumps(comparison_json(found), indent=2, allow_nan=False))
    else:
        print_comparison(found, Console())


def convert(
    norms: Annotated[
        Path, typer.Argument(metavar="NORMS", help="norms.parquet or norms.npz of any trainer.")
    ],
    run_json: Annotated[
        Path,
        typer.Option("--run", help="run.json: steps, noise, clipping and sampling of that run."),
    ],
    output_dir: Annotated[Path, typer.Option(help="New run directory.")],
    rounding: Annotated[
        float, typer.Option(help="Of norms, upwards, as a fraction of max_grad_norm; 0 is none.")
    ] = 0.01,
    as_json: Json = False,
) -> None:
    """Turn norms that another trainer wrote (JAX, TF, ...) into a run directory, wholly checked.

    Example: indpriv convert norms.npz --run run.json --output-dir runs/jax
    """
    check_folder("--output-dir", output_dir)
    with progress_bar() as progress:
        convert_norms(norms, run_json, output_dir, rounding=rounding, progress=progress)
    log = NormLog.open(output_dir)
    if as_json:
        facts = {"run_dir": str(output_dir), "examples": log.n_examples, "records": log.n_records}
        typer.echo(json.dumps({**facts, "steps": log.total_steps}, indent=2))
    else:
        typer.echo(
            f"{output_dir}: {log.n_records} records of {log.n_examples} examples, {log.total_steps} steps"
        )


def verify(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory that a Recorder wrote.")
    ],
    as_json: Json = False,
) -> None:
    """Check a run's log: hashes, coverage, sampling, Opacus's accountant. Exit code 1 where a check fails.

    Example: indpriv verify runs/adult
    """
    if not run_dir.is_dir():
        raise InputError(
            f"{run_dir} is not a directory; pass the run directory of a Recorder, e.g. runs/adult"
        )
    if not (run_dir / JOURNAL).is_file():
        raise InputError(
            f"{run_dir} holds no {JOURNAL}; pass the run directory of a Recorder, e.g. runs/adult"
        )
    checks = verify_run(run_dir)
    if as_json:
        typer.echo(json.dumps(to_json(checks), indent=2))
    else:
        table = Table(title=f"Evidence in {escape(str(run_dir))}", title_justify="left")
        for column in ("check", "status", "detail"):
            table.add_column(
                column, overflow="fold"
            )  # names of classes can be longer than a column
        colours = {PASSED: "green", FAILED: "bold red", NOT_CHECKED: "yellow"}
        for check in checks:
            status = f"[{colours[check.status]}]{check.status}[/]"
            table.add_row(escape(check.title), status, escape(check.detail))
        Console().print(table)
    if any(check.status == FAILED for check in checks):
        raise typer.Exit(1)
