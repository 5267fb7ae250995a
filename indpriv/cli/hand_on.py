"""Commands for what comes after an audit: gate, model-card and pdf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from indpriv._files import write_atomically
from indpriv.analysis.summary import SENSITIVE
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import REPORT
from indpriv.audit.gate import Limits, judge
from indpriv.cli.options import Json
from indpriv.report.pdf import print_pdf


def gate(
    audit_dir: Annotated[
        Path, typer.Argument(metavar="AUDIT_DIR", help="A directory with an audit.json.")
    ],
    max_worst_case_epsilon: Annotated[float | None, typer.Option(help="Of the guarantee.")] = None,
    max_delta: Annotated[float | None, typer.Option(help="Of the guarantee.")] = None,
    max_median_epsilon: Annotated[float | None, typer.Option(help="Of individual epsilon.")] = None,
    max_p95_epsilon: Annotated[
        float | None, typer.Option(help="Likewise, the 95th percentile.")
    ] = None,
    max_p99_epsilon: Annotated[
        float | None, typer.Option(help="Likewise, the 99th percentile.")
    ] = None,
    max_epsilon: Annotated[float | None, typer.Option(help="Likewise, the largest.")] = None,
    max_group_ratio: Annotated[
        float | None,
        typer.Option(help="Mean epsilon of the worst-off over the best-off group, of every table."),
    ] = None,
    min_coverage: Annotated[
        float | None, typer.Option(help="Share of steps with a record, 0 to 1.")
    ] = None,
    min_test_accuracy: Annotated[
        float | None, typer.Option(help="Of the final model, 0 to 1.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Unit of privacy that is wanted, e.g. user.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Individual epsilons must not be estimates.")
    ] = False,
    verified: Annotated[
        bool, typer.Option("--verified", help="A guarantee that is declared only is too little.")
    ] = False,
    figures: Annotated[
        bool,
        typer.Option(
            "--figures",
            help="Show figures computed from the data too: sensitive, not for a public log.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Hold an audit against limits, for pipelines. Exit code 1 with the reason where one fails, 2 for bad input.

    Always asked: a guarantee that nothing speaks against, delta below 1/n, no failed check, no attack above the worst case.

    Example: indpriv gate reports/adult --max-worst-case-epsilon 8 --max-p99-epsilon 6 --min-coverage 1.0
    """
    limits = Limits(
        max_worst_case_epsilon=max_worst_case_epsilon,
        max_delta=max_delta,
        max_median_epsilon=max_median_epsilon,
        max_p95_epsilon=max_p95_epsilon,
        max_p99_epsilon=max_p99_epsilon,
        max_epsilon=max_epsilon,
        max_group_ratio=max_group_ratio,
        min_coverage=min_coverage,
        min_test_accuracy=min_test_accuracy,
        unit=unit,
        exact=exact,
        verified=verified,
    )
    conditions = judge(read_summary(audit_dir), limits)
    passed = all(condition.passed for condition in conditions)
    shown = [condition.shown(figures=figures) for condition in conditions]
    if as_json:
        typer.echo(json.dumps({"passed": passed, "conditions": shown}, indent=2))
    else:
        table = Table(
            "condition",
            "",
            "found",
            "asked",
            title="PASSED" if passed else "FAILED",
            title_justify="left",
        )
        for row in shown:
            mark = "[green]passed[/]" if row["passed"] else "[bold red]failed[/]"
            table.add_row(escape(row["name"]), mark, escape(row["found"]), escape(row["asked"]))
        Console().print(table)
    if not passed:
        raise typer.Exit(1)


def model_card(
    audit_dir: Annotated[
        Path, typer.Argument(metavar="AUDIT_DIR", help="A directory with an audit.json.")
    ],
) -> None:
    """Write a model-card block (YAML and Markdown, as on Hugging Face) of the guarantee, for others to see.

    It reads the worst case, the public settings and shareable/release.json, and no figure computed from the data.

    Example: indpriv model-card reports/adult
    """
    from indpriv.release.model_card import MODEL_CARD, read_release, render_model_card
    from indpriv.release.publish import SHAREABLE

    text = render_model_card(read_summary(audit_dir), read_release(audit_dir))
    folder = audit_dir / SHAREABLE
    folder.mkdir(mode=0o700, exist_ok=True)
    write_atomically(folder / MODEL_CARD, text.encode("utf-8"))
    typer.echo(text)
    typer.echo(f"{folder / MODEL_CARD}: for others")


def pdf(
    audit_dir: Annotated[
        Path, typer.Argument(metavar="AUDIT_DIR", help="A directory with a report.html.")
    ],
) -> None:
    """Print the report of an audit to report.pdf, with a Chromium that is installed. Sensitive, as the report is.

    Example: indpriv pdf reports/adult
    """
    target = audit_dir / "report.pdf"
    print_pdf(audit_dir / REPORT, target)
    typer.echo(f"{target}: {SENSITIVE}")
