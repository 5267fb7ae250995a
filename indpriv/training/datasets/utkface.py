"""UTKFace: pictures of faces with gender, age and race, for telling gender, or an age under 30. Sensitive.

The setting of Yu et al. 2023 (arXiv:2206.02617v7, sec. 4), in pictures of 32 x 32: training examples of four races, as
many of either label in each race. An example, and the unit of privacy, is one picture. Byte-identical copies are one
picture: the first stands for all, so that none is on both sides, and pictures whose copies disagree on gender, race or
the side of 30 are left out. A person may have several different pictures; nothing here knows whose they are.

The test set is what remains of the same races, balanced likewise: otherwise labels would be rarer among non-members than
among members, and an attack that only knows how well a label is learnt would look as if it knew who was a member.

Which pictures are chosen depends on how many others there are, as in any data set made to a size; the account takes the
training set as given.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv.training.datasets.base import (
    Dataset,
    Split,
    damaged,
    find_file,
    read_npz,
    scaled_images,
)

METADATA_COLUMNS = ("race", "gender", "age_band")
ADULT_AGE = 30  # the second task: younger or not
TRAINING = {
    "White": 7_000,
    "Black": 3_500,
    "Asian": 2_000,
    "Indian": 2_800,
}  # of each race, half with either label

_NPZ = "utkface_32.npz"
_ITEM_SHAPES = {"X": (32, 32, 3), "age": (), "gender": (), "race": (), "image_id": ()}
_RACES = ("White", "Black", "Asian", "Indian", "Other")
_GENDERS = ("male", "female")
_AGES = ("30 and over", "under 30")
_AGE_BANDS = {
    0: "0-14",
    15: "15-29",
    30: "30-44",
    45: "45-59",
    60: "60+",
}  # by the first year of each
_REMEDY = "make it of UTKFace (https://susanqq.github.io/UTKFace/): X (n, 32, 32, 3) bytes, age, gender, race, image_id"
_ON_TRUST = {
    "duplicates": "byte-identical pictures are there once; nobody looked for others of one person or one moment",
    "preprocessing": "pixels by constants written in the code; which pictures are in depends on the others (identical ones "
    "once, each race balanced in the label), and the account takes the training set as given",
}
_SHUFFLE = 2_654_435_761  # Knuth's multiplier: a fixed order of pictures that has nothing to do with what they show


def load_gender(data_dir: Path) -> Dataset:
    """15,300 training pictures labelled male or female (see `load_dataset`); inputs (n, 3, 32, 32) in [-1, 1].

    Args:
        data_dir: it or its folder utkface holds utkface_32.npz.

    Raises:
        InputError: no such file.
        EvidenceError: a damaged file, or one with too few pictures.
    """
    return _load(data_dir, "utkface_gender", "gender", _GENDERS)


def load_age(data_dir: Path) -> Dataset:
    """15,300 training pictures labelled under 30 or not; as `load_gender`."""
    return _load(data_dir, "utkface_age", "under_30", _AGES)


def _load(data_dir: Path, name: str, label: str, class_names: tuple[str, str]) -> Dataset:
    path = find_file(_NPZ, [data_dir / "utkface", data_dir], remedy=_REMEDY)
    arrays = read_npz(path, _ITEM_SHAPES)
    if len({len(array) for array in arrays.values()}) > 1:
        raise damaged(path, "its arrays differ in length")
    people = distinct_pictures(_people(path, arrays))
    splits = {}
    for split, rows in chosen_pictures(path, people, label).items():
        metadata = pd.DataFrame(
            {
                "race": rows["race"],
                "gender": np.array(_GENDERS)[rows["gender"]],
                "age_band": np.array(list(_AGE_BANDS.values()))[
                    np.searchsorted(list(_AGE_BANDS), rows["age"], side="right") - 1
                ],
            }
        ).reset_index(drop=True)
        images = scaled_images(arrays["X"][rows["position"].to_numpy()])
        splits[split] = Split(images, rows[label].to_numpy(np.int64, copy=True), metadata)
    return Dataset(
        name=name,
        train=splits["train"],
        test=splits["test"],
        class_names=class_names,
        preprocessing="pixels scaled from 0..255 to [-1, 1]; each picture once, each race balanced in the label",
        source="UTKFace (Zhang, Song and Qi 2017), non-commercial research only",
        on_trust=_ON_TRUST,
    )


def _people(path: Path, arrays: dict[str, NDArray[np.integer]]) -> pd.DataFrame:
    """What is said of each picture, by position."""
    frame = pd.DataFrame({name: arrays[name] for name in ("image_id", "age", "gender", "race")})
    frame = frame.astype(np.int64).rename_axis("position").reset_index()
    for column, names in (("gender", _GENDERS), ("race", _RACES)):
        if not frame[column].between(0, len(names) - 1).all():
            raise damaged(path, f"{column} has values beyond 0..{len(names) - 1}")
    if (frame["age"] < 0).any():
        raise damaged(path, "an age is negative")
    return frame.assign(
        race=np.array(_RACES)[frame["race"]], under_30=(frame["age"] < ADULT_AGE).astype(np.int64)
    )


def distinct_pictures(people: pd.DataFrame) -> pd.DataFrame:
    """One row of each image_id, the first; none of those whose copies disagree on gender, race or under_30."""
    said = people.groupby("image_id")[["gender", "race", "under_30"]].nunique()
    agreed = said.index[(said == 1).all(axis=1)]
    return people[people["image_id"].isin(agreed)].drop_duplicates("image_id")


def chosen_pictures(path: Path, people: pd.DataFrame, label: str) -> dict[str, pd.DataFrame]:
    """Rows of "train" and "test", as many with either label in each race, in a fixed mixed order.

    Raises:
        EvidenceError: too few pictures of a race for training and testing.
    """
    mixed = people.assign(order=people["image_id"] * _SHUFFLE % 2**32).sort_values(
        ["order", "image_id"]
    )
    parts: dict[str, list[pd.DataFrame]] = {"train": [], "test": []}
    for race, wanted in TRAINING.items():
        of_race = [mixed[(mixed["race"] == race) & (mixed[label] == value)] for value in (0, 1)]
        trained, least = wanted // 2, min(map(len, of_race))
        if least <= trained:
            raise damaged(
                path, f"{race} has {least} pictures of one {label} label, {trained + 1} are needed"
            )
        for rows in of_race:
            parts["train"].append(rows[:trained])
            parts["test"].append(rows[trained:least])
    return {
        split: pd.concat(rows).sort_values(["order", "image_id"]) for split, rows in parts.items()
    }
