import numpy as np
import pytest

from audits.training.datasets import load_dataset, utkface
from audits.training.run_record import ON_TRUST
from indpriv.errors import EvidenceError, InputError

FILE = "utkface_32.npz"
SIZES = {"White": 6, "Black": 4, "Asian": 2, "Indian": 2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(utkface, "TRAINING", SIZES)


@pytest.fixture
def arrays():
    """400 pictures, every tenth a copy of the one before, with the same annotations."""
    generator = np.random.default_rng(0)
    n = 400
    arrays = {
        "X": generator.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8),
        "age": generator.integers(1, 70, n).astype(np.uint8),
        "gender": generator.integers(0, 2, n).astype(np.uint8),
        "race": generator.integers(0, 5, n).astype(np.uint8),
        "image_id": np.arange(n, dtype=np.int32),
    }
    for array in arrays.values():
        array[9::10] = array[8::10]
    return arrays


def saved(folder, arrays):
    (folder / "utkface").mkdir()
    np.savez(folder / "utkface" / FILE, **arrays)
    return folder


@pytest.mark.parametrize(("name", "label"), [("utkface_gender", "gender"), ("utkface_age", "age")])
def test_each_race_is_balanced_in_the_label_on_both_sides(tmp_path, arrays, name, label):
    dataset = load_dataset(name, saved(tmp_path, arrays))
    for split in (dataset.train, dataset.test):
        counts = (
            split.metadata.assign(target=split.targets)
            .groupby("race")["target"]
            .agg(["sum", "size"])
        )
        assert (2 * counts["sum"] == counts["size"]).all()
        assert set(counts.index) == set(SIZES)
    assert dataset.train.metadata["race"].value_counts().to_dict() == SIZES
    young = dataset.train.metadata["age_band"].isin(["0-14", "15-29"])
    meant = {"gender": dataset.train.metadata["gender"] == "female", "age": young}[label]
    np.testing.assert_array_equal(dataset.train.targets, meant)


def test_inputs_are_the_pictures_that_the_metadata_speaks_of(tmp_path, arrays):
    dataset = load_dataset("utkface_gender", saved(tmp_path, arrays))
    images = arrays["X"].transpose(0, 3, 1, 2)
    for split in (dataset.train, dataset.test):
        for i in range(5):
            found = (
                np.abs(images / 127.5 - 1 - split.inputs[i])
                .reshape(len(images), -1)
                .max(axis=1)
                .argmin()
            )
            np.testing.assert_allclose(split.inputs[i], images[found] / 127.5 - 1, atol=1e-6)
            assert (
                split.metadata["race"][i]
                == ("White", "Black", "Asian", "Indian", "Other")[arrays["race"][found]]
            )
            assert split.targets[i] == arrays["gender"][found]


def test_no_picture_is_there_twice(tmp_path, arrays):
    dataset = load_dataset("utkface_age", saved(tmp_path, arrays))
    pictures = [
        picture.tobytes() for split in (dataset.train, dataset.test) for picture in split.inputs
    ]
    assert len(set(pictures)) == len(pictures)


def test_pictures_whose_copies_disagree_are_left_out(arrays):
    people = utkface._people("file", arrays)
    whole = utkface.distinct_pictures(people)
    assert len(whole) == 360
    assert (whole["position"] % 10 != 9).all()
    arrays["gender"][9] = 1 - arrays["gender"][8]
    arrays["race"][19] = (arrays["race"][18] + 1) % 5
    arrays["age"][28:30] = 29, 30
    arrays["age"][38:40] = 40, 41  # on the same side of 30
    fewer = utkface.distinct_pictures(utkface._people("file", arrays))
    assert set(whole["image_id"]) - set(fewer["image_id"]) == {8, 18, 28}


def test_what_is_on_trust_is_said_in_the_words_of_this_data(tmp_path, arrays):
    dataset = load_dataset("utkface_age", saved(tmp_path, arrays))
    assert set(dataset.on_trust) <= set(ON_TRUST)
    assert "identical" in dataset.on_trust["duplicates"]


def test_the_choice_is_the_same_each_time_and_mixes_races(tmp_path, arrays):
    folder = saved(tmp_path, arrays)
    first, again = (load_dataset("utkface_gender", folder) for _ in range(2))
    assert first.fingerprint() == again.fingerprint()
    assert first.train.metadata["race"].tolist() != sorted(first.train.metadata["race"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"utkface_32\.npz is not in .*utkface"):
        load_dataset("utkface_age", tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda arrays: arrays.pop("age"), "age"),
        (lambda arrays: arrays.update(X=arrays["X"][:, :16]), "X has shape"),
        (lambda arrays: arrays.update(race=arrays["race"][:-1]), "differ in length"),
        (lambda arrays: arrays.update(race=arrays["race"] + 1), "race has values outside 0..4"),
        (lambda arrays: arrays.update(gender=arrays["gender"] * 3), "gender has values outside"),
        (lambda arrays: arrays.update(age=-arrays["age"].astype(np.int64)), "age is negative"),
        (lambda arrays: arrays.update(race=np.zeros_like(arrays["race"])), "Black has 0 pictures"),
    ],
)
def test_damaged_files_are_refused(tmp_path, arrays, change, says):
    change(arrays)
    with pytest.raises(EvidenceError, match=says):
        load_dataset("utkface_gender", saved(tmp_path, arrays))
