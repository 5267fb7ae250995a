"""Columns of examples, the rows that they are read from, and groups by them. Output is sensitive.

Rows are read a range at a time, from memory or from a file. The groups of a column are found in one
pass over the training rows. Which group a row is in is then asked of any part of them.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Context, Decimal
from functools import cached_property, partial, reduce
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from indpriv import _checks, _facts, _files, _reading
from indpriv._formatting import format_in_full
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.errors import InputError

FIXED_COLUMNS = ("example_id", "unit_id", "split", "label", "loss", "correct")
RESERVED_COLUMNS = {*FIXED_COLUMNS, "epsilon", "epsilon_lower", "epsilon_upper"}
RESULTS = ("correct", "loss")  # of the final model, which examples are grouped by if asked
MISSING = "(missing)"
_EMPTY = "(empty)"
_AND = " × "  # between the values of an intersection
MAX_NUMERIC_VALUES = 50
MOST_GROUPS = 1 << 16  # of rows that are read in several ranges
_INT64 = 2.0**63  # that whole numbers lie below


@dataclass(frozen=True)
class Rows:
    """Rows in one order, in memory or in files, of which a range at a time is read.

    starts: (n_ranges + 1,) the first row of each range, and the number of all rows. source: (start,
    stop, columns or None for all) -> the rows. schema: of pyarrow, where they lie in a file.
    """

    columns: Sequence[str]
    starts: Sequence[int]
    source: Callable[[int, int, Sequence[str] | None], pd.DataFrame]
    schema: Any = None

    @classmethod
    def open(cls, path: Path, kinds: Mapping[str, str] = MappingProxyType({})) -> "Rows":
        """Those of a Parquet file; kinds: what it must hold, see `check_columns`."""
        with _files.opened_parquet(path) as file:
            _reading.check_columns(path, file.schema_arrow, kinds)
            groups = (file.metadata.row_group(k).num_rows for k in range(file.num_row_groups))
            starts = tuple(accumulate(groups, initial=0))
            names = list(file.schema_arrow.names)
            return cls(names, starts, partial(_read_groups, path, starts), file.schema_arrow)

    def __len__(self) -> int:
        return self.starts[-1]

    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of ranges that are read one after the other; one for rows in memory."""
        return list(pairwise(self.starts))

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The rows from start to stop; columns: by default all."""
        return self.source(start, stop, columns)

    def part(
        self, first: int, stop: int, then: Callable[[pd.DataFrame], pd.DataFrame] = lambda one: one
    ) -> "Rows":
        """Those from first to stop; then: what is done to each frame that is read."""

        def read(start: int, end: int, columns: Sequence[str] | None) -> pd.DataFrame:
            return then(self.source(first + start, min(first + end, stop), columns))

        inside = [start - first for start in self.starts if first < start < stop]
        return replace(self, starts=[0, *inside, stop - first], source=read)


def _read_groups(
    path: Path, starts: Sequence[int], start: int, stop: int, columns: Sequence[str] | None
) -> pd.DataFrame:
    """Rows of a Parquet file whose row groups begin at these rows."""
    first = bisect_right(starts, start) - 1
    groups = range(first, bisect_left(starts, stop))
    with _files.opened_parquet(path) as file:
        table = file.read_row_groups(list(groups), columns)
        return _files.frame_of(table.slice(start - starts[first], max(0, stop - start)))


def as_rows(rows: pd.DataFrame | Rows) -> Rows:
    """A DataFrame as rows in memory; rows as they are."""
    if isinstance(rows, Rows):
        return rows

    def read(start: int, stop: int, columns: Sequence[str] | None) -> pd.DataFrame:
        frame = rows if columns is None else rows[list(columns)]
        return frame if (start, stop) == (0, len(frame)) else frame.iloc[start:stop]

    return Rows(list(rows.columns), (0, len(rows)), read)


@dataclass(frozen=True)
class StoredColumn:
    """A column as an array whose rows are read when asked for; its mean, say, reads all at once."""

    rows: Rows
    column: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"a stored column has no {name!r}; np.asarray(it) reads all rows")
        return getattr(self[:], name)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """That of the values."""
        return self._read(0, 1).dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any, /) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._read(start, max(start, stop))[::step]
        _ = np.broadcast_to(0, len(self))[key]  # an IndexError, as of an array
        index = np.asarray(key)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64) % len(self)
        found: NDArray[Any] = np.empty(index.shape, self.dtype)
        for start, stop in self.rows.ranges():
            here = (index >= start) & (index < stop)
            if here.any():
                found[here] = self._read(start, stop)[index[here] - start]
        return found[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        values: NDArray[Any] = self.rows.read(start, stop, [self.column])[self.column].to_numpy()
        return values


Ids = NDArray[Any] | StoredColumn  # (n,)


def joined(tables: Sequence[Rows]) -> Rows:
    """The rows of tables with the same columns, one after the other."""
    firsts = list(accumulate(map(len, tables), initial=0))
    pairs = list(zip(tables, firsts, strict=False))
    starts = [0, *(first + start for table, first in pairs for start in table.starts[1:])]
    return Rows(tables[0].columns, starts, partial(_read_joined, pairs))


def _read_joined(
    pairs: Sequence[tuple[Rows, int]], start: int, stop: int, columns: Sequence[str] | None
) -> pd.DataFrame:
    """Rows of tables, each with the number of its first row."""
    found = [
        table.read(max(start - first, 0), min(stop - first, len(table)), columns)
        for table, first in pairs
        if start < first + len(table) and first < stop
    ]
    found = found or [pairs[0][0].read(0, 0, columns)]
    return found[0] if len(found) == 1 else pd.concat(found, ignore_index=True)


def frames_of(rows: Rows, columns: Sequence[str] | None = None) -> Iterator[pd.DataFrame]:
    """Yield all rows in order, a range at a time."""
    for start, stop in rows.ranges():
        yield rows.read(start, stop, columns)


def frames_at(
    rows: Rows, positions: IntArray, columns: Sequence[str] | None = None
) -> Iterator[pd.DataFrame]:
    """Yield the rows at increasing positions, a range at a time."""
    for start, stop in rows.ranges():
        first, last = np.searchsorted(positions, [start, stop])
        if first < last:
            yield rows.read(start, stop, columns).iloc[positions[first:last] - start]


def rows_at(rows: Rows, positions: IntArray, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The rows at increasing positions."""
    found = [*frames_at(rows, positions, columns)] or [rows.read(0, 0, columns)]
    return pd.concat(found, ignore_index=True)


