"""Labeled Faces in the Wild: 13,233 pictures of 5,749 people, by their gender. One npz file; whose a picture is, is metadata."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import pandas as pd

from indpriv.training.datasets.base import Dataset, Split, damaged, find_file

METADATA_COLUMNS = ("person_id", "pictures")
_FILE = "lfw_deepfunneled_gray_50x37.npz"
_REMEDY = (
    "it holds the deep-funneled pictures in grey, cut to the face: X (n, 50, 37) uint8, person_id (n,), and gender (n,), 0 male, "
    "1 female, 255 unknown"
)
_SHAPE = (50, 37)
_UNKNOWN = 255  # gender of 4 pictures, which are left out
_EVERY = (
    5  # a person whose id is a multiple of it is a test person: nobody has pictures in both splits
)
_BANDS = {1: "1", 2: "2-5", 6: "6-20", 21: "21+"}  # by the first number of pictures of each


def load(data_dir: Path) -> Dataset:
    """10,968 + 2,261 grey pictures, scaled to [-1, 1]; inputs (n, 1, 50, 37); class 1 is female.

    Metadata: person_id, whose picture it is, and pictures, a band of how many the person has.

    Args:
        data_dir: the file lies in it or in its folder lfw.

    Raises:
        InputError: the file is missing.
        EvidenceError: the file is damaged.
    """
    path = find_file(_FILE, [data_dir / "lfw", data_dir], remedy=_REMEDY)
    try:
        with np.load(path, allow_pickle=False) as archive:
            images, person, gender = (archive[name] for name in ("X", "person_id", "gender"))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise damaged(path, str(error)) from error
    if images.shape[1:] != _SHAPE or images.dtype != np.uint8:
        raise damaged(
            path,
            f"X has shape {images.shape} and type {images.dtype}, pictures are (n, 50, 37) uint8",
        )
    if (
        person.shape != (len(images),)
        or gender.shape != person.shape
        or not np.isin(gender, (0, 1, _UNKNOWN)).all()
    ):
        raise damaged(
            path,
            f"{len(images)} pictures need a person_id each, and a gender of 0, 1 or {_UNKNOWN}",
        )
    splits = {}
    for name, chosen in (("train", person % _EVERY != 0), ("test", person % _EVERY == 0)):
        kept = chosen & (gender != _UNKNOWN)
        inputs = images[kept, None].astype(np.float32) / np.float32(127.5) - np.float32(1)
        splits[name] = Split(
            inputs, gender[kept].astype(np.int64), _metadata(person[kept].astype(np.int64))
        )
    return Dataset(
        name="lfw",
        train=splits["train"],
        test=splits["test"],
        class_names=("male", "female"),
        preprocessing="pixels scaled from 0..255 to [-1, 1]",
        source="Labeled Faces in the Wild (Huang et al. 2007), deep-funneled, research use",
    )


def _metadata(person: np.ndarray) -> pd.DataFrame:
    n_pictures = np.bincount(person)[person]
    band = np.searchsorted(list(_BANDS), n_pictures, side="right") - 1
    return pd.DataFrame({"person_id": person, "pictures": np.array(list(_BANDS.values()))[band]})
