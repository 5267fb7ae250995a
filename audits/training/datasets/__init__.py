"""Data sets for reference runs and reproductions, as numpy arrays. Nothing here imports torch.

To add one, write a module with a function that returns a `Dataset`, and list it in `DATASETS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from audits.training.datasets import (
    adult,
    cifar10,
    from_sklearn,
    lfw,
    location30,
    mnist,
    topics,
    utkface,
)
from audits.training.datasets.base import Dataset, Split
from indpriv._checks import check_choice
from indpriv.demo.adult import CATEGORIES
from indpriv.errors import InputError

__all__ = ["DATASETS", "DATA_DIR_VARIABLE", "Dataset", "DatasetKind", "Split", "load_dataset"]

DATA_DIR_VARIABLE = "INDPRIV_DATA"


@dataclass(frozen=True)
class DatasetKind:
    """What is known about a data set before it is loaded.

    Attributes:
        load: loads it without a data folder, or, if from_files, from the data folder it is given.
        from_files: load takes the data folder.
        metadata_columns: columns, in addition to "label", that define groups.
        attributes: columns of a table that `[attacks] attributes` may name.
        n_train: number of training examples of the published data.
    """

    load: Callable[..., Dataset]
    n_train: int
    from_files: bool = False
    metadata_columns: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()


DATASETS: Mapping[str, DatasetKind] = {
    "adult": DatasetKind(
        adult.load,
        32_561,
        metadata_columns=adult.METADATA_COLUMNS,
        attributes=tuple(CATEGORIES),
    ),
    "adult_households": DatasetKind(
        adult.load_households,
        32_561,
        metadata_columns=(*adult.METADATA_COLUMNS, adult.HOUSEHOLD_COLUMN),
        attributes=tuple(CATEGORIES),
    ),
    "digits": DatasetKind(from_sklearn.load_digits, 1_438),
    "breast_cancer": DatasetKind(from_sklearn.load_breast_cancer, 456),
    "topics": DatasetKind(topics.load, topics.N_TRAIN, metadata_columns=topics.METADATA_COLUMNS),
    "mnist": DatasetKind(mnist.load, 60_000, from_files=True),
    "cifar10": DatasetKind(cifar10.load, 50_000, from_files=True),
    "utkface_gender": DatasetKind(
        utkface.load_gender, 15_300, from_files=True, metadata_columns=utkface.METADATA_COLUMNS
    ),
    "utkface_age": DatasetKind(
        utkface.load_age, 15_300, from_files=True, metadata_columns=utkface.METADATA_COLUMNS
    ),
    "lfw": DatasetKind(lfw.load, 10_968, from_files=True, metadata_columns=lfw.METADATA_COLUMNS),
    "lfw_people": DatasetKind(lfw.load_people, 2_267, from_files=True),
    "fashion_mnist": DatasetKind(mnist.load_fashion, 60_000, from_files=True),
    "location30": DatasetKind(location30.load, 4_008, from_files=True),
}


def load_dataset(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a data set by its name.

    Args:
        name: one of `DATASETS`.
        data_dir: folder with the files of data sets that do not ship with a package (mnist,
            cifar10, utkface, lfw); default: the environment variable INDPRIV_DATA.

    Raises:
        InputError: an unknown name, or a missing file (the message says which, where it was
            searched, and how to get it).
        EvidenceError: a damaged file.

    >>> adult = load_dataset("adult")
    >>> len(adult.train), len(adult.test), adult.input_shape, adult.class_names
    (32561, 16281, (107,), ('<=50K', '>50K'))
    """
    kind = DATASETS[check_choice("dataset", name, DATASETS)]
    if not kind.from_files:
        return kind.load()
    folder = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    remedy = f"pass --data-dir DIR (data_dir=), or set {DATA_DIR_VARIABLE}"
    if not folder:
        raise InputError(f"{name} is read from files, and no folder is given; {remedy}")
    if not Path(folder).is_dir():
        raise InputError(f"the data folder {folder} does not exist; {remedy}")
    return kind.load(Path(folder))
