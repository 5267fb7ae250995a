"""An example table in a file, whose training rows are read a range at a time. Sensitive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv import _repeats
from indpriv._arrays import Ids, IntArray
from indpriv._columns import Rows, frames_at, rows_at
from indpriv._files import ROW_GROUP_SIZE, ParquetRows, write_private_frames
from indpriv.errors import InputError
from indpriv.example_table.table import (
    ExampleTable,
    check_columns,
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
    file = ParquetRows.open(path)
    check_columns(file.columns)
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
class _TrainRows:
    """The first rows of a file; see `indpriv._columns.Rows`."""

    file: ParquetRows
    n: int
    label_names: tuple[str, ...] = ()

    @property
    def columns(self) -> Sequence[str]:
        return self.file.columns

    def __len__(self) -> int:
        return self.n

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pd.DataFrame:
        return self._named(self.file.read(start, min(stop, self.n), columns))

    def ranges(self) -> Sequence[tuple[int, int]]:
        return [(start, min(stop, self.n)) for start, stop in self.file.ranges() if start < self.n]

    def rest(self) -> pd.DataFrame:
        """The rows after them."""
        return self._named(self.file.read(self.n, len(self.file)))

    def _named(self, frame: pd.DataFrame) -> pd.DataFrame:
        if not self.label_names or "label" not in frame:
            return frame
        return frame.assign(label=named_labels(frame["label"], self.label_names))


class StoredExamples(ExampleTable):
    """Training and test examples in a file, training examples first.

    Training rows are read a range at a time by `train_rows`, `train_frames`, `train_at`,
    `with_train` and `to_parquet`. What asks for all of them, such as `frame`, gets them in memory.
    """

    _rows: _TrainRows

    def __init__(self, file: ParquetRows, n_train: int, label_names: Sequence[str] = ()) -> None:
        """Open a file; InputError if an id occurs twice within a split."""
        object.__setattr__(self, "_rows", _TrainRows(file, n_train, tuple(label_names)))
        if not label_names:  # the same file under other names of labels
            self._check_ids()

    def _check_ids(self) -> None:
        ids = self._column("example_id")
        found = _repeats.repeated(ids, list(self._rows.ranges()))
        if len(found):  # equal hashes, and perhaps equal ids
            values = rows_at(self._rows, found, ["example_id"])["example_id"]
            repeated = values[values.duplicated()]
            if len(repeated):
                raise InputError(
                    f"{len(repeated)} example ids occur twice within a split, e.g. "
                    f"{repeated.tolist()[0]!r}"
                )
        ExampleTable(self.test)  # checks those of the test rows

    def _column(self, name: str) -> _repeats.Reader:
        def read(start: int, stop: int) -> NDArray[np.generic]:
            values: NDArray[np.generic] = self._rows.read(start, stop, [name])[name].to_numpy()
            return values

        return read

    @cached_property
    def frame(self) -> pd.DataFrame:
        """All rows in memory."""
        return pd.concat([self.train, self.test], ignore_index=True)

    @property
    def train(self) -> pd.DataFrame:
        """All training rows in memory."""
        return self._rows.read(0, len(self._rows))

    @cached_property
    def test(self) -> pd.DataFrame:
        """Rows of the test examples."""
        return self._rows.rest().reset_index(drop=True)

    @property
    def n_train(self) -> int:
        """Number of training examples."""
        return len(self._rows)

    @property
    def metadata_columns(self) -> list[str]:
        """Names of the columns beyond the fixed ones."""
        return ExampleTable(self.test.iloc[:0]).metadata_columns

    def train_rows(self, example_ids: Ids) -> Rows:
        """Training rows in the order of example_ids; in memory if the file has another order."""
        ids = self._column("example_id")
        same = len(self._rows) == len(example_ids) and all(
            np.array_equal(ids(start, stop), example_ids[start:stop])
            for start, stop in self._rows.ranges()
        )
        return self._rows if same else super().train_rows(example_ids)

    def train_frames(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """See `ExampleTable.train_frames`."""
        return (self._rows.read(*rows, columns) for rows in self._rows.ranges())

    def train_at(self, positions: IntArray) -> ExampleTable:
        """See `ExampleTable.train_at`."""
        train = frames_at(self._rows, positions)
        return ExampleTable(pd.concat([*train, self.test], ignore_index=True))

    def with_train(self, example_ids: NDArray[np.generic]) -> ExampleTable:
        """See `ExampleTable.with_train`."""
        parts = (self._rows.read(*rows) for rows in self._rows.ranges())
        kept = [part[part["example_id"].isin(example_ids)] for part in parts]
        return ExampleTable(pd.concat([*kept, self.test], ignore_index=True))

    def has_unit_for_each_row(self) -> bool:
        """See `ExampleTable.has_unit_for_each_row`."""
        found = _repeats.repeated(self._column("unit_id"), list(self._rows.ranges()))
        values = rows_at(self._rows, found, ["unit_id"])["unit_id"]
        return not values.duplicated().any()

    def with_label_names(self, names: Sequence[str]) -> ExampleTable:
        """See `ExampleTable.with_label_names`."""
        plain = _TrainRows(self._rows.file, len(self._rows))
        parts = (plain.read(*rows, ["label"])["label"] for rows in plain.ranges())
        labels = chain(parts, [plain.rest()["label"]])
        if not names or not all(labels_fit(part, len(names)) for part in labels):
            return self
        return StoredExamples(plain.file, len(plain), names)

    def to_parquet(self, path: Path) -> None:
        """Write the table, readable by its owner only (0600)."""
        train = (self._rows.read(*rows) for rows in self._rows.ranges())
        write_private_frames(chain(train, [self.test]), path, self._rows.file.schema)
