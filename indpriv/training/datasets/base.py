"""What a data set is: numpy arrays for training and testing. Sensitive where the data is."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv.errors import EvidenceError, InputError

_MAX_COUNT = 1_000_000  # far above any data set read here: what a file's header may make us read


@dataclass(frozen=True)
class Split:
    """One part of a data set; an example's id is its position.

    Attributes:
        inputs: (n, ...) float32, scaled by constants that were not fitted on the data.
        targets: (n,) int64 class numbers.
        metadata: one row per example, indexed 0..n-1, of columns to compare groups by; None where there are none.
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
        """Some of the examples, renumbered."""
        metadata = None if self.metadata is None else self.metadata[kept].reset_index(drop=True)
        return Split(self.inputs[kept], self.targets[kept], metadata)

    def units(self, column: str) -> pd.Series:
        """(n,) whose row each is, by a metadata column; InputError without such a column."""
        if self.metadata is None or column not in self.metadata:
            raise InputError(f"there is no metadata column {column!r} that says whose row each is")
        return self.metadata[column]

    def capped(self, column: str, most: int) -> Split:
        """The first `most` rows of each unit, by a metadata column."""
        units = self.units(column)
        return self.take((units.groupby(units).cumcount() < most).to_numpy())


@dataclass(frozen=True)
class Dataset:
    """A data set, ready for training.

    Attributes:
        name: as in an audit's [data] section.
        train, test: the two splits.
        class_names: what the class numbers mean.
        preprocessing: what was done to the raw values, in one sentence; a report states it.
        source: where the data comes from, and its terms.
        on_trust: what a reader must take on trust of this data in other words than of any (`run_record.ON_TRUST`), by topic.
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    preprocessing: str
    source: str
    on_trust: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for split in (self.train, self.test):
            low, high = int(split.targets.min()), int(split.targets.max())
            if low < 0 or high >= len(self.class_names):
                raise InputError(
                    f"{self.name} has classes {low} to {high}; it should have 0 to {len(self.class_names) - 1}"
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
        """Hex SHA-256 of the training inputs and targets, in their order: tells whether two runs saw the same data."""
        digest = hashlib.sha256()
        for array in (self.train.inputs, self.train.targets):
            digest.update(f"{array.shape}{array.dtype.str}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def find_file(wanted: str, folders: list[Path], *, remedy: str) -> Path:
    """The first of `folders` / `wanted` that is a file, or `wanted` without its ".gz".

    Raises:
        InputError: none of them; it names the file, every place that was tried, and the remedy.
    """
    for folder in folders:
        for name in dict.fromkeys((wanted, wanted.removesuffix(".gz"))):
            if (folder / name).is_file():
                return folder / name
    places = " and ".join(str(folder) for folder in folders)
    raise InputError(f"{wanted} is not in {places}; {remedy}")


def damaged(path: Path, what: str) -> EvidenceError:
    """The error for a data file that is not what it should be."""
    return EvidenceError(f"{path} is damaged or not the right file: {what}; get it again")


def read_npz(
    path: Path, item_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, NDArray[np.integer]]:
    """Arrays of whole numbers in an npz file, without unpickling.

    Args:
        path: the file.
        item_shapes: of each array wanted, the shape of one item: images are bytes; () is one whole number of any type.

    Returns:
        each array, (n, *item_shape).

    Raises:
        EvidenceError: an array is missing, or has another shape or type; nothing is unpacked before that is checked.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {
                name: _read_member(path, archive, name, shape)
                for name, shape in item_shapes.items()
            }
    except InputError:  # a ValueError too, and already worded
        raise
    except (
        OSError,
        EOFError,
        KeyError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
    ) as error:
        raise damaged(path, str(error)) from error


def _read_member(
    path: Path, archive: zipfile.ZipFile, name: str, item_shape: tuple[int, ...]
) -> NDArray[np.integer]:
    """One array, after its header has been checked: a header may ask for any amount of memory."""
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise damaged(path, f"{name} is of npy version {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    accepted = [item_shape] if item_shape else [(), (1,)]
    wanted = np.uint8 if item_shape else np.integer
    if (
        not np.issubdtype(dtype, wanted)
        or shape[1:] not in accepted
        or not shape
        or shape[0] > _MAX_COUNT
    ):
        raise damaged(path, f"{name} has shape {shape} and type {dtype}")
    with archive.open(f"{name}.npy") as member:
        array: NDArray[np.integer] = np.lib.format.read_array(member, allow_pickle=False)
    return array.reshape(len(array), *item_shape)


def scaled_images(images: NDArray[np.integer]) -> NDArray[np.float32]:
    """Colour pictures (n, height, width, 3) of bytes as inputs (n, 3, height, width) in [-1, 1]."""
    inputs = np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)
    inputs /= np.float32(127.5)
    inputs -= np.float32(1)
    return inputs
