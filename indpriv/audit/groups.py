"""Which groups an audit compares, and group tables of an audit directory. Sensitive."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from indpriv._checks import check_choice
from indpriv._columns import (
    MAX_NUMERIC_VALUES,
    MOST_GROUPS,
    Partition,
    Rows,
    as_rows,
    frames_of,
    groupable_columns,
    grouping_of,
    known_columns,
    rows_at,
)
from indpriv._plain import to_json
from indpriv.analysis.groups import MIN_GROUP, GroupTable, group_tables
from indpriv.audit.audit_directory import read_audit
from indpriv.audit.run_directory import RecordedRun
from indpriv.audit.variants import compared_positions
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog


def choose_groups(
    train: pd.DataFrame | Rows, by: Sequence[str], declared: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Columns to group by, and sentences on what was left out.

    The columns asked for, else those declared before training, else the label and every metadata
    column that can be read as groups: numeric columns with many values in ten bins; other columns
    with many values are left out.
    """
    if by:
        return list(dict.fromkeys(by)), []
    if declared:
        return list(declared), []
    chosen, left_out, rows = [], [], as_rows(train)
    for column in groupable_columns(rows):
        distinct, numeric = _distinct(rows, column)
        if not distinct:  # units of rows that differ in it
            continue
        if distinct <= MAX_NUMERIC_VALUES:
            chosen.append(column)
        elif numeric:
            chosen.append(f"{column}:bins=10")
        else:
            least = "at least " if distinct > MOST_GROUPS and len(rows.ranges()) > 1 else ""
            left_out.append(
                f"{column} has {least}{distinct:,} distinct values and was not grouped by; ask "
                f"with --by "
                f"{column}."
            )
    return chosen, left_out


def _distinct(rows: Rows, column: str) -> tuple[int, bool]:
    """Number of distinct values, and whether they are numbers; counting ends at MOST_GROUPS."""
    values, numeric = set[object](), True
    for frame in frames_of(rows, [column]):
        known = frame[column].dropna()
        numeric = numeric and (is_numeric_dtype(known) or known.empty)
        values.update(known.unique().tolist())
        if len(values) > MOST_GROUPS:
            break
    return len(values), numeric


def compared_groups(log: NormLog, recorded: RecordedRun, by: Sequence[str]) -> dict[str, Partition]:
    """Groups by each column of the examples whose estimates are compared with exact values.

    None without exact values, and for units of several rows.
    """
    exact = log.coverage == 1 or log.reference_positions is not None
    if not exact or recorded.examples is None or log.unit_ids is not None:
        return {}
    rows = recorded.examples.train_rows(log.example_ids)
    columns, _ = choose_groups(rows, by, recorded.declared.groups)
    nobody, positions, found = rows.read(0, 0), compared_positions(log), {}
    for column in columns:
        groups = grouping_of(rows, nobody, column)
        read = known_columns(rows, groups.columns)
        every = np.arange(len(rows)) if positions is None else positions
        frame = rows_at(rows, every, read)
        found[column] = Partition(
            groups.columns, groups.names, groups.codes(frame), groups.codes(nobody)
        )
    return found


def groups_of(
    audit_dir: Path, by: Sequence[str], *, within: str | None = None, min_size: int = MIN_GROUP
) -> tuple[GroupTable, ...]:
    """Group tables of an audit directory; default by the label and every metadata column.

    Args:
        audit_dir: what `audit` wrote.
        by: see `indpriv.analysis.groups.group_table`.
        within: "label" if only tables within label are wanted; a column without them is refused.
        min_size: a group with fewer training examples is too small to read.
    """
    table, examples = read_audit(Path(audit_dir))
    train = examples.aligned(table.example_ids)
    columns, _ = choose_groups(train, by, ())
    if within is not None:
        check_choice("within", within, ("label",))
        columns = list(by) or [column for column in columns if column != "label"]
        if not columns:
            raise InputError(
                "--within label: there is no column to group by except the label itself; leave out "
                "--within"
            )
    tables = group_tables(table, train, examples.test, columns, min_size=min_size)
    for found in tables if within is not None else ():
        if not found.within_label:
            raise InputError(
                f"--by {found.by} has no table within label{_because(found)}; leave out --within"
            )
    return tables


def _because(table: GroupTable) -> str:
    if "label" in table.columns:
        return ": it groups by the label itself"
    return f": {table.notes[0]}" if table.notes else ""


def groups_json(tables: Sequence[GroupTable], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Group tables as JSON values, each with the meaning of its epsilons from audit.json."""
    meaning = {name: summary[name] for name in ("sensitive", "disclaimer", "meaning", "claim")}
    meaning["worst_case_epsilon"] = summary["guarantee"]["worst_case_epsilon"]
    return [{**meaning, **to_json(table)} for table in tables]
