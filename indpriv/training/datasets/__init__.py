"""Data sets for reference runs and reproductions, as numpy arrays. No torch here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from indpriv._checks import check_choice
from indpriv.errors import InputError
from indpriv.training.datasets import adult, cifar10, from_sklearn, lfw, mnist, utkface
from indpriv.training.datasets.base import Dataset, Split

__all__ = ["DATASETS", "DATA_DIR_VARIABLE", "Dataset", "DatasetKind", "Split", "load_dataset"]

DATA_DIR_VARIABLE = "INDPRIV_DATA"


@dataclass(frozen=True)
class DatasetKind:
    """What is known of a data set before it is loaded.

    Attributes:
        metadata_columns: the columns, beside "label", that groups can be made by.
        load: loads it without files of the user, or None.
        load_from: loads it from the user's data folder, or None.
    """

    metadata_columns: tuple[str, ...] = ()
    load: Callable[[], Dataset] | None = None
    load_from: Callable[[Path], Dataset] | None = None


DATASETS: Mapping[str, DatasetKind] = {
    "adult": DatasetKind(metadata_columns=adult.METADATA_COLUMNS, load=adult.load),
    "adult_households": DatasetKind(
        metadata_columns=(*adult.METADATA_COLUMNS, adult.HOUSEHOLD_COLUMN),
        load=adult.load_households,
    ),
    "digits": DatasetKind(load=from_sklearn.load_digits),
    "breast_cancer": DatasetKind(load=from_sklearn.load_breast_cancer),
    "mnist": DatasetKind(load_from=mnist.load),
    "cifar10": DatasetKind(load_from=cifar10.load),
    "utkface_gender": DatasetKind(
        metadata_columns=utkface.METADATA_COLUMNS, load_from=utkface.load_gender
    ),
    "utkface_age": DatasetKind(
        metadata_columns=utkface.METADATA_COLUMNS, load_from=utkface.load_age
    ),
    "lfw": DatasetKind(metadata_columns=lfw.METADATA_COLUMNS, load_from=lfw.load),
}


def load_dataset(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a data set by its name.

    Args:
        name: one of `DATASETS`.
        data_dir: folder with the files of data sets that do not ship with a package (mnist, cifar10, lfw); default: the
            environment variable INDPRIV_DATA.

    Raises:
        InputError: an unknown name, or a file that is missing (it says which, sought where, and how to get it).
        EvidenceError: a damaged file.

    >>> adult = load_dataset("adult")
    >>> len(adult.train), len(adult.test), adult.input_shape, adult.class_names
    (32561, 16281, (107,), ('<=50K', '>50K'))
    """
    kind = DATASETS[check_choice("dataset", name, DATASETS)]
    if kind.load is not None:
        return kind.load()
    folder = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    if not folder:
        raise InputError(
            f"{name} is read from files, and no folder is given; pass --data-dir DIR (data_dir=), or set {DATA_DIR_VARIABLE}"
        )
    if not Path(folder).is_dir():
        raise InputError(
            f"the data folder {folder} does not exist; pass --data-dir DIR (data_dir=), or set {DATA_DIR_VARIABLE}"
        )
    if kind.load_from is None:
        raise InputError(f"{name} has no loader")
    return kind.load_from(Path(folder))
