"""Training and test examples in named groups by one column or several. Output is sensitive.

The groups of a column are found in one pass over the training rows. Which group a row is in is
then asked of any part of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pandas as pd

from indpriv._arrays import FloatArray, IntArray
from indpriv._checks import check_positive_int
from indpriv._columns.columns import MISSING, RESULTS, coded, groupable_columns, to_floats
from indpriv._columns.rows import FrameRows, Rows, as_rows, frames_of
from indpriv._columns.values import CountedValues
from indpriv.errors import InputError

_AND = " × "  # between the values of an intersection
MAX_NUMERIC_VALUES = 50
MOST_GROUPS = 1 << 16  # of rows that are read in several ranges
_MAX_BINS = 1000


class TooManyGroupsError(InputError):
    """A column of many rows has more values than there can be groups."""


class Grouping(Protocol):
    """Groups by one column or several.

    Attributes:
        columns: the columns.
        names: of the groups.
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def codes(self, frame: pd.DataFrame) -> IntArray:
        """(n_rows,) the group of each row, as an index into names."""
        ...


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


def partition(
    train: pd.DataFrame, test: pd.DataFrame, by: str, *, max_values: int | None = MAX_NUMERIC_VALUES
) -> Partition:
    """Split training and test rows in memory; see `grouping_of`."""
    found = grouping_of(FrameRows(train), test, by, max_values=max_values)
    return Partition(found.columns, found.names, found.codes(train), found.codes(test))


def grouping_of(
    train: Rows, test: pd.DataFrame | Rows, by: str, *, max_values: int | None = MAX_NUMERIC_VALUES
) -> Grouping:
    """Groups of training and test rows by a column, or by the combinations of several.

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
        TooManyGroupsError: rows that are read in several ranges have more than 65,536 groups.
        InputError: there is no such column, a column with bins is not numeric, or it has too many
            numeric values.
    """
    columns = [*groupable_columns(train), *(name for name in RESULTS if name in train.columns)]
    if "," in by and by not in columns:
        parts = [
            grouping_of(train, test, part.strip(), max_values=max_values) for part in by.split(",")
        ]
        others = as_rows(test)
        return reduce(lambda first, second: _Joint.of(first, second, train, others), parts)
    column, bins = _parse(by, columns)
    values = _Values(column, train, as_rows(test))
    if bins is not None:
        return _binned(values, bins, by)
    return _named(values, max_values)


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


@dataclass
class _Values:
    """The values of a column, a range at a time; numeric and boolean say what was seen so far."""

    column: str
    train: Rows
    test: Rows
    numeric: bool = True
    boolean: bool = True

    def __post_init__(self) -> None:
        for part in self.of_test():
            self._see(part)

    def of_test(self) -> Iterator[pd.Series[Any]]:
        """Yield the values of test rows; they are missing where these lack the column."""
        if self.column in self.test.columns:
            yield from (frame[self.column] for frame in frames_of(self.test, [self.column]))
        elif len(self.test):
            yield pd.Series([None], dtype=object)

    def __iter__(self) -> Iterator[pd.Series[Any]]:
        for frame in frames_of(self.train, [self.column]):
            part = frame[self.column]
            self._see(part)
            yield part

    @property
    def several(self) -> bool:
        """Whether the rows of a split are read in several ranges."""
        return len(self.train.ranges()) > 1 or len(self.test.ranges()) > 1

    def _see(self, part: pd.Series[Any]) -> None:
        plain = part.empty or bool(part.isna().all())
        self.numeric = self.numeric and (plain or pd.api.types.is_numeric_dtype(part))
        self.boolean = self.boolean and (plain or pd.api.types.is_bool_dtype(part))


@dataclass(frozen=True)
class _Named:
    """A group for each value."""

    columns: tuple[str]
    names: tuple[str, ...]

    def codes(self, frame: pd.DataFrame) -> IntArray:
        """See Grouping."""
        known = self.names[:-1] if self.names[-1:] == (MISSING,) else self.names
        if self.columns[0] not in frame.columns:
            return np.full(len(frame), len(known), np.int64)
        rank = {name: code for code, name in enumerate(known)}
        own, texts = coded(frame[self.columns[0]])
        return np.array([*(rank[text] for text in texts), len(known)], dtype=np.int64)[own]


def _named(values: _Values, max_values: int | None) -> _Named:
    missing, of_test, of_train = False, set[str](), set[str]()
    for part in values:
        limited = max_values if values.numeric and not values.boolean else None
        if not values.several:
            _check_few(values, part.nunique(), limited)
        own, texts = coded(part)
        of_train.update(texts)
        missing = missing or bool((own < 0).any())
        _check_few(values, len(of_train), limited)
        _check_groups(values, of_train)
    for part in values.of_test():
        own, texts = coded(part)
        of_test.update(texts)
        missing = missing or bool((own < 0).any())
        _check_groups(values, of_test)
    names = sorted(of_train | of_test)
    return _Named((values.column,), (*names, MISSING) if missing else tuple(names))


