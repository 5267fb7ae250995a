"""Commands whose output is for others: release and statement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from indpriv.cli.options import Json, progress_bar
from indpriv.errors import InputError


def release(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="AUDIT_DIR", help="An audit; or a RUN, for norms before its first step."
        ),
    ],
    epsilon: Annotated[
        float,
        typer.Option(help="What this release may cost, e.g. 0.1, on top of the run's guarantee."),
    ],
    quantiles: Annotated[
        str, typer.Option(help='Each in (0, 1); "" for none.')
    ] = "0.1,0.3,0.5,0.7,0.9",
    mean: Annotated[
        bool, typer.Option("--mean", help="Release the mean, and a noisy number of people.")
    ] = False,
    delta: Annotated[float, typer.Option(help="For method descent only.")] = 0.0,
    method: Annotated[
        str,
        typer.Option(
            help="exponential, histogram (many quantiles at the price of one) or descent (Andrew et al. 2021)."
        ),
    ] = "exponential",
    by: Annotated[str, typer.Option(help="Column of groups, each named by --group.")] = "",
    group: Annotated[
        list[str] | None, typer.Option(help="A group to show; the list must be public.")
    ] = None,
    public_n: Annotated[
        int | None, typer.Option(help="Number of people, if that is public anyway.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Limit on all releases of this audit, set once: EPSILON or EPSILON,DELTA."
        ),
    ] = None,
    spend: Annotated[
        bool,
        typer.Option("--spend", help="Draw afresh and pay again, though the answer is stored."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Release quantiles and the mean of individual epsilon with differential privacy, for others to see.

    Example: indpriv release reports/adult --quantiles 0.1,0.3,0.5,0.7,0.9 --mean --epsilon 0.1 --budget 0.5
    """
    from indpriv.release import Request, parse_budget, parse_quantiles
    from indpriv.release import release as release_figures
    from indpriv.release.page import print_release

    request = Request(
        parse_quantiles(quantiles),
        mean,
        epsilon=epsilon,
        delta=delta,
        method=method,
        by=by,
        groups=tuple(group or ()),
        public_n=public_n,
    )
    published = release_figures(
        path, request, budget=parse_budget(budget) if budget else None, spend=spend
    )
    if as_json:
        typer.echo(json.dumps(published.content, indent=2, allow_nan=False))
        return
    console = Console()
    print_release(published.content, console)
    drawn = (
        "drawn now and paid for"
        if published.fresh
        else "stored: shown again at no cost; --spend draws afresh"
    )
    console.print(
        f"\n[bold]{escape(str(published.folder))}[/] ({drawn})", soft_wrap=True, highlight=False
    )


def create_statement(
    audit_dir: Annotated[
        Path, typer.Argument(metavar="AUDIT_DIR", help="A directory with an audit.json.")
    ],
    example: Annotated[
        str | None, typer.Option(help="Id of the example whose owner is told.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Id of the person, where rows belong to people.")
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="One file for every owner.")] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of statements.", show_default="AUDIT_DIR/statements")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell one owner, or each, their own epsilon, on a page in plain language. It is for that owner only.

    Example: indpriv statement create reports/adult --example 17
    """
    from indpriv.release.statement import owners, write_statements

    if (example is not None) + (unit is not None) + everybody != 1:
        raise InputError("pass one of --example ID, --unit ID and --all")
    chosen = owners(audit_dir, example=example, unit=unit)
    with progress_bar() as progress:
        paths = write_statements(audit_dir, chosen, output_dir, progress)
    if as_json:
        typer.echo(json.dumps([str(path) for path in paths], indent=2))
    elif everybody:
        typer.echo(f"{len(paths)} statements in {paths[0].parent}, each for one owner only")
    else:
        typer.echo(paths[0].read_text(encoding="utf-8"))
        typer.echo(f"{paths[0]}: for this owner only")
