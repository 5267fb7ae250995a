"""Rows that may belong to one person without being declared as such. Sensitive."""

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype

from indpriv._columns import FIXED_COLUMNS, to_texts
from indpriv.analysis.statistics.histogram import BLOCK
from indpriv.norm_log.norm_log import NormLog

# Words in a column's name that suggest it says whose row each is.
_LIKELY = re.compile(
    r"(^|_)(user|person|people|patient|client|customer|subject|owner|household|participant|speaker|"
    r"author|member)s?(_|$)"
    r"|(^|_)(uuid|ssn|email|name)$|.+_id$",
    re.IGNORECASE,
)
_NAMED = 5  # number of groups of repeated rows that are named


def undeclared_people(log: NormLog, train: pd.DataFrame) -> list[str]:
    """Signs that a person has several rows, in sentences; fewer where unit_ids are known.

    `train` holds the training examples in the log's order.
    """
    return [*_likely_columns(log, train), *_repeated_rows(log, train)]


def _likely_columns(log: NormLog, train: pd.DataFrame) -> list[str]:
    if log.unit_ids is not None:
        return []
    found = []
    for column in (
        name for name in train.columns if name not in FIXED_COLUMNS and _LIKELY.search(str(name))
    ):
        n_known, n_distinct = int(train[column].notna().sum()), int(train[column].nunique())
        if 1 < n_distinct < n_known:
            found.append(
                f"{column} seems to say whose row each is, and has {n_distinct:,} values for "
                f"{n_known:,} rows. If so, a person's epsilon is larger than each row's: audit "
                f"with --unit-column {column}."
            )
    return found


def _repeated_rows(log: NormLog, train: pd.DataFrame) -> list[str]:
    """Rows that agree in label, loss, metadata and every record, but not in their unit."""
    compared = [name for name in train.columns if name not in ("example_id", "unit_id")]
    known = train["loss"].notna().to_numpy()
    rows = _hashes(train, compared)
    positions = np.flatnonzero(known & pd.Series(rows).duplicated(keep=False).to_numpy())
    if not len(positions):
        return []
    codes = log.take(positions).read()
    seen: dict[tuple[object, ...], list[int]] = {}
    for place, position in enumerate(positions.tolist()):
        key = (*train.iloc[position][compared].astype(str).tolist(), codes[:, place].tobytes())
        seen.setdefault(key, []).append(position)
    groups = [rows for rows in seen.values() if len(rows) > 1 and _different_units(log, rows)]
    if not groups:
        return []
    named = "; ".join(
        " = ".join(map(str, log.example_ids[rows].tolist())) for rows in groups[:_NAMED]
    )
    return [
        f"{sum(map(len, groups)):,} rows repeat each other in label, loss, metadata and every "
        f"recorded norm ({named}{'; ...' if len(groups) > _NAMED else ''}). If they are one "
        "person's, that person's epsilon is larger than each row's: give them one unit id, or drop "
        "the repeats before training."
    ]


def _hashes(train: pd.DataFrame, columns: list[str]) -> NDArray[np.uint64]:
    """(n_rows,) a number that rows share which agree in these columns, and hardly any others."""
    found = np.empty(len(train), np.uint64)
    for start in range(0, len(train), BLOCK):
        block = train[columns].iloc[start : start + BLOCK]
        texts = block.apply(lambda column: column if is_numeric_dtype(column) else to_texts(column))
        found[start : start + BLOCK] = pd.util.hash_pandas_object(texts, index=False).to_numpy()
    return found


def _different_units(log: NormLog, rows: list[int]) -> bool:
    return log.unit_ids is None or len(pd.unique(log.unit_ids[rows])) > 1
