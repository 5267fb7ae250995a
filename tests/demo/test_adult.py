import numpy as np
import pandas as pd
import pytest

from audits.training.datasets import load_dataset
from audits.training.datasets.base import in_bands
from indpriv.demo import adult
from indpriv.errors import EvidenceError


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("adult")


def test_has_the_published_counts(dataset):
    assert (len(dataset.train), len(dataset.test)) == (32561, 16281)
    assert dataset.train.metadata["race"].value_counts().to_dict() == {
        "White": 27816,
        "Black": 3124,
        "Asian-Pac-Islander": 1039,
        "Amer-Indian-Eskimo": 311,
        "Other": 271,
    }
    assert dataset.train.metadata["sex"].value_counts().to_dict() == {
        "Male": 21790,
        "Female": 10771,
    }
    # adult.names: 23.93 % of all 48,842 people earn more than 50K
    positives = dataset.train.targets.sum() + dataset.test.targets.sum()
    assert positives / 48842 == pytest.approx(0.2393, abs=5e-5)


def test_first_person_is_encoded_as_written(dataset):
    """39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, ..., White, Male, 2174, 0, 40, US, <=50K."""
    row = dataset.train.inputs[0]
    assert row[:5] == pytest.approx(
        [(39 - 50) / 50, (13 - 8.5) / 7.5, 2174 / 20000, 0.0, (40 - 50) / 50]
    )
    names = [f"{column}={name}" for column, listed in adult.CATEGORIES.items() for name in listed]
    assert len(names) == 102
    chosen = [names[position] for position in np.flatnonzero(row[5:])]
    assert chosen == [
        "workclass=State-gov",
        "education=Bachelors",
        "marital_status=Never-married",
        "occupation=Adm-clerical",
        "relationship=Not-in-family",
        "race=White",
        "sex=Male",
        "native_country=United-States",
    ]
    assert dataset.train.targets[0] == 0
    assert dataset.train.metadata.iloc[0].to_dict() == {
        "race": "White",
        "sex": "Male",
        "age_band": "35-44",
    }


def test_encoding_a_row_does_not_depend_on_the_others(dataset):
    """Nothing is fitted on the data: a row alone is encoded as among all."""
    frame = adult.read_frame()
    train = frame[frame["split"] == "train"]
    for position in (0, 1234, 32560):
        np.testing.assert_array_equal(
            adult.encode(train.iloc[[position]])[0], dataset.train.inputs[position]
        )


def test_inputs_are_bounded(dataset):
    for split in (dataset.train, dataset.test):
        assert np.abs(split.inputs).max() <= 1
        assert split.inputs.dtype == np.float32
        np.testing.assert_array_equal(split.inputs[:, 5:].sum(axis=1), len(adult.CATEGORIES))


def test_age_bands_change_at_their_first_year():
    ages = pd.Series([17, 24, 25, 34, 35, 64, 65, 90])
    assert in_bands(ages, adult.AGE_BANDS).tolist() == [
        "17-24",
        "17-24",
        "25-34",
        "25-34",
        "35-44",
        "55-64",
        "65+",
        "65+",
    ]


def test_unknown_category_is_refused():
    frame = adult.read_frame().head(3).assign(race="Martian")
    with pytest.raises(EvidenceError, match="race='Martian'"):
        adult.encode(frame)


def test_a_changed_file_is_refused(monkeypatch):
    monkeypatch.setattr(adult, "SHA256", "0" * 64)
    with pytest.raises(EvidenceError, match="not the file that was shipped"):
        adult.read_frame()
