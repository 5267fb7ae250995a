"""Labeled Faces in the Wild: 13,233 pictures of 5,749 people, classified by gender.

The person in each picture is metadata, for accounts of people with several pictures. Or 62 people,
whom a model is to recognise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audits.training.datasets.base import Dataset, Split, in_bands
from audits.training.datasets.files import damaged, find_file, read_npz, scaled_images
from indpriv._types import FloatArray

METADATA_COLUMNS = ("person_id", "pictures")
_FILE = "lfw_deepfunneled_gray_50x37.npz"
_REMEDY = (
    "it holds the deep-funneled pictures in grey, cut to the face: X (n, 50, 37) uint8, person_id "
    "(n,), and gender (n,), 0 male, 1 female, 255 unknown"
)
_ITEM_SHAPES = {"X": (50, 37), "person_id": (), "gender": ()}
_UNKNOWN = 255  # gender of 4 pictures, which are left out
_SOURCE = "Labeled Faces in the Wild (Huang et al. 2007), deep-funneled, research use"
_MANY, _SIDE = 20, 32  # pictures of a person, and pixels, of `load_people`
_EVERY = 5  # a person whose id is a multiple of this is in the test split, and only there
_BANDS = {1: "1", 2: "2-5", 6: "6-20", 21: "21+"}  # number of pictures of a person


def load(data_dir: Path) -> Dataset:
    """10,968 + 2,261 grey pictures, scaled to [-1, 1]; inputs (n, 1, 50, 37); class 1 is female.

    Metadata: person_id, the person in the picture, and pictures, a band for the number of that
    person's pictures. The file is in the data folder or its folder lfw.
    """
    images, person, gender = _read(data_dir)
    splits = {}
    for name, chosen in (("train", person % _EVERY != 0), ("test", person % _EVERY == 0)):
        kept = chosen & (gender != _UNKNOWN)
        splits[name] = Split(
            scaled_images(images[kept]),
            gender[kept].astype(np.int64),
            _metadata(person[kept].astype(np.int64)),
        )
    return Dataset(
        name="lfw",
        train=splits["train"],
        test=splits["test"],
        class_names=("male", "female"),
        preprocessing="pixels scaled from 0..255 to [-1, 1]",
        source=_SOURCE,
    )


def load_people(data_dir: Path) -> Dataset:
    """2,267 + 756 grey pictures of the 62 people with at least 20, as of Wei and Liu 2021.

    Inputs (n, 1, 32, 32), averaged from 50 x 37 pixels and scaled to [-1, 1]; the class is the
    person. Ordered by person, every fourth picture is in the test split. The file is that of
    `load`.
    """
    images, person, _ = _read(data_dir)
    order = np.argsort(person, kind="stable")
    order = order[np.bincount(person)[person[order]] >= _MANY]
    people, targets = np.unique(person[order], return_inverse=True)
    rows, columns = (_averaging(length, _SIDE) for length in images.shape[1:])
    small = rows @ images[order].astype(np.float64) @ columns.T
    inputs = (small[:, None] / 127.5 - 1).astype(np.float32)
    every, test = Split(inputs, targets.astype(np.int64)), np.arange(len(order)) % 4 == 0
    return Dataset(
        name="lfw_people",
        train=every.take(~test),
        test=every.take(test),
        class_names=tuple(f"person {number}" for number in people),
        preprocessing="pixels averaged to 32 x 32 and scaled from 0..255 to [-1, 1]",
        source=_SOURCE,
    )


def _averaging(length: int, shorter: int) -> FloatArray:
    """(shorter, length) weights of pixels, by the overlap of each with the larger new one."""
    edges = np.arange(shorter + 1) * length / shorter
    starts = np.arange(length)
    overlap = np.minimum(edges[1:, None], starts + 1) - np.maximum(edges[:-1, None], starts)
    return np.asarray(np.maximum(overlap, 0) * shorter / length)


def _read(data_dir: Path) -> tuple[NDArray[np.integer], ...]:
    """Pictures, person_id and gender of the file."""
    path = find_file(_FILE, [data_dir / "lfw", data_dir], remedy=_REMEDY)
    arrays = read_npz(path, _ITEM_SHAPES)
    images, person, gender = (arrays[name] for name in _ITEM_SHAPES)
    known = np.isin(gender, (0, 1, _UNKNOWN)).all()
    if person.shape != (len(images),) or gender.shape != person.shape or not known:
        raise damaged(
            path,
            f"{len(images)} pictures need a person_id each, and a gender of 0, 1 or {_UNKNOWN}",
        )
    return images, person, gender


def _metadata(person: NDArray[np.int64]) -> pd.DataFrame:
    n_pictures = np.bincount(person)[person]
    return pd.DataFrame({"person_id": person, "pictures": in_bands(n_pictures, _BANDS)})
