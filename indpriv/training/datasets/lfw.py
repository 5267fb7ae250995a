"""Labeled Faces in the Wild: 13,233 pictures of 5,749 people, classified by gender.

The person in each picture is metadata, for accounts of people with several pictures.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv.training.datasets.base import Dataset, Split, in_bands
from indpriv.training.datasets.files import damaged, find_file, read_npz, scaled_images

METADATA_COLUMNS = ("person_id", "pictures")
_FILE = "lfw_deepfunneled_gray_50x37.npz"
_REMEDY = (
    "it holds the deep-funneled pictures in grey, cut to the face: X (n, 50, 37) uint8, person_id "
    "(n,), and gender (n,), 0 male, 1 female, 255 unknown"
)
_ITEM_SHAPES = {"X": (50, 37), "person_id": (), "gender": ()}
_UNKNOWN = 255  # gender of 4 pictures, which are left out
_EVERY = 5  # a person whose id is a multiple of this is in the test split, and only there
_BANDS = {1: "1", 2: "2-5", 6: "6-20", 21: "21+"}  # number of pictures of a person


def load(data_dir: Path) -> Dataset:
    """10,968 + 2,261 grey pictures, scaled to [-1, 1]; inputs (n, 1, 50, 37); class 1 is female.

    Metadata: person_id, the person in the picture, and pictures, a band for the number of that
    person's pictures. The file is in the data folder or its folder lfw.
    """
    path = find_file(_FILE, [data_dir / "lfw", data_dir], remedy=_REMEDY)
    arrays = read_npz(path, _ITEM_SHAPES)
    images, person, gender = (arrays[name] for name in _ITEM_SHAPES)
    known = np.isin(gender, (0, 1, _UNKNOWN)).all()
    if person.shape != (len(images),) or gender.shape != person.shape or not known:
        raise damaged(
            path,
            f"{len(images)} pictures need a person_id each, and a gender of 0, 1 or {_UNKNOWN}",
        )
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
        source="Labeled Faces in the Wild (Huang et al. 2007), deep-funneled, research use",
    )


def _metadata(person: NDArray[np.int64]) -> pd.DataFrame:
    n_pictures = np.bincount(person)[person]
    return pd.DataFrame({"person_id": person, "pictures": in_bands(n_pictures, _BANDS)})
