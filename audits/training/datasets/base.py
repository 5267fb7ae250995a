"""A data set: numpy arrays for training and testing. As sensitive as the data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from indpriv.errors import InputError


@dataclass(frozen=True)
class Split:
    """One part of a data set; an example's id is its position.

    Attributes:
        inputs: (n, ...) float32, scaled by constants that were not fitted on the data.
        targets: (n,) int64 class numbers.
        metadata: one row per example, indexed 0..n-1; columns to compare groups by. None if there
            are none.
    """

    inputs: NDArray[np.float32]
    targets: NDArray[np.int64]
    metadata: pd.DataFrame | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) == 0 or self.targets.shape != (len(self.inputs),):
            raise InputError(
                f"a split has inputs {self.inputs.shape} and targets {self.targets.shape}; "
                "it needs at least one example and one target each"
            )
        if not np.isfinite(self.inputs).all():
            bad = np.flatnonzero(~np.isfinite(self.inputs.reshape(len(self), -1)).all(axis=1))
            raise InputError(
                f"{len(bad)} examples hold NaN or infinite inputs, e.g. number {bad[0]}"
            )
        if self.metadata is not None and not self.metadata.index.equals(pd.RangeIndex(len(self))):
            raise InputError(f"metadata must be indexed 0..{len(self) - 1}, one row per example")

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, kept: NDArray[np.bool_]) -> Split:
        """The examples where `kept` is true, renumbered."""
        metadata = None if self.metadata is None else self.metadata[kept].reset_index(drop=True)
        return Split(self.inputs[kept], self.targets[kept], metadata)

    def units(self, column: str) -> pd.Series:
        """(n,) the unit of each row, from a metadata column; InputError if there is none."""
        if self.metadata is None or column not in self.metadata:
            raise InputError(f"there is no metadata column {column!r} that says whose row each is")
        return self.metadata[column]

    def within_cap(self, column: str, most: int) -> NDArray[np.bool_]:
        """(n,) whether a row is among the first `most` of its unit, which a column names."""
        units = self.units(column)
        return np.asarray(units.groupby(units).cumcount() < most)


@dataclass(frozen=True)
class OneHot:
    """An attribute that inputs hold as one column for each value, 1 for its own and 0 elsewhere.

    Attributes:
        first: its first column.
        values: names of its values, in the order of the columns.
    """

    first: int
    values: tuple[str, ...]

    @property
    def columns(self) -> slice:
        """Its columns."""
        return slice(self.first, self.first + len(self.values))


@dataclass(frozen=True)
class Dataset:
    """A data set, ready for training.

    Attributes:
        name: name in an audit's [data] section.
        train, test: the two splits.
        class_names: meaning of each class number.
        preprocessing: what was done to the raw values, in one sentence for the report.
        source: where the data comes from, and its terms.
        on_trust: what a reader must take on trust, by topic, where this data set differs from
            `run_record.ON_TRUST`.
        attributes: of a table: where its inputs hold attributes that an attacker could guess.
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    preprocessing: str
    source: str
    on_trust: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, OneHot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for split in (self.train, self.test):
            low, high = int(split.targets.min()), int(split.targets.max())
            if low < 0 or high >= self.n_classes:
                raise InputError(
                    f"{self.name} has classes {low} to {high}; it should have 0 to "
                    f"{self.n_classes - 1}"
                )
            if split.inputs.shape[1:] != self.input_shape:
                raise InputError(f"{self.name}: train and test inputs differ in shape")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's input."""
        return self.train.inputs.shape[1:]

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def fingerprint(self) -> str:
        """Hex SHA-256 of the training inputs and targets: equal if two runs saw the same data."""
        digest = hashlib.sha256()
        for array in (self.train.inputs, self.train.targets):
            digest.update(f"{array.shape}{array.dtype.str}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def in_bands(values: ArrayLike, bands: Mapping[int, str]) -> NDArray[np.str_]:
    """The name of the band of each value; `bands` maps the first value of each band to its name.

    >>> in_bands([17, 24, 25, 90], {17: "17-24", 25: "25+"}).tolist()
    ['17-24', '17-24', '25+', '25+']
    """
    positions = np.searchsorted(list(bands), values, side="right") - 1
    return np.array(list(bands.values()))[np.maximum(positions, 0)]
