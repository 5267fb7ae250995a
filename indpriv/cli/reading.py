"""Commands that read what exists: groups, compare, verify; and convert, for norms."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from indpriv._shown import Console, escape
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import (
    AuditDir,
    By,
    Json,
    SignedBy,
    check_folder,
    print_json,
    progress_bar,
    say,
)
from indpriv.errors import ChainError, EvidenceError

if TYPE_CHECKING:
    from indpriv.norm_log.evidence import Check
    from indpriv.norm_log.lines import Line


def groups(
    audit_dir: AuditDir,
    by: By = None,
    within: Annotated[
        str | None, typer.Option(help="label: show only the tables within each label.")
    ] = None,
    min_size: Annotated[
        int,
        typer.Option(help="Mark groups with fewer training examples than this as too small."),
    ] = 10,
    as_json: Json = False,
) -> None:
    """Compare epsilon and accuracy of groups: raw, within each label, and label-standardised.

    Example: indpriv groups reports/adult --by race --by sex --by race,sex --by age:bins=10
    """
    from indpriv.audit import groups_json, groups_of, read_summary
    from indpriv.report.screens import print_groups

    tables = groups_of(audit_dir, by or [], within=within, min_size=min_size)
    summary = read_summary(audit_dir)
    if as_json:
        print_json(groups_json(tables, summary))
    else:
        print_groups(tables, summary, Console(), raw=within is None)


def compare(
    audit_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="AUDIT_DIR...",
            help="Two or more audits of the same data, or runs that hold their audit.",
        ),
    ],
    by: By = None,
    at_epsilon: Annotated[
        float | None,
        typer.Option(help="Also compare test accuracies when the worst case was this epsilon."),
    ] = None,
    at_accuracy: Annotated[
        float | None,
        typer.Option(help="Also compare worst cases when test accuracy first reached this share."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare audits of the same data: which examples are better or worse off than in the first.

    Example: indpriv compare reports/adult reports/adult-clipped --by race

    Runs that differ only in their randomness show how stable ranks and the order of groups are.
    --at-epsilon and --at-accuracy read the curve of test accuracy in curve.parquet.
    """
    from indpriv.audit import compare_audits, comparison_json
    from indpriv.report.screens import print_comparison

    found = compare_audits(audit_dirs, by or [], at_epsilon=at_epsilon, at_accuracy=at_accuracy)
    if as_json:
        print_json(comparison_json(found))
    else:
        print_comparison(found, Console())


def convert(
    norms: Annotated[
        Path,
        typer.Argument(metavar="NORMS", help="norms.parquet or norms.npz, from any trainer."),
    ],
    run_json: Annotated[
        Path,
        typer.Option(
            "--run", help="run.json with the steps, noise, clipping and sampling of that run."
        ),
    ],
    output_dir: Annotated[Path, typer.Option(help="New run directory to write.")],
    rounding: Annotated[
        float,
        typer.Option(
            help="Round norms up to multiples of this fraction of max_grad_norm; 0 does not round."
        ),
    ] = 0.01,
    as_json: Json = False,
) -> None:
    """Check gradient norms from another trainer (JAX, TF, ...) and turn them into a run directory.

    Example: indpriv convert norms.npz --run run.json --output-dir runs/jax
    """
    from indpriv.norm_log.convert import convert as convert_norms
    from indpriv.norm_log.norm_log import NormLog

    check_folder("--output-dir", output_dir)
    with progress_bar() as progress:
        convert_norms(norms, run_json, output_dir, rounding=rounding, progress=progress)
    log = NormLog.open(output_dir)
    if as_json:
        facts = {"run_dir": str(output_dir), "examples": log.n_examples, "records": log.n_records}
        print_json({**facts, "steps": log.total_steps})
    else:
        say(
            f"{output_dir}: {log.n_records} records of {log.n_examples} examples, "
            f"{log.total_steps} steps"
        )


def verify(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run directory that a Recorder wrote.")
    ] = None,
    signed_by: SignedBy = None,
    as_json: Json = False,
) -> None:
    """Check a run's log, and say what its account rests on, line by line.

    Example: indpriv verify runs/adult

    Exit code 1 if a check failed or a line is refuted, 3 if a line that a Recorder can verify is
    not verified, 2 if the journal cannot be read. Without Poisson sampling, the checks are those of
    an audit with known participation.
    """
    from indpriv._plain import to_json
    from indpriv.norm_log.evidence import FAILED, HASH_CHAIN, NOT_CHECKED, PASSED
    from indpriv.norm_log.lines import DECLARED, REFUTED, VERIFIED, evidence, is_earned, lines_of

    run_dir = checked_run(run_dir, "verify")
    try:
        checks, lines = _evidence_of_audit(run_dir, signed_by)
    except ChainError as error:
        checks = [HASH_CHAIN.failed(str(error))]
        lines = lines_of(checks, {})
    if as_json:
        found = {"lines": to_json(lines), "checks": to_json(checks)}
        print_json({"evidence": evidence(lines), **found})
    else:
        colours = {PASSED: "green", FAILED: "bold red", NOT_CHECKED: "yellow"}
        colours |= {VERIFIED: "green", REFUTED: "bold red", DECLARED: "yellow"}
        for title, first, second, rows in (
            ("Checks of", "check", "status", [(c.title, c.status, c.detail) for c in checks]),
            ("Evidence in", "line", "word", [(n.title, n.word, n.found) for n in lines]),
        ):
            table = Table(title=f"{title} {escape(str(run_dir))}", title_justify="left")
            for column in (first, second, "detail"):
                table.add_column(column, overflow="fold")  # class names can be wider than a column
            for name, word, detail in rows:
                status = f"[{colours[word]}]{word}[/]" if word in colours else word
                table.add_row(escape(name), status, escape(detail))
            Console().print(table)
        Console().print(f"Evidence: {evidence(lines)}", soft_wrap=True)
    if any(check.status == FAILED for check in checks) or REFUTED in {one.word for one in lines}:
        raise typer.Exit(1)
    if not is_earned(lines):
        raise typer.Exit(3)


def _evidence_of_audit(
    run_dir: Path, signed_by: Path | None
) -> tuple[Sequence[Check], Sequence[Line]]:
    """Checks and lines as an audit of the run has them: fewer if participation counts as known."""
    from indpriv.analysis.declared import Declared
    from indpriv.analysis.variants import usual_participation
    from indpriv.norm_log.checks.of_known import ANY_CHOICE, OF_SECRECY, if_known
    from indpriv.norm_log.lines import lines_of
    from indpriv.norm_log.norm_log import open_run
    from indpriv.norm_log.schema import read_run_json
    from indpriv.norm_log.verify import verify as checks_of

    opened = open_run(run_dir, hash_all=True)
    checks, state, known = checks_of(opened, signed_by), opened.state, False
    with suppress(EvidenceError):  # as a check says
        known = usual_participation(opened.log, None) == "known"
    if known:
        checks = [*if_known(checks), *([ANY_CHOICE] if state.sampler == "other" else [])]
    declared = Declared.from_run_json(read_run_json(state.run_dir))
    recorder = {**state.header["run"], "seeded": state.seeded}
    left_out = OF_SECRECY if known else frozenset[str]()
    return checks, lines_of(checks, recorder, declared.of_lines, left_out)
