"""Columns of training and test examples, and what their values read as. Sensitive."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import IntArray
from indpriv._columns.rows import Rows

FIXED_COLUMNS = ("example_id", "unit_id", "split", "label", "loss", "correct")
RESERVED_COLUMNS = {*FIXED_COLUMNS, "epsilon", "epsilon_lower", "epsilon_upper"}
RESULTS = ("correct", "loss")  # of the final model, which examples are grouped by if asked
MISSING = "(missing)"
_EMPTY = "(empty)"


def groupable_columns(frame: pd.DataFrame | Rows) -> list[str]:
    """Columns that examples can be grouped by: the label and metadata."""
    return ["label", *(name for name in frame.columns if name not in RESERVED_COLUMNS)]


def to_floats(column: "pd.Series[Any]") -> NDArray[np.float64]:
    """A column of numbers or booleans, with missing values of any kind, as float64 with NaN."""
    if _is_plain(column):
        return column.to_numpy(dtype=np.float64, copy=True)
    values = column.to_numpy(dtype=object, copy=True)
    values[column.isna().to_numpy()] = np.nan
    floats: NDArray[np.float64] = values.astype(np.float64)
    return floats


def _is_plain(column: "pd.Series[Any]") -> bool:
    """Whether it holds numbers or booleans of numpy, which need no Python object each."""
    return isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"


def mean_of_known(values: NDArray[np.float64]) -> float | None:
    """The mean of the values that are not NaN; None without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def to_texts(column: "pd.Series[Any]") -> NDArray[np.object_]:
    """Values of a column as names of groups; a missing value becomes "(missing)"."""
    codes, texts = coded(column)
    found: NDArray[np.object_] = np.array([*texts, MISSING], dtype=object)[codes]
    return found


def coded(column: "pd.Series[Any]") -> tuple[IntArray, list[str]]:
    """Codes of the values, -1 where missing, and their texts; 1.0 among whole numbers reads 1."""
    codes, uniques = pd.factorize(column, use_na_sentinel=True)
    return codes, [_text(value) for value in uniques.tolist()]


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    if text in (MISSING, _EMPTY):
        return repr(text)  # otherwise it would look like our name for a missing value
    return text or _EMPTY
