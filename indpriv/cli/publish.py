"""Commands that use a finished audit: release, statement, model-card, gate and pdf."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from indpriv._shown import Console, escape
from indpriv.cli.first_contact import checked_run, typed
from indpriv.cli.options import (
    AuditDir,
    Json,
    SignedBy,
    check_folder,
    print_json,
    progress_bar,
    say,
)
from indpriv.errors import InputError

Epsilon = Annotated[
    float,
    typer.Option(
        help="Epsilon that this release may spend, e.g. 0.1, in addition to the run's guarantee."
    ),
]
Quantiles = Annotated[
    str, typer.Option(help='Quantiles to release, each between 0 and 1; "" for none.')
]
Mean = Annotated[
    bool, typer.Option("--mean", help="Release the mean, and a noisy number of people.")
]
ReleaseDelta = Annotated[float, typer.Option(help="Delta of this release, for --method descent.")]
ReleaseMethod = Annotated[
    str,
    typer.Option(
        help="exponential; histogram (the cost does not grow with the number of quantiles); or "
        "descent (Andrew et al. 2021)."
    ),
]
GroupColumn = Annotated[
    str, typer.Option(help="Column of groups; name each group to release with --group.")
]
Group = Annotated[
    list[str] | None,
    typer.Option(
        help="Name of a group in --by. Can be given several times. The list must be public."
    ),
]
PublicN = Annotated[int | None, typer.Option(help="Number of people, if it is already public.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Limit on all releases of this audit together, set once: EPSILON or EPSILON,DELTA.",
    ),
]
Spend = Annotated[
    bool, typer.Option("--spend", help="Draw again and pay again, even if the answer is stored.")
]
LedgerOption = Annotated[
    Path | None, typer.Option(help="Folder of a ledger that copies of this audit share.")
]
Norms = Annotated[
    bool,
    typer.Option("--norms", help="Release gradient norms before the first step of a run instead."),
]

MaxWorstCaseEpsilon = Annotated[
    float | None, typer.Option(help="Largest worst-case epsilon, which is the guaranteed one.")
]
MaxDelta = Annotated[float | None, typer.Option(help="Largest delta of the guarantee.")]
MaxMedianEpsilon = Annotated[
    float | None, typer.Option(help="Largest median of the individual epsilons.")
]
MaxP95Epsilon = Annotated[
    float | None, typer.Option(help="Largest 95th percentile of the individual epsilons.")
]
MaxP99Epsilon = Annotated[
    float | None, typer.Option(help="Largest 99th percentile of the individual epsilons.")
]
MaxEpsilon = Annotated[float | None, typer.Option(help="Largest individual epsilon.")]
MaxGroupRatio = Annotated[
    float | None,
    typer.Option(
        help="Largest ratio of mean epsilon of the worst-off to the best-off group of a table."
    ),
]
MinCoverage = Annotated[
    float | None, typer.Option(help="Smallest share of steps with a record, 0 to 1.")
]
MinTestAccuracy = Annotated[
    float | None, typer.Option(help="Smallest test accuracy of the final model, 0 to 1.")
]
RequiredUnit = Annotated[str | None, typer.Option(help="Required unit of privacy, e.g. user.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Require exact individual epsilons, not estimates.")
]
Verified = Annotated[
    bool,
    typer.Option("--verified", help="Require that the guarantee was checked, not only declared."),
]
GateRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="The audited run: figures are computed again from its log, and --signed-by is of it.",
        show_default="the run that AUDIT_DIR lies in",
    ),
]
Figures = Annotated[
    bool,
    typer.Option(
        "--figures",
        help="Also show figures computed from the data. They are sensitive: not for a public log.",
    ),
]
_GATE_COLUMNS = ("condition", "", "found", "required", "known")


def release(
    path: Annotated[
        Path,
        typer.Argument(metavar="AUDIT_DIR", help="Audit directory; with --norms, a run directory."),
    ],
    epsilon: Epsilon,
    quantiles: Quantiles = "0.1,0.3,0.5,0.7,0.9",
    mean: Mean = False,
    delta: ReleaseDelta = 0.0,
    method: ReleaseMethod = "exponential",
    by: GroupColumn = "",
    group: Group = None,
    public_n: PublicN = None,
    budget: BudgetOption = None,
    spend: Spend = False,
    ledger: LedgerOption = None,
    norms: Norms = False,
    as_json: Json = False,
) -> None:
    """Release quantiles and the mean of individual epsilon with differential privacy, for others.

    Example: indpriv release reports/adult --mean --epsilon 0.1 --budget 0.5
    """
    from indpriv.norm_log.run_files import holds_log
    from indpriv.release import Request, parse_budget, parse_quantiles
    from indpriv.release import release as release_figures
    from indpriv.release.page import print_release

    if holds_log(path) != norms:
        _refuse_other_figures(path, norms)
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
    limit = parse_budget(budget) if budget else None
    published = release_figures(path, request, budget=limit, spend=spend, ledger_dir=ledger)
    if as_json:
        print_json(published.content)
        return
    console = Console()
    print_release(published.content, console)
    source = (
        "drawn now and paid for"
        if published.fresh
        else "stored answer, shown at no further cost; --spend draws again"
    )
    console.print(
        f"\n[bold]{escape(str(published.folder))}[/] ({source})", soft_wrap=True, highlight=False
    )


def _refuse_other_figures(path: Path, norms: bool) -> None:
    """Budget is spent only on the figures that were asked for."""
    if norms:
        raise InputError(f"--norms is for a run directory, and {path} is none; leave it out")
    audit_dir = path / "audit"
    made = "" if audit_dir.is_dir() else f"after {typed('audit', path)}, "
    raise InputError(
        f"{path} is a run, and epsilons are released from its audit; {made}type: "
        f"{typed('release', audit_dir)} ...; norms before the first step need --norms"
    )


def create_statement(
    audit_dir: AuditDir,
    example: Annotated[
        str | None, typer.Option(help="Id of the example whose owner gets the statement.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Id of the person, if the audit's units are people.")
    ] = None,
    every_owner: Annotated[
        bool, typer.Option("--all", help="Write one file for each owner.")
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Directory to write statements to.", show_default="AUDIT_DIR/statements"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page in plain language that tells one owner, or each, their own epsilon.

    A statement is for that owner only.

    Example: indpriv statement create reports/adult --example 17
    """
    from indpriv.release.statement import owners, write_statements

    if (example is not None) + (unit is not None) + every_owner != 1:
        raise InputError("pass one of --example ID, --unit ID and --all")
    check_folder("--output-dir", output_dir or audit_dir)
    chosen = owners(audit_dir, example=example, unit=unit)
    with progress_bar() as progress:
        paths = write_statements(audit_dir, chosen, output_dir, progress)
    if as_json:
        print_json([str(path) for path in paths])
    elif every_owner:
        say(f"{len(paths)} statements in {paths[0].parent}, each for one owner only")
    else:
        say(paths[0].read_text(encoding="utf-8"))
        say(f"{paths[0]}: for this owner only")