def known_columns(frame: pd.DataFrame | Rows, columns: Sequence[str]) -> list[str]:
    """Those of some columns that there are, each once."""
    return [name for name in dict.fromkeys(columns) if name in frame.columns]


def groupable_columns(frame: pd.DataFrame | Rows) -> list[str]:
    """Columns that examples can be grouped by: the label and metadata."""
    return ["label", *(name for name in frame.columns if name not in RESERVED_COLUMNS)]


def to_floats(column: "pd.Series[Any]") -> FloatArray:
    """A column of numbers or booleans, with missing values of any kind, as float64 with NaN."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf":
        return column.to_numpy(dtype=np.float64, copy=True)  # without a Python object each
    values = column.to_numpy(dtype=object, copy=True)
    values[column.isna().to_numpy()] = np.nan
    floats: FloatArray = values.astype(np.float64)
    return floats


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
    name = str(value)
    if name in (MISSING, _EMPTY):
        return repr(name)  # otherwise it would look like our name for a missing value
    return name or _EMPTY


class TooManyGroupsError(InputError):
    """A column of many rows has more values than there can be groups."""


@dataclass(frozen=True)
class Grouping:
    """Groups by columns; codes: the group of each row (n_rows,) of a frame, an index into names."""

    columns: tuple[str, ...]
    names: tuple[str, ...]
    codes: Callable[[pd.DataFrame], IntArray]


def grouping_of(
    train: pd.DataFrame | Rows,
    test: pd.DataFrame | Rows | None,
    by: str,
    *,
    max_values: int | None = MAX_NUMERIC_VALUES,
) -> Grouping:
    """Groups of training and test rows by a column, or by the combinations of several that occur.

    `by` is "label", "correct", "loss", a metadata column, bins of one as "age:bins=10", or several
    as "race,age:bins=4"; names are its values, sorted. max_values: most distinct values of numbers
    without bins. InputError also for a column that is missing, or has too many values.
    """
    train = as_rows(train)
    both = train, as_rows(train.read(0, 0) if test is None else test)
    columns = [*groupable_columns(train), *(name for name in RESULTS if name in train.columns)]
    parts = [
        _binned(column, *both, bins, part) if bins else _named(column, *both, max_values)
        for part, column, bins in asked_columns(by, columns)
    ]
    return reduce(lambda first, second: _joint(first, second, *both), parts)


def asked_columns(by: str, columns: list[str]) -> list[tuple[str, str, int | None]]:
    """Each part of a request, its column and number of bins; InputError where there is none."""
    parts = [by] if by in columns else [part.strip() for part in by.split(",")]
    return [(part, *_parse(part, columns)) for part in parts]


def _parse(by: str, columns: list[str]) -> tuple[str, int | None]:
    """The column and number of bins of a request; a column of exactly that name comes first."""
    if by in columns:
        return by, None
    column, told, bins = by.rpartition(":bins=")
    if (column := column if told else by) not in columns:
        raise _facts.refused("refusal.groups", "column", column=column, known=", ".join(columns))
    if not re.fullmatch(r"\d+", bins):
        raise _facts.refused("refusal.groups", "bins", by=by, bins=bins, column=column)
    return column, _checks.check_positive_int(f"{column}:bins", int(bins), minimum=2, maximum=1000)


def _values_of(column: str, *tables: Rows) -> "Iterator[tuple[Rows, pd.Series[Any]]]":
    """Yield the values of a column, a range of rows at a time; missing in tables without it."""
    for rows in tables:
        if column in rows.columns:
            yield from ((rows, frame[column]) for frame in frames_of(rows, [column]))
        elif len(rows):
            yield rows, pd.Series([None], dtype=object)


def _is_all(test: "Callable[[pd.Series[Any]], bool]", values: "pd.Series[Any]") -> bool:
    """Whether the known values, if there are any, are of this kind."""
    return values.empty or bool(values.isna().all()) or test(values)


def _named(column: str, train: Rows, test: Rows, max_values: int | None) -> Grouping:
    several = len(train.ranges()) > 1 or len(test.ranges()) > 1
    most, limit = MOST_GROUPS if several else np.inf, np.inf if max_values is None else max_values
    of_test, of_train, missing, numeric, boolean = set[str](), set[str](), False, True, True
    for rows, part in _values_of(column, test, train):
        names = of_train if rows is train else of_test
        numeric = numeric and _is_all(pd.api.types.is_numeric_dtype, part)
        boolean = boolean and _is_all(pd.api.types.is_bool_dtype, part)
        limited = numeric and not boolean and rows is train
        distinct = part.nunique() if limited else 0
        if distinct <= limit:  # before each has a text
            own, texts = coded(part)
            missing = missing or bool((own < 0).any())
            if len(names) <= most:
                names.update(texts)
            distinct = len(names)
        if limited and distinct > limit:
            n = f"{'at least ' * several}{distinct}"
            raise _facts.refused("refusal.groups", "numeric", column=column, n=n)
    if max(len(of_test), len(of_train)) > most:
        raise TooManyGroupsError(_facts.text("refusal.groups", "many", column=column, most=most))
    known = sorted(of_train | of_test)
    rank = {name: code for code, name in enumerate(known)}

    def codes(frame: pd.DataFrame) -> IntArray:
        if column not in frame.columns:
            return np.full(len(frame), len(known), np.int64)
        own, texts = coded(frame[column])
        return np.array([*(rank[name] for name in texts), len(known)], dtype=np.int64)[own]

    return Grouping((column,), (*known, *[MISSING] * missing), codes)


def _binned(column: str, train: Rows, test: Rows, bins: int, by: str) -> Grouping:
    """Bins of about equal size, cut at quantiles of training values; the outer bins are open."""
    every, missing = [np.zeros(0)], False
    for rows, part in _values_of(column, test, train):
        if not _is_all(pd.api.types.is_numeric_dtype, part) or pd.api.types.is_bool_dtype(part):
            raise InputError(f"{by!r}: {column} is not numeric, so has no bins; pass --by {column}")
        floats = to_floats(part)
        finite = floats[np.isfinite(floats)]
        missing = missing or len(finite) < len(floats)
        if rows is train:
            every.append(finite + 0.0)  # no -0.0
    if not len(values := np.sort(np.concatenate(every))):
        raise _facts.refused("refusal.groups", "infinite", column=column)
    shares = np.linspace(0, 1, bins + 1)[1:-1]
    cuts = np.unique(np.quantile(values, shares, method="closest_observation"))
    cuts = cuts[cuts > values[0]]  # otherwise the first bin would be empty
    below = values[np.searchsorted(values, cuts) - 1]
    cuts = np.array([*map(_short_cut, below.tolist(), cuts.tolist())])
    texts = [format_in_full(cut) for cut in cuts.tolist()]
    names = [f"{low} to <{high}" for low, high in pairwise(texts)]
    names = [f"< {texts[0]}", *names, f">= {texts[-1]}"] if texts else ["all"]

    def codes(frame: pd.DataFrame) -> IntArray:
        if column not in frame.columns:
            return np.full(len(frame), len(cuts) + 1, np.int64)
        floats = to_floats(frame[column])
        known = np.isfinite(floats)
        found = np.searchsorted(cuts, np.where(known, floats, 0.0), side="right")
        return np.where(known, found, len(cuts) + 1)

    return Grouping((column,), (*names, *[MISSING] * missing), codes)


def _short_cut(below: float, cut: float) -> float:
    """The number with the fewest digits, from four on, in (below, cut]: it parts values alike."""
    exact = Decimal(cut)
    contexts = (Context(prec=digits, rounding=ROUND_FLOOR) for digits in range(4, 18))
    floors = (float(context.create_decimal(exact)) for context in contexts)
    return next((floor for floor in floors if below < floor <= cut), cut)


def _joint(first: Grouping, second: Grouping, train: Rows, test: Rows) -> Grouping:
    """A group for each combination of two groupings that a training or test row has."""
    columns, size = tuple(dict.fromkeys((*first.columns, *second.columns))), len(second.names)

    def both(frame: pd.DataFrame) -> IntArray:
        return first.codes(frame) * size + second.codes(frame)

    present = np.zeros(0, np.int64)
    for rows in (train, test):
        for frame in frames_of(rows, known_columns(rows, columns)):
            present = np.union1d(present, both(frame))
    pairs = zip(*(code.tolist() for code in divmod(present, size)), strict=True)
    names = tuple(first.names[one] + _AND + second.names[other] for one, other in pairs)
    return Grouping(columns, names, lambda frame: np.searchsorted(present, both(frame)))


def label_grouping(train: Rows, test: pd.DataFrame | Rows) -> Grouping | None:
    """Groups by label; None where there are too many for classes."""
    try:
        return grouping_of(train, test, "label", max_values=None)
    except TooManyGroupsError:
        return None


# --- which of many rows share a value, in memory that hardly grows with them


def repeats(
    numbers: Callable[[], Iterable[NDArray[np.uint64]]], n: int, most: int | None = None
) -> tuple[IntArray, int, int]:
    """Increasing positions of the rows that share a number; distinct numbers, and rows, counted.

    numbers: gives those of at most n rows in order, again if halves of some are equal, in 4 bytes a
    row. most: give whole groups of about so many rows only.
    """
    halves, end = np.empty(n, np.uint32), 0
    for part in numbers():
        halves[end : end + len(part)] = part.astype(np.uint32)
        end += len(part)
    halves = halves[:end]
    halves.sort()
    twice = np.unique(halves[1:][halves[1:] == halves[:-1]])
    del halves
    found, first = [(np.zeros(0, np.uint64), np.zeros(0, np.int64))], 0
    for part in numbers() if len(twice) else ():
        half = part.astype(np.uint32)
        at = np.minimum(np.searchsorted(twice, half), len(twice) - 1)
        here = np.flatnonzero(twice[at] == half)
        found.append((part[here], here + first))
        first += len(part)
    values, positions = map(np.concatenate, zip(*found, strict=True))
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    kept = sizes > 1
    if most is not None:
        kept &= np.cumsum(sizes * kept) - sizes < most
    return positions[kept[group]], end - int((sizes - 1).sum()), end


def numbers_of(values: "NDArray[np.generic] | pd.Series[Any]") -> NDArray[np.uint64]:
    """(n,) a number that equal values share, also a float and an int, and hardly any others."""
    column = pd.Series(values)
    numbers = np.array(pd.util.hash_pandas_object(column, index=False), np.uint64)
    if column.dtype.kind == "f":
        floats = column.to_numpy(np.float64, na_value=np.nan)
        whole = (floats == np.floor(floats)) & (np.abs(floats) < _INT64)
        numbers[whole] = numbers_of(floats[whole].astype(np.int64))
    return numbers


def repeated(rows: Rows, name: str) -> "pd.Series[Any]":
    """Values of a column that an earlier row has; whole numbers in order are only looked at."""
    if _increasing(rows, name):
        return pd.Series([], dtype=object)

    def numbers() -> Iterator[NDArray[np.uint64]]:
        return (numbers_of(frame[name]) for frame in frames_of(rows, [name]))

    values = rows_at(rows, repeats(numbers, len(rows))[0], [name])[name]  # whose hashes are equal
    return values[values.duplicated()]


def _increasing(rows: Rows, name: str) -> bool:
    last: NDArray[Any] | None = None
    for frame in frames_of(rows, [name]):
        part: NDArray[Any] = frame[name].to_numpy()
        part = part if last is None else np.append(last, part)
        if part.dtype.kind not in "iu" or not bool((part[1:] > part[:-1]).all()):
            return False
        last = part[-1:]
    return True
