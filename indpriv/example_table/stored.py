"""An example table in a file, whose rows are read a range at a time. Sensitive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv import _repeats
from indpriv._arrays import Ids, IntArray
from indpriv._columns import Rows, frames_at, frames_of, rows_at
from indpriv._files import ROW_GROUP_SIZE, ParquetRows, write_private_frames
from indpriv.errors import InputError
from indpriv.example_table.table import (
    KINDS,
    ExampleTable,
    labels_fit,
    named_labels,
)

LARGEST_IN_MEMORY = 4 * ROW_GROUP_SIZE  # rows


def open_examples(path: Path) -> ExampleTable:
    """The table that `ExampleTable.to_parquet` wrote; above LARGEST_IN_MEMORY rows it stays there.

    Raises:
        InputError: there is no such file, or an id occurs twice within a split.
        EvidenceError: it is damaged.
    """
    file = ParquetRows.open(path, KINDS)
    if len(file) <= LARGEST_IN_MEMORY:
        return ExampleTable.from_parquet(path)
    n_train = _n_before_test(file)
    return ExampleTable.from_parquet(path) if n_train is None else StoredExamples(file, n_train)


def _n_before_test(file: ParquetRows) -> int | None:
    """The number of training rows, if all of them lie before the test rows; else None."""
    n_train, test_began = 0, False
    for start, stop in file.ranges():
        split = file.read(start, stop, ["split"])["split"]
        train, test = (split.eq(name).to_numpy() for name in ("train", "test"))
        n_here = int(train.sum())
        if not (train | test).all() or (n_here and (test_began or not train[:n_here].all())):
            return None
        n_train, test_began = n_train + n_here, test_began or n_here < len(split)
    return n_train


@dataclass(frozen=True)
class _SplitRows:
    """The n rows of a file from its row `first`; see `indpriv._columns.Rows`."""

    file: ParquetRows
    first: int
    n: int
    label_names: tuple[str, ...] = ()

    @property
    def columns(self) -> Sequence[str]:
        return self.file.columns

    def __len__(self) -> int:
        return self.n

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pd.DataFrame:
        frame = self.file.read(self.first + start, self.first + min(stop, self.n), columns)
        if not self.label_names or "label" not in frame:
            return frame
        return frame.assign(label=named_labels(frame["label"], self.label_names))

    def ranges(self) -> Sequence[tuple[int, int]]:
        last = self.first + self.n
        return [
            (max(start, self.first) - self.first, min(stop, last) - self.first)
            for start, stop in self.file.ranges()
            if start < last and stop > self.first
        ]

    def column(self, name: str) -> _repeats.Reader:
        """Reads a range of a column."""

        def read(start: int, stop: int) -> NDArray[np.generic]:
            values: NDArray[np.generic] = self.read(start, stop, [name])[name].to_numpy()
            return values

        return read

    def check_ids(self) -> None:
        """Raise InputError if an id occurs twice."""
        found = _repeats.repeated(self.column("example_id"), list(self.ranges()))
        if len(found):  # equal hashes, and perhaps equal ids
            values = rows_at(self, found, ["example_id"])["example_id"]
            repeated = values[values.duplicated()]
            if len(repeated):
                raise InputError(
                    f"{len(repeated)} example ids occur twice within a split, e.g. "
                    f"{repeated.tolist()[0]!r}"
                )


class StoredExamples(ExampleTable):
    """Training and test examples in a file, training examples first.

    Rows are read a range at a time by `train_rows`, `train_frames`, `test_rows`, `at`, `with_ids`
    and `to_parquet`. What asks for all of them, such as `frame`, gets them in memory.
    """

    _rows: _SplitRows
    _others: _SplitRows

    def __init__(self, file: ParquetRows, n_train: int, label_names: Sequence[str] = ()) -> None:
        """Open a file; InputError if an id occurs twice within a split."""
        names, n_test = tuple(label_names), len(file) - n_train
        object.__setattr__(self, "_rows", _SplitRows(file, 0, n_train, names))
        object.__setattr__(self, "_others", _SplitRows(file, n_train, n_test, names))
        if not label_names:  # the same file under other names of labels
            self._rows.check_ids()
            self._others.check_ids()

    @cached_property
    def frame(self) -> pd.DataFrame:
        """All rows in memory."""
        return pd.concat([self.train, self.test], ignore_index=True)

    @property
    def train(self) -> pd.DataFrame:
        """All training rows in memory."""
        return self._rows.read(0, len(self._rows))

    @property
    def test(self) -> pd.DataFrame:
        """All test rows in memory."""
        return self._others.read(0, len(self._others)).reset_index(drop=True)

    @property
    def n_train(self) -> int:
        """Number of training examples."""
        return len(self._rows)

    @property
    def metadata_columns(self) -> list[str]:
        """Names of the columns beyond the fixed ones."""
        return ExampleTable(self._rows.file.empty).metadata_columns

    def train_rows(self, example_ids: Ids) -> Rows:
        """Training rows in the order of example_ids; in memory if the file has another order."""
        ids = self._rows.column("example_id")
        same = len(self._rows) == len(example_ids) and all(
            np.array_equal(ids(start, stop), example_ids[start:stop])
            for start, stop in self._rows.ranges()
        )
        return self._rows if same else super().train_rows(example_ids)

    def train_frames(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """See `ExampleTable.train_frames`."""
        return (self._rows.read(*rows, columns) for rows in self._rows.ranges())

    def test_rows(self) -> Rows:
        """See `ExampleTable.test_rows`."""
        return self._others

    def at(self, train: IntArray, test: IntArray | None) -> ExampleTable:
        """See `ExampleTable.at`."""
        others = frames_of(self._others) if test is None else frames_at(self._others, test)
        return _table_of(frames_at(self._rows, train), others)

    def with_ids(
        self, train: NDArray[np.generic], test: NDArray[np.generic] | None
    ) -> ExampleTable:
        """See `ExampleTable.with_ids`."""
        return _table_of(_with_ids(self._rows, train), _with_ids(self._others, test))

    def has_unit_for_each_row(self) -> bool:
        """See `ExampleTable.has_unit_for_each_row`."""
        return self._has_unit_for_each_row

    @cached_property
    def _has_unit_for_each_row(self) -> bool:
        found = _repeats.repeated(self._rows.column("unit_id"), list(self._rows.ranges()))
        values = rows_at(self._rows, found, ["unit_id"])["unit_id"]
        return not values.duplicated().any()

    def with_label_names(self, names: Sequence[str]) -> ExampleTable:
        """See `ExampleTable.with_label_names`."""
        file, n_train = self._rows.file, len(self._rows)
        labels = (file.read(*rows, ["label"])["label"] for rows in file.ranges())
        if not names or not all(labels_fit(part, len(names)) for part in labels):
            return self
        return StoredExamples(file, n_train, names)

    def to_parquet(self, path: Path) -> None:
        """Write the table, readable by its owner only (0600)."""
        every = chain(frames_of(self._rows), frames_of(self._others))
        write_private_frames(every, path, self._rows.file.schema)


def _with_ids(rows: _SplitRows, ids: NDArray[np.generic] | None) -> Iterator[pd.DataFrame]:
    """Yield the rows with these ids, or all; a range at a time."""
    for frame in frames_of(rows):
        yield frame if ids is None else frame[frame["example_id"].isin(ids)]


def _table_of(train: Iterable[pd.DataFrame], test: Iterable[pd.DataFrame]) -> ExampleTable:
    return ExampleTable(pd.concat([*train, *test], ignore_index=True))
