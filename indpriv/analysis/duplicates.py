"""Rows that may belong to one person although nobody said so: repeated ids in a likely column, and repeated rows. Sensitive."""

import re

import numpy as np
import pandas as pd

from indpriv._columns import FIXED_COLUMNS
from indpriv.norm_log.norm_log import NormLog

# Words of a column's name that stand for whose row it is.
_LIKELY = re.compile(
    r"(^|_)(user|person|people|patient|client|customer|subject|owner|household|participant|speaker|author|member)s?(_|$)"
    r"|(^|_)(uuid|ssn|email|name)$|.+_id$",
    re.IGNORECASE,
)
_NAMED = 5  # groups of repeated rows that are named


def undeclared_people(log: NormLog, train: pd.DataFrame) -> list[str]:
    """What speaks for people behind several rows, in sentences; nothing where unit_ids say whose rows are whose.

    Args:
        log: the log.
        train: rows of the training examples in the log's order.
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
                f"{column} looks like whose row it is, and has {n_distinct:,} values for "
                f"{n_known:,} rows. If it is, each epsilon "
                f"is of one row and a person has more: audit with --unit-column {column}."
            )
    return found


def _repeated_rows(log: NormLog, train: pd.DataFrame) -> list[str]:
    """Rows that agree in label, loss, metadata and every record; of one unit, they are no surprise."""
    besides = [name for name in train.columns if name not in ("example_id", "unit_id")]
    known = train["loss"].notna().to_numpy()
    alike = known & train[besides].astype(str).duplicated(keep=False).to_numpy()
    positions = np.flatnonzero(alike)
    if not len(positions):
        return []
    codes = log.take(positions).read()
    seen: dict[tuple[object, ...], list[int]] = {}
    for place, position in enumerate(positions.tolist()):
        key = (*train.iloc[position][besides].astype(str).tolist(), codes[:, place].tobytes())
        seen.setdefault(key, []).append(position)
    groups = [rows for rows in seen.values() if len(rows) > 1 and _different_units(log, rows)]
    if not groups:
        return []
    named = "; ".join(
        " = ".join(map(str, log.example_ids[rows].tolist())) for rows in groups[:_NAMED]
    )
    return [
        f"{sum(map(len, groups)):,} rows repeat each other in label, loss, metadata and every "
        f"recorded norm ({named}"
        f"{'; ...' if len(groups) > _NAMED else ''}). If they are one person's, that person's "
        "epsilon is larger than each row's: give "
        "them one unit id, or drop the repeats before training."
    ]


def _different_units(log: NormLog, rows: list[int]) -> bool:
    return log.unit_ids is None or len(pd.unique(log.unit_ids[rows])) > 1
