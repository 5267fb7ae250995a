"""ExampleTable: what is known of each example and the final model's loss on it. Sensitive.

The table is in memory, or in a file whose rows are read a range at a time.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from indpriv import _checks, _columns, _facts, _files, _reading, _storage
from indpriv._types import IntArray, NDArray
from indpriv.errors import InputError

_SPLITS = ("train", "test")
KINDS = {"example_id": "it", "unit_id": "", "split": "t", "label": "", "loss": "fn"} | {
    "correct": "bfin"
}
LARGEST_IN_MEMORY = 4 * _files.ROW_GROUP_SIZE  # rows


class ExampleTable:
    """Rows of training and test examples.

    `frame` has the columns example_id (unique within a split), unit_id, split ("train" or "test"),
    label, loss (of the final model, in nats), correct (bool; missing if the task has no accuracy),
    then any metadata columns.

    Attributes:
        in_file: whether they lie in a file, training examples first, and not in memory. What asks
            for all rows of a split, such as `frame`, gets them in memory.
    """

    _splits: Mapping[str, _columns.Rows]

    def __init__(self, frame: pd.DataFrame) -> None:
        if missing := [name for name in _columns.FIXED_COLUMNS if name not in frame]:
            raise InputError(f"the example table lacks the columns {', '.join(missing)}")
        if not set(frame["split"].unique()) <= set(_SPLITS):
            raise _facts.refused("refusal.examples", "split", found=sorted(frame["split"].unique()))
        self.__dict__["frame"] = frame
        self._splits = {split: _rows_in(frame, split) for split in _SPLITS}
        self._check_ids()

    @classmethod
    def _of(cls, train: _columns.Rows, test: _columns.Rows) -> "ExampleTable":
        found = cls.__new__(cls)
        found._splits = {"train": train, "test": test}
        return found

    def _check_ids(self) -> None:
        found = [_columns.repeated(rows, "example_id") for rows in self._splits.values()]
        repeated = [one for values in found for one in values.tolist()]
        if repeated:
            raise _facts.refused("refusal.examples", "twice", n=len(repeated), example=repeated[0])

    @cached_property
    def frame(self) -> pd.DataFrame:
        """All rows in memory."""
        return pd.concat([self.train, self.test], ignore_index=True)

    def rows(self, split: str) -> _columns.Rows:
        """The rows of a split, in the order of the data set."""
        return self._splits[split]

    @property
    def train(self) -> pd.DataFrame:
        """Rows of the training examples, in the order of the data set."""
        rows = self.rows("train")
        return rows.read(0, len(rows)).reset_index(drop=True)

    @property
    def test(self) -> pd.DataFrame:
        """Rows of the test examples."""
        rows = self.rows("test")
        return rows.read(0, len(rows)).reset_index(drop=True)

    @property
    def in_file(self) -> bool:
        """Whether rows are read from a file when they are asked for."""
        return self.rows("train").schema is not None

    @property
    def n_train(self) -> int:
        """Number of training examples."""
        return len(self.rows("train"))

    @property
    def metadata_columns(self) -> list[str]:
        """Names of the columns beyond the fixed ones."""
        return [name for name in self.rows("train").columns if name not in _columns.FIXED_COLUMNS]

    def with_ids(
        self, train: NDArray[np.generic], test: NDArray[np.generic] | None
    ) -> "ExampleTable":
        """The table with the examples of these ids, as far as it has them; test: None for all."""
        parts = (
            frame if ids is None else frame[frame["example_id"].isin(ids)]
            for split, ids in (("train", train), ("test", test))
            for frame in _columns.frames_of(self.rows(split))
        )
        return ExampleTable(pd.concat(parts, ignore_index=True))

    def at(self, train: IntArray, test: IntArray | None) -> "ExampleTable":
        """The table of the rows at increasing positions of each split; test: None for all."""
        rows = self.rows("test")
        others = _columns.frames_of(rows) if test is None else _columns.frames_at(rows, test)
        parts = chain(_columns.frames_at(self.rows("train"), train), others)
        return ExampleTable(pd.concat(parts, ignore_index=True))

    def train_rows(self, example_ids: _columns.Ids) -> _columns.Rows:
        """Training rows in the order of example_ids; in memory if the table has another order."""
        rows = self.rows("train")
        same = len(rows) == len(example_ids) and all(
            np.array_equal(
                rows.read(*part, ["example_id"])["example_id"].to_numpy(), example_ids[slice(*part)]
            )
            for part in rows.ranges()
        )
        return rows if same else _columns.as_rows(self.aligned(np.asarray(example_ids)))

    @cached_property
    def has_unit_for_each_row(self) -> bool:
        """Whether no two training rows share a unit."""
        return not len(_columns.repeated(self.rows("train"), "unit_id"))

    def with_label_names(self, names: Sequence[str]) -> "ExampleTable":
        """The table with labels 0, 1, ... replaced by their names, if these are one for each.

        A PrivacyWarning says where the names do not fit the labels, or are more than these.
        """
        if not names:
            return self
        splits = self._splits.values()
        every = (frame["label"] for rows in splits for frame in _columns.frames_of(rows, ["label"]))
        seen = set[Any]().union(*(labels.dropna().unique().tolist() for labels in every))
        fit = seen <= set(range(len(names))) and len(set(names)) == len(names)
        if not fit or len(names) - 1 not in seen:
            some = ", ".join(sorted(map(str, seen), key=lambda one: (len(one), one))[:5])
            said = {"names": ", ".join(names[:5]), "n": len(names), "of": len(seen), "some": some}
            _checks.warn_caller(_facts.text("refusal.metadata", "class_names", **said))
        if not fit:
            return self

        def with_names(frame: pd.DataFrame) -> pd.DataFrame:
            if "label" not in frame:
                return frame
            return frame.assign(label=frame["label"].map(dict(enumerate(names))).astype("string"))

        if not self.in_file:
            return ExampleTable(with_names(self.frame))
        return self._of(*(rows.part(0, len(rows), with_names) for rows in splits))

    def aligned(self, example_ids: np.ndarray) -> pd.DataFrame:
        """Training rows in the order of example_ids; InputError if one is missing."""
        train = self.train
        own = train["example_id"].to_numpy()
        same_type = own.dtype.kind in "iu" and own.dtype == example_ids.dtype
        if same_type and np.array_equal(own, example_ids):
            return train  # the rest copies every column
        if missing := example_ids[~np.isin(example_ids, own)].tolist():
            raise _facts.refused("refusal.examples", "absent", n=len(missing), example=missing[0])
        return train.set_index("example_id").loc[example_ids].reset_index()

    def with_units(self, column: str) -> "ExampleTable":
        """The table by units that a metadata column names; InputError where it lacks a value."""
        if column not in (columns := self.metadata_columns):
            known = ", ".join(columns) or "none: next time, pass metadata to the Recorder"
            raise _facts.refused("refusal.examples", "unit_column", column=column, known=known)
        train, test = self.train, self.test
        if lacking := int(train[column].isna().sum()):
            values = {"column": column, "lacking": lacking, "n": len(train)}
            raise _facts.refused("refusal.examples", "unit_missing", **values)
        parts = train.assign(unit_id=train[column]), test
        found = pd.concat([part.astype({"unit_id": object}) for part in parts], ignore_index=True)
        units = found["unit_id"]
        kinds = {type(value) for value in units.tolist()}
        if len(kinds) > 1 or not kinds <= {int, float, str}:
            # Test rows keep their own, of another type; dates and flags are no ids.
            units = units.astype(str).astype(object)
        return ExampleTable(found.assign(unit_id=units.infer_objects()))

    def by_unit(self) -> "ExampleTable":
        """The table with one training row per unit: mean loss, share correct, and common values."""
        # A label or metadata that differs between the rows of a unit is missing.
        train, test = self.train, self.test
        codes, units = pd.factorize(train["unit_id"])
        groups = train.groupby(codes)
        grouped = train[~train["unit_id"].duplicated()].reset_index(drop=True)
        for name in grouped.columns:
            if name in ("example_id", "unit_id"):
                grouped[name] = units
            elif name in _columns.RESULTS:
                values = train[name].astype("Float64").groupby(codes).mean()
                grouped[name] = values.astype("float64").to_numpy()
            else:
                mixed = groups[name].nunique(dropna=False).gt(1)
                grouped[name] = grouped[name].mask(mixed)
        if test.empty:
            return ExampleTable(grouped)
        test = test.assign(correct=test["correct"].astype("Float64").astype("float64"))
        grouped = grouped.astype({"unit_id": object, "example_id": object})
        return ExampleTable(pd.concat([grouped, test], ignore_index=True))

    def to_parquet(self, path: str | Path) -> None:
        """Write the table, readable by its owner only (0600)."""
        if not self.in_file:
            _files.write_private_parquet(self.frame, Path(path))
        else:
            every = chain(*map(_columns.frames_of, self._splits.values()))
            _files.write_private_frames(every, Path(path), self.rows("train").schema)

    @classmethod
    def from_parquet(cls, path: str | Path) -> "ExampleTable":
        """Read a table that `to_parquet` wrote."""
        with _reading.named(path := _storage.location(path)):
            return cls(_files.read_parquet(path, kinds=KINDS))


def _rows_in(frame: pd.DataFrame, split: str) -> _columns.Rows:
    inside = (frame["split"] == split).to_numpy()
    first, count = int(inside.argmax()) if len(inside) else 0, int(inside.sum())
    if inside[first : first + count].all():  # as files are written: a slice copies nothing
        return _columns.as_rows(frame.iloc[first : first + count].reset_index(drop=True))
    return _columns.as_rows(frame[inside].reset_index(drop=True))


def open_examples(path: Path) -> ExampleTable:
    """The table that `to_parquet` wrote; above LARGEST_IN_MEMORY rows it stays in its file."""
    file = _columns.Rows.open(path, KINDS)
    n_train = None if len(file) <= LARGEST_IN_MEMORY else _n_before_test(file)
    if n_train is None:
        return ExampleTable.from_parquet(path)
    found = ExampleTable._of(file.part(0, n_train), file.part(n_train, len(file)))
    found._check_ids()
    return found


def _n_before_test(file: _columns.Rows) -> int | None:
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


def check_metadata(
    metadata: pd.DataFrame | None, example_ids: np.ndarray, split: str
) -> pd.DataFrame:
    """Metadata rows in the order of example_ids; InputError if nothing shows which are theirs."""
    if metadata is None:
        return pd.DataFrame(index=pd.RangeIndex(len(example_ids)))
    if not isinstance(metadata, pd.DataFrame):
        raise _facts.refused("refusal.metadata", "kind", split=split, kind=type(metadata).__name__)
    clash = sorted(_columns.RESERVED_COLUMNS & set(metadata.columns))
    if clash:
        raise InputError(f"metadata may not have the columns {', '.join(clash)}; rename them")
    if metadata.index.has_duplicates:
        raise _facts.refused("refusal.metadata", "index", split=split)
    n, missing = len(example_ids), example_ids[~np.isin(example_ids, metadata.index)].tolist()
    if missing:
        values = {"n": len(missing), "of": n, "split": split, "example": missing[0]}
        raise _facts.refused("refusal.metadata", "absent", **values)
    numbered = np.array_equal(example_ids, np.arange(n))
    if numbered and len(metadata) > n:
        rows = {"rows": len(metadata), "n": n, "last": n - 1}
        raise _facts.refused("refusal.metadata", "more", split=split, **rows)
    return metadata.loc[example_ids].reset_index(drop=True)


def check_storable(*metadata: pd.DataFrame | None) -> None:
    """Raise InputError, before training, unless the metadata of all splits fit into one file."""
    given = [frame for frame in metadata if frame is not None]
    if not given:
        return
    try:
        schema = pa.Table.from_pandas(pd.concat(given), preserve_index=False).schema
        if nested := [one.name for one in schema if pa.types.is_nested(one.type)]:
            raise ValueError(f"{nested[0]} holds lists or tables, and not one value a row")
    except (pa.ArrowException, pd.errors.InvalidIndexError, ValueError) as error:
        reasons = "; ".join(map(str, error.args))
        raise _facts.refused("refusal.metadata", "unstorable", reasons=reasons) from error
