"""UTKFace: pictures of faces, classified by gender or by an age under 30. Sensitive.

The setting of Yu et al. 2023 (arXiv:2206.02617v7, sec. 4), in pictures of 32 x 32 pixels: training
examples of four races, with both labels equally frequent in each race. An example, and the unit of
privacy, is one picture. Byte-identical copies count as one picture, so that no picture is in both
splits; pictures whose copies disagree on gender, race or the side of 30 are left out. A person may
have several different pictures, but the data does not say which belong together.

The test set contains the remaining pictures of the same races, balanced in the same way. Otherwise
labels would be rarer among non-members than among members, and an attack that only knows how well a
label is learnt would seem to know who was a member.

Which pictures are chosen depends on the number of other pictures, as in any data set made to a
size; the account takes the training set as given.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audits.training.datasets.base import Dataset, Split, in_bands
from audits.training.datasets.files import damaged, find_file, read_npz, scaled_images

METADATA_COLUMNS = ("race", "gender", "age_band")
ADULT_AGE = 30  # the second task: is the person younger?
# Number of training pictures of each race; half of them have either label.
TRAINING = {"White": 7_000, "Black": 3_500, "Asian": 2_000, "Indian": 2_800}

_NPZ = "utkface_32.npz"
_ITEM_SHAPES = {"X": (32, 32, 3), "age": (), "gender": (), "race": (), "image_id": ()}
_RACES = ("White", "Black", "Asian", "Indian", "Other")
_GENDERS = ("male", "female")
_AGES = ("30 and over", "under 30")
_AGE_BANDS = {0: "0-14", 15: "15-29", 30: "30-44", 45: "45-59", 60: "60+"}
_REMEDY = (
    "make it from UTKFace (https://susanqq.github.io/UTKFace/): X (n, 32, 32, 3) bytes, age, "
    "gender, race, image_id"
)
_ON_TRUST = {
    "duplicates": "byte-identical pictures appear once; other pictures of the same person or "
    "moment were not looked for",
    "preprocessing": "pixels are scaled by constants written in the code; which pictures are "
    "included depends on the others (identical ones once, each race balanced in the label), and "
    "the account takes the training set as given",
}
_SHUFFLE = 2_654_435_761  # Knuth's multiplier: a fixed order, unrelated to what pictures show


def load_gender(data_dir: Path) -> Dataset:
    """15,300 training pictures labelled male or female; inputs (n, 3, 32, 32) in [-1, 1].

    The data folder, or its folder utkface, contains utkface_32.npz.
    """
    return _load(data_dir, "utkface_gender", "gender", _GENDERS)


def load_age(data_dir: Path) -> Dataset:
    """15,300 training pictures labelled under 30 or not; otherwise like `load_gender`."""
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
                "age_band": in_bands(rows["age"], _AGE_BANDS),
            }
        ).reset_index(drop=True)
        images = scaled_images(arrays["X"][rows["position"].to_numpy()])
        splits[split] = Split(images, rows[label].to_numpy(np.int64, copy=True), metadata)
    return Dataset(
        name=name,
        train=splits["train"],
        test=splits["test"],
        class_names=class_names,
        preprocessing="pixels scaled from 0..255 to [-1, 1]; each picture once, each race "
        "balanced in the label",
        source="UTKFace (Zhang, Song and Qi 2017), non-commercial research only",
        on_trust=_ON_TRUST,
    )


def _people(path: Path, arrays: dict[str, NDArray[np.integer]]) -> pd.DataFrame:
    """The annotations of each picture, with its position in the file."""
    frame = pd.DataFrame({name: arrays[name] for name in ("image_id", "age", "gender", "race")})
    frame = frame.astype(np.int64).rename_axis("position").reset_index()
    for column, names in (("gender", _GENDERS), ("race", _RACES)):
        if not frame[column].between(0, len(names) - 1).all():
            raise damaged(path, f"{column} has values outside 0..{len(names) - 1}")
    if (frame["age"] < 0).any():
        raise damaged(path, "an age is negative")
    return frame.assign(
        race=np.array(_RACES)[frame["race"]], under_30=(frame["age"] < ADULT_AGE).astype(np.int64)
    )


def distinct_pictures(people: pd.DataFrame) -> pd.DataFrame:
    """The first row of each image_id, unless its copies disagree on gender, race or under_30."""
    answers = people.groupby("image_id")[["gender", "race", "under_30"]].nunique()
    agreed = answers.index[(answers == 1).all(axis=1)]
    return people[people["image_id"].isin(agreed)].drop_duplicates("image_id")


def chosen_pictures(path: Path, people: pd.DataFrame, label: str) -> dict[str, pd.DataFrame]:
    """Rows of "train" and "test" in a fixed mixed order, each race balanced in the label.

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
