from pathlib import Path

import numpy as np
import pytest

from audits.training.datasets import lfw
from indpriv.errors import EvidenceError, InputError

SHARED = Path(__file__).parents[5] / "shared" / "data"
FILE = "lfw_deepfunneled_gray_50x37.npz"


def arrays(n=12):
    person = np.sort(np.arange(n) % 7).astype(np.uint16)
    gender = (person % 2).astype(np.uint8)
    gender[3] = 255
    return {
        "X": np.arange(n * 1850).reshape(n, 50, 37).astype(np.uint8),
        "person_id": person,
        "gender": gender,
    }


def write(folder, **changes):
    np.savez(
        folder / FILE,
        **{name: value for name, value in {**arrays(), **changes}.items() if value is not None},
    )
    return folder


def test_nobody_is_in_both_splits_and_unknown_genders_are_left_out(tmp_path):
    dataset = lfw.load(write(tmp_path))
    people = [set(split.metadata["person_id"]) for split in (dataset.train, dataset.test)]
    assert people == [{1, 2, 3, 4, 6}, {0, 5}]
    assert len(dataset.train) + len(dataset.test) == 11
    assert dataset.train.inputs.shape[1:] == (1, 50, 37)
    assert -1 <= dataset.train.inputs.min() <= dataset.train.inputs.max() <= 1
    assert dataset.train.targets.tolist() == (dataset.train.metadata["person_id"] % 2).tolist()
    assert dataset.train.metadata["pictures"].tolist() == [
        "2-5" if person in (2, 3, 4) else "1" for person in dataset.train.metadata["person_id"]
    ]


def test_a_cap_keeps_the_first_rows_of_each_person(tmp_path):
    train = lfw.load(write(tmp_path)).train
    capped = train.take(train.within_cap("person_id", 1))
    assert capped.metadata["person_id"].tolist() == [1, 2, 3, 4, 6]
    first = [train.metadata["person_id"].tolist().index(person) for person in (1, 2, 3, 4, 6)]
    np.testing.assert_array_equal(capped.inputs, train.inputs[first])
    assert train.within_cap("person_id", 2).all()
    with pytest.raises(InputError, match="no metadata column 'family'"):
        train.within_cap("family", 1)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=FILE):
        lfw.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gender": None}, "gender"),
        ({"X": np.zeros((12, 9, 9), np.uint8)}, r"shape \(12, 9, 9\)"),
        ({"person_id": np.zeros(3, np.uint16)}, "a person_id each"),
        ({"gender": np.full(12, 7, np.uint8)}, "a gender of 0, 1 or 255"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, changes, says):
    with pytest.raises(EvidenceError, match=says):
        lfw.load(write(tmp_path, **changes))


@pytest.mark.skipif(not (SHARED / "lfw").is_dir(), reason=f"LFW is not in {SHARED}")
def test_reads_the_real_file():
    dataset = lfw.load(SHARED)
    assert (len(dataset.train), len(dataset.test)) == (10968, 2261)
    assert dataset.train.metadata["person_id"].value_counts().max() == 530


def test_people_with_twenty_pictures_are_classes_of_small_pictures(tmp_path):
    person = np.repeat([3, 5, 8], [24, 19, 20]).astype(np.uint16)
    images = np.random.default_rng(0).integers(0, 256, (63, 50, 37), dtype=np.uint8)
    images[0] = 255
    write(tmp_path, X=images, person_id=person, gender=np.zeros(63, np.uint8))
    found = lfw.load_people(tmp_path)
    assert found.class_names == ("person 3", "person 8")
    assert (len(found.train), len(found.test)) == (33, 11)
    assert np.bincount(found.test.targets).tolist() == [6, 5]
    assert found.train.inputs.shape[1:] == (1, 32, 32)
    np.testing.assert_allclose(found.test.inputs[0], 1.0, atol=1e-6)
    # An average keeps the mean of a picture.
    np.testing.assert_allclose(
        (found.train.inputs[0].mean() + 1) * 127.5, images[1].mean(), rtol=1e-5
    )


@pytest.mark.skipif(not (SHARED / "lfw").is_dir(), reason=f"LFW is not in {SHARED}")
def test_the_real_file_has_62_people_with_twenty_pictures():
    found = lfw.load_people(SHARED)
    assert (len(found.train), len(found.test), found.n_classes) == (2267, 756, 62)
    assert set(found.test.targets) == set(range(62))
