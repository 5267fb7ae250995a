"""Digits and breast cancer: small data sets of scikit-learn, which must be installed for them."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from audits.training.datasets.base import Dataset, Split
from indpriv.errors import InputError

_TEST_EVERY = 5  # positions 4, 9, 14, ... are the test split: scikit-learn defines none
_DIGIT_LEVELS = 16  # pixels are 0..16

# Upper ends of the ten measurements, for the mean, the standard error and the worst cell: round
# numbers above those in the data set's public description. The lower end of each is 0.
BREAST_CANCER_RANGES = {
    "radius": (30, 3, 40),
    "texture": (40, 5, 50),
    "perimeter": (200, 25, 300),
    "area": (3000, 600, 5000),
    "smoothness": (0.2, 0.04, 0.25),
    "compactness": (0.4, 0.15, 1.2),
    "concavity": (0.5, 0.4, 1.5),
    "concave points": (0.25, 0.06, 0.3),
    "symmetry": (0.4, 0.1, 0.8),
    "fractal dimension": (0.1, 0.03, 0.25),
}


def load_digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, scaled to [0, 1]; inputs (n, 1, 8, 8)."""
    raw = _sklearn_datasets("digits").load_digits()
    inputs = (raw.images[:, None] / _DIGIT_LEVELS).astype(np.float32)
    train, test = _fixed_split(inputs, raw.target.astype(np.int64))
    return Dataset(
        name="digits",
        train=train,
        test=test,
        class_names=tuple(str(digit) for digit in range(10)),
        preprocessing="pixels divided by 16; every fifth example is in the test split",
        source="UCI Optical Recognition of Handwritten Digits (Alpaydin and Kaynak 1998), in "
        "scikit-learn",
    )


def load_breast_cancer() -> Dataset:
    """569 tumours, each 30 measurements scaled by fixed ranges to [-1, 1]; inputs (n, 30)."""
    raw = _sklearn_datasets("breast_cancer").load_breast_cancer()
    ranges = np.array(list(BREAST_CANCER_RANGES.values()), dtype=np.float64)
    upper = ranges.T.ravel()  # ten means, ten errors, ten worst
    inputs = np.clip(2 * raw.data / upper - 1, -1, 1).astype(np.float32)
    train, test = _fixed_split(inputs, raw.target.astype(np.int64))
    return Dataset(
        name="breast_cancer",
        train=train,
        test=test,
        class_names=("malignant", "benign"),
        preprocessing="measurements scaled by fixed ranges; every fifth example is in the test "
        "split",
        source="UCI Breast Cancer Wisconsin (Diagnostic) (Wolberg et al. 1993), in scikit-learn",
    )


def _fixed_split(inputs: NDArray[np.float32], targets: NDArray[np.int64]) -> tuple[Split, Split]:
    is_test = np.arange(len(inputs)) % _TEST_EVERY == _TEST_EVERY - 1
    return Split(inputs[~is_test], targets[~is_test]), Split(inputs[is_test], targets[is_test])


def _sklearn_datasets(name: str) -> ModuleType:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise InputError(
            f"the data set {name} is part of scikit-learn, which is not installed; pip install "
            "scikit-learn"
        ) from error
    module: ModuleType = sklearn.datasets
    return module
