"""Rows that may belong to one person without being declared as such. Sensitive."""

import re
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from indpriv._columns import FIXED_COLUMNS, Rows, as_rows, frames_of, rows_at, to_floats, to_texts
from indpriv._facts import text
from indpriv._repeats import Repeats, numbers_of
from indpriv.analysis.statistics.weighted import BLOCK
from indpriv.norm_log.norm_log import NormLog

# Words in a column's name that suggest it says whose row each is.
_LIKELY = re.compile(
    r"(^|_)(user|person|people|patient|client|customer|subject|owner|household|participant|speaker|"
    r"author|member)s?(_|$)"
    r"|(^|_)(uuid|ssn|email|name)$|.+_id$",
    re.IGNORECASE,
)
_MOST_REPEATED = 1 << 17  # rows with a repeated hash that are compared
_NAMED = 5  # number of groups of repeated rows that are named


def undeclared_people(log: NormLog, train: pd.DataFrame | Rows) -> list[str]:
    """Signs that a person has several rows, in sentences; fewer where unit_ids are known.

    `train` holds the training examples in the log's order.
    """
    rows = as_rows(train)
    return [*_likely_columns(log, rows), *_repeated_rows(log, rows)]


def _likely_columns(log: NormLog, rows: Rows) -> list[str]:
    if log.unit_ids is not None:
        return []
    found = []
    for column in (
        name for name in rows.columns if name not in FIXED_COLUMNS and _LIKELY.search(str(name))
    ):
        n_known, n_distinct = _known_and_distinct(rows, column)
        if 1 < n_distinct < n_known:
            found.append(
                text(
                    "hazard.duplicates", "column", column=column, distinct=n_distinct, known=n_known
                )
            )
    return found


def _known_and_distinct(rows: Rows, column: str) -> tuple[int, int]:
    """Number of known values of a column, and of distinct hashes of them."""
    n_known = 0
    with Repeats(len(rows)) as found:
        for frame in frames_of(rows, [column]):
            known = frame[column].dropna()
            n_known += len(known)
            found.add(numbers_of(known.reset_index(drop=True)))
        return n_known, found.distinct()


def _repeated_rows(log: NormLog, rows: Rows) -> list[str]:
    """Rows that agree in label, loss, metadata and every record, but not in their unit."""
    compared = [name for name in rows.columns if name not in ("example_id", "unit_id")]
    with Repeats(len(rows)) as found:
        for frame in frames_of(rows, compared):
            for start in range(0, len(frame), BLOCK):
                found.add(_hashes(frame.iloc[start : start + BLOCK]))
        positions = found.positions(_MOST_REPEATED)
    repeated = rows_at(rows, positions, compared)
    known = repeated["loss"].notna().to_numpy()
    positions, repeated = positions[known], repeated[known]
    if not len(positions):
        return []
    codes = log.take(positions).read()
    seen: dict[tuple[object, ...], list[int]] = {}
    texts = zip(*(to_texts(repeated[name]) for name in compared), strict=True)
    for place, (position, values) in enumerate(zip(positions.tolist(), texts, strict=True)):
        seen.setdefault((*values, codes[:, place].tobytes()), []).append(position)
    groups = [same for same in seen.values() if len(same) > 1 and _different_units(log, same)]
    if not groups:
        return []
    named = "; ".join(
        " = ".join(map(str, log.example_ids[same].tolist())) for same in groups[:_NAMED]
    )
    n = f"{sum(map(len, groups)):,}"
    count = n if len(positions) < _MOST_REPEATED else f"At least {n}"
    named += "; ..." if len(groups) > _NAMED else ""
    return [text("hazard.duplicates", "rows", count=count, named=named)]


def _hashes(frame: pd.DataFrame) -> NDArray[np.uint64]:
    """(n_rows,) a number that rows share which agree in all columns, and hardly any others."""
    same = frame.apply(_alike)
    return np.asarray(pd.util.hash_pandas_object(same, index=False), np.uint64)


def _alike(column: "pd.Series[Any]") -> NDArray[Any]:
    """The values in one type, whichever missing values other ranges of rows have."""
    numbers = is_numeric_dtype(column) and not is_bool_dtype(column)
    return to_floats(column) if numbers else to_texts(column)


def _different_units(log: NormLog, rows: list[int]) -> bool:
    return log.unit_ids is None or len(pd.unique(log.unit_ids[rows])) > 1