def _check_few(values: _Values, distinct: int, most: int | None) -> None:
    if most is not None and distinct > most:
        least = "at least " if values.several else ""
        raise InputError(
            f"{values.column} is numeric with {least}{distinct} distinct values, too many for "
            f"groups; pass {values.column}:bins=10"
        )


def _check_groups(values: _Values, found: set[str]) -> None:
    if values.several and len(found) > MOST_GROUPS:
        raise TooManyGroupsError(
            f"{values.column} has more than {MOST_GROUPS:,} distinct values, too many for "
            "groups; choose a column with fewer"
        )


@dataclass(frozen=True)
class _Binned:
    """Bins between cuts (n_cuts,); the outer bins are open."""

    columns: tuple[str]
    names: tuple[str, ...]
    cuts: FloatArray

    def codes(self, frame: pd.DataFrame) -> IntArray:
        """See Grouping."""
        missing = len(self.cuts) + 1
        if self.columns[0] not in frame.columns:
            return np.full(len(frame), missing, np.int64)
        values = to_floats(frame[self.columns[0]])
        known = np.isfinite(values)
        found = np.searchsorted(self.cuts, np.where(known, values, 0.0), side="right")
        return np.where(known, found, missing)


def _binned(values: _Values, bins: int, by: str) -> _Binned:
    """Bins of about equal size, cut at quantiles of training values; the outer bins are open."""
    counted, missing = CountedValues(), False
    for part in values.of_test() if values.numeric else ():
        missing = missing or not np.isfinite(to_floats(part)).all()
    for part in values:
        if not values.numeric:
            break
        floats = to_floats(part)
        finite = floats[np.isfinite(floats)]
        missing = missing or len(finite) < len(floats)
        counted.add(finite)
    column = values.column
    if not values.numeric or values.boolean:
        raise InputError(f"{by!r}: {column} is not numeric, so it has no bins; pass --by {column}")
    if not counted.n:
        raise InputError(
            f"{column} has no finite value in the training examples, so it has no bins"
        )
    cuts = np.unique(counted.observations(np.linspace(0, 1, bins + 1)[1:-1]))
    cuts = cuts[cuts > counted.least]  # otherwise the first bin would be empty
    texts = [f"{cut:.12g}" for cut in cuts]
    names = [f"{low} to <{high}" for low, high in pairwise(texts)]
    names = [f"< {texts[0]}", *names, f">= {texts[-1]}"] if texts else ["all"]
    return _Binned((column,), (*names, MISSING) if missing else tuple(names), cuts)


@dataclass(frozen=True)
class _Joint:
    """A group for each combination of two groupings that a training or test row has.

    present: (n_groups,) increasing: the code of the first times the number of the second's groups,
    plus the code of the second.
    """

    first: Grouping
    second: Grouping
    present: IntArray

    @classmethod
    def of(cls, first: Grouping, second: Grouping, train: Rows, test: Rows) -> _Joint:
        present = np.zeros(0, np.int64)
        every = cls(first, second, present)
        for rows in (train, test):
            for frame in frames_of(rows, known_columns(rows, every.columns)):
                present = np.union1d(present, every._both(frame))
        return cls(first, second, present)

    @property
    def columns(self) -> tuple[str, ...]:
        """See Grouping."""
        return tuple(dict.fromkeys((*self.first.columns, *self.second.columns)))

    @property
    def names(self) -> tuple[str, ...]:
        """See Grouping."""
        codes = zip(*(code.tolist() for code in divmod(self.present, self._size)), strict=True)
        return tuple(
            self.first.names[first] + _AND + self.second.names[second] for first, second in codes
        )

    def codes(self, frame: pd.DataFrame) -> IntArray:
        """See Grouping."""
        return np.searchsorted(self.present, self._both(frame))

    @property
    def _size(self) -> int:
        return len(self.second.names)

    def _both(self, frame: pd.DataFrame) -> IntArray:
        return self.first.codes(frame) * self._size + self.second.codes(frame)


def label_grouping(train: Rows, test: pd.DataFrame | Rows) -> Grouping | None:
    """Groups by label; None where there are too many for classes."""
    try:
        return grouping_of(train, test, "label", max_values=None)
    except TooManyGroupsError:
        return None


def known_columns(frame: pd.DataFrame | Rows, columns: Sequence[str]) -> list[str]:
    """Those of some columns that there are, each once."""
    return [name for name in dict.fromkeys(columns) if name in frame.columns]
