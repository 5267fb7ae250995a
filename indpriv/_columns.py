"""Training and test examples in named groups by one column or several. Output is sensitive."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import IntArray
from indpriv._checks import check_positive_int
from indpriv.errors import InputError

FIXED_COLUMNS = ("example_id", "unit_id", "split", "label", "loss", "correct")
RESERVED_COLUMNS = {*FIXED_COLUMNS, "epsilon", "epsilon_lower", "epsilon_upper"}
RESULTS = ("correct", "loss")  # of the final model, which examples are grouped by if asked
MISSING = "(missing)"
_EMPTY = "(empty)"
_AND = " × "  # between the values of an intersection
MAX_NUMERIC_VALUES = 50
_MAX_BINS = 1000


@dataclass(frozen=True)
class Partition:
    """Groups by one column or several.

    Attributes:
        columns: the columns.
        names: of the groups.
        train_codes, test_codes: (n_examples,) the group of each example, as an index into names.
    """

    columns: tuple[str, ...]
    names: tuple[str, ...]
    train_codes: IntArray
    test_codes: IntArray


def groupable_columns(frame: pd.DataFrame) -> list[str]:
    """Columns that examples can be grouped by: the label and metadata."""
    return ["label", *(name for name in frame.columns if name not in RESERVED_COLUMNS)]


def partition(
    train: pd.DataFrame, test: pd.DataFrame, by: str, *, max_values: int | None = MAX_NUMERIC_VALUES
) -> Partition:
    """Split training and test rows by a column, or by the combinations of several.

    Args:
        train: training rows.
        test: test rows, with the same columns; may be empty.
        by: "label", "correct", "loss" or a metadata column; "column:bins=10" cuts a numeric column
            at quantiles of the training rows; "race,age:bins=4" makes a group of every combination
            that occurs.
        max_values: largest number of distinct values of a numeric column without bins; None for no
            limit.

    Returns:
        groups named by their values in sorted order; missing values are the group "(missing)".

    Raises:
        InputError: there is no such column, a column with bins is not numeric, or it has too many
            numeric values.
    """
    columns = [*groupable_columns(train), *(name for name in RESULTS if name in train)]
    if "," in by and by not in columns:
        return _intersection(
            [partition(train, test, part.strip(), max_values=max_values) for part in by.split(",")]
        )
    column, bins = _parse(by, columns)
    both = [
        train[column],
        test[column] if column in test.columns else pd.Series([None] * len(test), dtype=object),
    ]
    numeric = all(
        pd.api.types.is_numeric_dtype(part) or part.empty or part.isna().all() for part in both
    )
    boolean = all(
        pd.api.types.is_bool_dtype(part) or part.empty or part.isna().all() for part in both
    )
    if bins is not None:
        if not numeric or boolean:
            raise InputError(
                f"{by!r}: {column} is not numeric, so it has no bins; pass --by {column}"
            )
        return _binned(column, to_floats(both[0]), to_floats(both[1]), bins)
    if numeric and not boolean and max_values is not None:
        distinct = both[0].nunique()
        if distinct > max_values:
            raise InputError(
                f"{column} is numeric with {distinct} distinct values, too many for groups; pass "
                f"{column}:bins=10"
            )
    return _named(column, both[0], both[1])


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


def _parse(by: str, columns: list[str]) -> tuple[str, int | None]:
    """The column and number of bins of a request; a column of exactly that name comes first."""
    if by in columns:
        return by, None
    match = re.fullmatch(r"(.+):bins=(\d+)", by)
    column = match.group(1) if match else by
    asked, _, bins_text = by.rpartition(":bins=")
    if match is None and asked in columns:
        raise InputError(
            f"{by!r}: bins={bins_text!r} is not a whole number; pass e.g. {asked}:bins=10"
        )
    if column not in columns:
        raise InputError(
            f"there is no column {column!r} to group by; choose among {', '.join(columns)}"
        )
    if match is None:
        return column, None
    bins = check_positive_int(f"{column}:bins", int(match.group(2)), minimum=2)
    if bins > _MAX_BINS:
        raise InputError(f"{column}:bins={bins} is more than {_MAX_BINS}; pass fewer bins")
    return column, bins


def to_texts(column: "pd.Series[Any]") -> NDArray[np.object_]:
    """Values of a column as names of groups; a missing value becomes "(missing)"."""
    codes, texts = _coded(column)
    found: NDArray[np.object_] = np.array([*texts, MISSING], dtype=object)[codes]
    return found


def _coded(column: "pd.Series[Any]") -> tuple[IntArray, list[str]]:
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


def _named(column: str, train: "pd.Series[Any]", test: "pd.Series[Any]") -> Partition:
    coded = [_coded(part) for part in (train, test)]
    names = sorted({text for _, texts in coded for text in texts})
    rank = {name: code for code, name in enumerate(names)}
    found = [
        np.array([*(rank[text] for text in texts), len(names)], dtype=np.int64)[codes]
        for codes, texts in coded
    ]
    if any((codes < 0).any() for codes, _ in coded):
        names.append(MISSING)
    return Partition((column,), tuple(names), found[0], found[1])


def _binned(
    column: str, train: NDArray[np.float64], test: NDArray[np.float64], bins: int
) -> Partition:
    """Bins of about equal size, cut at quantiles of training values; the outer bins are open."""
    finite = train[np.isfinite(train)]
    if not len(finite):
        raise InputError(
            f"{column} has no finite value in the training examples, so it has no bins"
        )
    inner = np.unique(
        np.quantile(finite, np.linspace(0, 1, bins + 1)[1:-1], method="closest_observation")
    )
    inner = inner[inner > finite.min()]  # otherwise the first bin would be empty
    texts = [f"{edge:.12g}" for edge in inner]
    names = [f"{low} to <{high}" for low, high in pairwise(texts)]
    names = [f"< {texts[0]}", *names, f">= {texts[-1]}"] if texts else ["all"]
    codes = []
    for values in (train, test):
        known = np.isfinite(values)
        codes.append(
            np.where(
                known,
                np.searchsorted(inner, np.where(known, values, 0.0), side="right"),
                len(names),
            )
        )
    if any((part == len(names)).any() for part in codes):
        names.append(MISSING)
    return Partition((column,), tuple(names), codes[0], codes[1])


def _intersection(parts: Sequence[Partition]) -> Partition:
    """One group for every combination that a training or test example has."""
    joint = [
        np.zeros(len(getattr(parts[0], split)), dtype=np.int64)
        for split in ("train_codes", "test_codes")
    ]
    names: list[str] = [""]
    for number, part in enumerate(parts):
        joint = [
            codes * len(part.names) + own
            for codes, own in zip(joint, (part.train_codes, part.test_codes), strict=True)
        ]
        present, codes = np.unique(np.concatenate(joint), return_inverse=True)
        before, last = np.divmod(present, len(part.names))
        names = [
            (names[first] + _AND if number else "") + part.names[second]
            for first, second in zip(before.tolist(), last.tolist(), strict=True)
        ]
        joint = [codes[: len(joint[0])], codes[len(joint[0]) :]]
    columns = tuple(dict.fromkeys(column for part in parts for column in part.columns))
    return Partition(columns, tuple(names), joint[0], joint[1])