def model_card(audit_dir: AuditDir) -> None:
    """Write the guarantee as a model-card block (YAML and Markdown, as on Hugging Face).

    It is for others. It contains the worst case, the public settings and shareable/release.json,
    and no figure computed from the data.

    Example: indpriv model-card reports/adult
    """
    from indpriv._files import write_atomically
    from indpriv._folders import make_folder
    from indpriv.audit import read_summary
    from indpriv.release.ledger import SHAREABLE
    from indpriv.release.page import MODEL_CARD, read_release, render_model_card

    text = render_model_card(read_summary(audit_dir), read_release(audit_dir))
    folder = make_folder(audit_dir, SHAREABLE)
    write_atomically(folder / MODEL_CARD, text.encode("utf-8"))
    say(text)
    say(f"{folder / MODEL_CARD}: for others")


def pdf(
    audit_dir: Annotated[
        Path, typer.Argument(metavar="AUDIT_DIR", help="Audit directory: holds report.html.")
    ],
) -> None:
    """Print the report of an audit to report.pdf with an installed Chromium. The file is sensitive.

    Example: indpriv pdf reports/adult
    """
    from indpriv.analysis.summary import SENSITIVE
    from indpriv.audit.audit_directory import REPORT
    from indpriv.report.pdf import print_pdf

    target = audit_dir / "report.pdf"
    print_pdf(audit_dir / REPORT, target)
    say(f"{target}: {SENSITIVE}")


def gate(
    audit_dir: AuditDir,
    max_worst_case_epsilon: MaxWorstCaseEpsilon = None,
    max_delta: MaxDelta = None,
    max_median_epsilon: MaxMedianEpsilon = None,
    max_p95_epsilon: MaxP95Epsilon = None,
    max_p99_epsilon: MaxP99Epsilon = None,
    max_epsilon: MaxEpsilon = None,
    max_group_ratio: MaxGroupRatio = None,
    min_coverage: MinCoverage = None,
    min_test_accuracy: MinTestAccuracy = None,
    unit: RequiredUnit = None,
    exact: Exact = False,
    verified: Verified = False,
    signed_by: SignedBy = None,
    run_dir: GateRun = None,
    figures: Figures = False,
    as_json: Json = False,
) -> None:
    """Compare an audit with limits, for pipelines: exit code 1 with the reason if one fails.

    Always required: a guarantee that no check contradicts, delta below 1/n, no failed check, no
    attack above the worst case. What the audit's tables and the run's log give is computed again;
    the rest of audit.json is believed, and each condition says which of the two.

    Example: indpriv gate reports/adult --max-worst-case-epsilon 8 --min-coverage 1.0
    """
    from indpriv.audit.gate import Limits, judge_audit

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
    if signed_by is not None or run_dir is not None:
        run_dir = checked_run(run_dir or audit_dir.absolute().parent, "gate AUDIT_DIR --run")
    conditions = judge_audit(audit_dir, limits, run_dir, signed_by)
    shown = [condition.shown(figures=figures) for condition in conditions]
    passed = all(condition.passed for condition in conditions)
    if as_json:
        print_json({"passed": passed, "conditions": shown})
    else:
        title = "PASSED" if passed else "FAILED"
        table = Table(*_GATE_COLUMNS, title=title, title_justify="left")
        for row in shown:
            mark = "[green]passed[/]" if row["passed"] else "[bold red]failed[/]"
            texts = (escape(row[name]) for name in ("found", "asked", "known"))
            table.add_row(escape(row["name"]), mark, *texts)
        Console().print(table)
    if not passed:
        raise typer.Exit(1)
