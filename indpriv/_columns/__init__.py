"""Columns of examples, the rows that they are read from, and groups by them."""

from indpriv._columns.columns import (
    FIXED_COLUMNS,
    MISSING,
    RESERVED_COLUMNS,
    RESULTS,
    groupable_columns,
    mean_of_known,
    to_floats,
    to_texts,
)
from indpriv._columns.grouping import (
    MAX_NUMERIC_VALUES,
    MOST_GROUPS,
    Grouping,
    Partition,
    grouping_of,
    known_columns,
    label_grouping,
    partition,
)
from indpriv._columns.rows import (
    FrameRows,
    RenamedRows,
    Rows,
    as_rows,
    frames_at,
    frames_of,
    rows_at,
)

__all__ = [
    "FIXED_COLUMNS",
    "MAX_NUMERIC_VALUES",
    "MISSING",
    "MOST_GROUPS",
    "RESERVED_COLUMNS",
    "RESULTS",
    "FrameRows",
    "Grouping",
    "Partition",
    "RenamedRows",
    "Rows",
    "as_rows",
    "frames_at",
    "frames_of",
    "groupable_columns",
    "grouping_of",
    "known_columns",
    "label_grouping",
    "mean_of_known",
    "partition",
    "rows_at",
    "to_floats",
    "to_texts",
]
