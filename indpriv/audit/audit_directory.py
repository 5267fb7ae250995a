"""The audit directory: what later commands read.

It holds individual epsilons: sensitive, files are 0600.
"""

import stat
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._checks import check_choice
from indpriv._files import read_json, read_parquet, write_atomically, write_json
from indpriv._plain import to_json
from indpriv.analysis.groups.group_rows import MIN_GROUP
from indpriv.analysis.groups.group_table import GroupTable, group_tables
from indpriv.analysis.summary import AuditSummary
from indpriv.audit.run_directory import Evidence, in_rows_of
from indpriv.audit.summarise import choose_groups
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError, PrivacyWarning
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES, EXAMPLES_NON_DP
from indpriv.report.pictures import pictures_of
from indpriv.report.renderers.html import render_html
from indpriv.report.renderers.markdown import render_markdown

EPSILON, SUMMARY, REPORT, MARKDOWN = "epsilon.parquet", "audit.json", "report.html", "audit.md"


def write_audit(
    output_dir: Path,
    table: EpsilonTable,
    evidence: Evidence,
    summary: AuditSummary,
    images: NDArray[np.float32] | None = None,
) -> None:
    """Write an audit directory; audit.json last, so that a directory with one is whole.

    Args:
        output_dir: new, or that of an earlier audit.
        table: epsilons.
        evidence: of the run.
        summary: what was found.
        images: (n_examples, channels, height, width) training inputs, where the report shows those
            at both ends.
    """
    pictures = None if images is None else pictures_of(summary.drivers, images)
    output_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if output_dir.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        warnings.warn(
            f"{output_dir} can be entered by others; the files of this audit are readable by "
            "their owner only, but "
            f"keep it that way: chmod go= {output_dir}",
            PrivacyWarning,
            stacklevel=3,
        )
    (output_dir / SUMMARY).unlink(missing_ok=True)
    table.to_parquet(output_dir / EPSILON, columns=_columns(table, evidence.examples))
    for file, examples in ((EXAMPLES, evidence.examples), (EXAMPLES_NON_DP, evidence.non_dp)):
        if examples is None:
            (output_dir / file).unlink(missing_ok=True)  # of an earlier audit of another run
        else:
            examples.to_parquet(output_dir / file)
    write_atomically(output_dir / REPORT, render_html(summary, pictures).encode("utf-8"))
    write_atomically(output_dir / MARKDOWN, render_markdown(summary).encode("utf-8", "replace"))
    write_json(output_dir / SUMMARY, summary.to_json())


def _columns(table: EpsilonTable, examples: ExampleTable | None) -> pd.DataFrame | None:
    """Loss, correct, label and metadata in the table's order; a name that the table has itself gets a suffix."""
    if examples is None:
        return None
    examples = in_rows_of(table, examples)
    train = examples.aligned(table.example_ids)[
        ["loss", "correct", "label", *examples.metadata_columns]
    ]
    return train.rename(
        columns={
            name: f"{name} (metadata)"
            for name in examples.metadata_columns
            if name in table.details
        }
    )


def read_audit(audit_dir: Path) -> tuple[EpsilonTable, ExampleTable]:
    """The tables of an audit directory.

    Raises:
        InputError: no audit there, or one of a run without an example table.
    """
    _check_is_audit(audit_dir)
    if not (audit_dir / EXAMPLES).is_file():
        raise InputError(
            f"{audit_dir} holds no {EXAMPLES}: the audited run ended before its losses were taken"
        )
    table = EpsilonTable.from_frame(read_parquet(audit_dir / EPSILON))
    return table, in_rows_of(table, ExampleTable.from_parquet(audit_dir / EXAMPLES))


def _check_is_audit(audit_dir: Path) -> None:
    if not (audit_dir / SUMMARY).is_file():
        raise InputError(
            f"{audit_dir} holds no {SUMMARY}; make an audit first: indpriv audit RUN --output-dir "
            f"{audit_dir}"
        )


def read_summary(audit_dir: Path) -> dict[str, Any]:
    """The content of audit.json; InputError where it lacks what the epsilons mean."""
    path = audit_dir / SUMMARY
    _check_is_audit(audit_dir)
    summary = read_json(path)
    texts = ("sensitive", "disclaimer", "meaning", "claim")
    guarantee = summary.get("guarantee") if isinstance(summary, dict) else None
    worst = guarantee.get("worst_case_epsilon") if isinstance(guarantee, dict) else None
    if not (
        isinstance(worst, int | float)
        and not isinstance(worst, bool)
        and all(isinstance(summary.get(name), str) for name in texts)
    ):
        raise InputError(
            f"{path} lacks {', '.join(texts)} or guarantee.worst_case_epsilon, without which an "
            "epsilon means nothing; "
            "make the audit again"
        )
    return dict(summary)


def groups_of(
    audit_dir: Path, by: Sequence[str], *, within: str | None = None, min_size: int = MIN_GROUP
) -> tuple[GroupTable, ...]:
    """Group tables of an audit directory for any columns; default the label and every metadata column.

    Args:
        audit_dir: what `audit` wrote.
        by: see `indpriv.analysis.groups.group_table.group_table`.
        within: "label" where only tables within label are wanted: groupings that have none are then
            refused.
        min_size: training examples below which a group is too small to read.
    """
    table, examples = read_audit(Path(audit_dir))
    train = examples.aligned(table.example_ids)
    columns, _ = choose_groups(train, by, ())
    if within is not None:
        check_choice("within", within, ("label",))
        columns = list(by) or [column for column in columns if column != "label"]
        if not columns:
            raise InputError(
                "--within label: there is no column to group by but the label itself; leave out "
                "--within"
            )
    tables = group_tables(table, train, examples.test, columns, min_size=min_size)
    if within is not None:
        for found in tables:
            if not found.within_label:
                raise InputError(
                    f"--by {found.by} has no table within label{_because(found)}; leave out "
                    "--within"
                )
    return tables


def _because(table: GroupTable) -> str:
    if "label" in table.columns:
        return ": it groups by the label itself"
    return f": {table.notes[0]}" if table.notes else ""


def groups_json(tables: Sequence[GroupTable], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Group tables as JSON values, each with what its epsilons mean; summary is the content of audit.json."""
    meaning = {name: summary[name] for name in ("sensitive", "disclaimer", "meaning", "claim")}
    meaning["worst_case_epsilon"] = summary["guarantee"]["worst_case_epsilon"]
    return [{**meaning, **to_json(table)} for table in tables]
