import sys

import numpy as np
import pytest

from audits.training.datasets import from_sklearn
from indpriv.errors import InputError

sklearn_datasets = pytest.importorskip("sklearn.datasets")


def test_digits_are_whole_scaled_and_split_by_position():
    dataset = from_sklearn.load_digits()
    assert (dataset.train.inputs.shape, dataset.test.inputs.shape) == (
        (1438, 1, 8, 8),
        (359, 1, 8, 8),
    )
    assert dataset.train.inputs.min() == 0
    assert dataset.train.inputs.max() == 1
    raw = sklearn_datasets.load_digits()
    np.testing.assert_array_equal(dataset.test.targets, raw.target[4::5])
    np.testing.assert_allclose(dataset.test.inputs[0, 0], raw.images[4] / 16)
    assert np.bincount(dataset.train.targets).min() > 100


def test_breast_cancer_fits_its_fixed_ranges_without_clipping():
    dataset = from_sklearn.load_breast_cancer()
    assert (dataset.train.inputs.shape, dataset.test.inputs.shape) == ((456, 30), (113, 30))
    assert dataset.class_names == ("malignant", "benign")
    for split in (dataset.train, dataset.test):
        assert split.inputs.min() >= -1
        assert split.inputs.max() < 1  # the ranges are wider than the data, so none was clipped
    raw = sklearn_datasets.load_breast_cancer()
    radius_error = list(raw.feature_names).index("radius error")
    np.testing.assert_allclose(
        dataset.train.inputs[0, radius_error], 2 * raw.data[0, radius_error] / 3 - 1, rtol=1e-6
    )


@pytest.mark.parametrize("load", [from_sklearn.load_digits, from_sklearn.load_breast_cancer])
def test_without_scikit_learn_the_remedy_is_named(monkeypatch, load):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match="pip install scikit-learn"):
        load()
