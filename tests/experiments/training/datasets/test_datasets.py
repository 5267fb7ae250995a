import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from audits.training.datasets import DATASETS, load_dataset
from audits.training.datasets.base import Dataset, Split
from indpriv.errors import InputError

SHARED = Path(__file__).parents[5] / "shared" / "data"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=", ".join(map(repr, DATASETS))):
        load_dataset("imagenet")


@pytest.mark.parametrize("name", [name for name, kind in DATASETS.items() if kind.load is None])
def test_a_missing_folder_is_named_with_the_remedy(monkeypatch, tmp_path, name):
    monkeypatch.delenv("INDPRIV_DATA", raising=False)
    with pytest.raises(InputError, match="--data-dir"):
        load_dataset(name)
    with pytest.raises(InputError, match="does not exist"):
        load_dataset(name, tmp_path / "nowhere")


def test_the_environment_names_the_folder_and_an_argument_overrides_it(monkeypatch, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("INDPRIV_DATA", str(tmp_path / "one"))
    with pytest.raises(InputError, match="one"):
        load_dataset("mnist")
    with pytest.raises(InputError, match="two"):
        load_dataset("mnist", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("name", DATASETS)
def test_the_size_of_the_data_is_known_before_they_are_loaded(name):
    if DATASETS[name].from_files and not SHARED.is_dir():
        pytest.skip("needs the real data")
    try:
        dataset = load_dataset(name, SHARED)
    except InputError as error:
        pytest.skip(str(error))
    assert len(dataset.train) == DATASETS[name].n_train


def test_declared_metadata_columns_are_the_loaded_ones():
    assert DATASETS["adult"].metadata_columns == tuple(load_dataset("adult").train.metadata.columns)
    assert load_dataset("digits").train.metadata is None


def test_datasets_need_no_torch():
    code = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'opacus'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from audits.training.datasets import load_dataset\n"
        "print(len(load_dataset('adult').train))"
    )
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["32561"], done.stderr


def split(n=4, **changes):
    values = {
        "inputs": np.zeros((n, 3), np.float32),
        "targets": np.zeros(n, np.int64),
        "metadata": None,
    } | changes
    return Split(**values)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": 0}, "at least one example"),
        ({"targets": np.zeros(3, np.int64)}, "one target each"),
        (
            {"inputs": np.array([[0.0], [np.nan], [0.0], [np.inf]], np.float32)},
            "2 examples hold NaN .* number 1",
        ),
        ({"metadata": pd.DataFrame({"a": [1, 2, 3]})}, r"indexed 0\.\.3"),
        ({"metadata": pd.DataFrame({"a": [1, 2, 3, 4]}, index=[0, 1, 2, 2])}, r"indexed 0\.\.3"),
    ],
)
def test_a_split_that_is_not_whole_is_refused(changes, says):
    with pytest.raises(InputError, match=says):
        split(**changes)


def test_classes_must_have_names():
    with pytest.raises(InputError, match="classes 0 to 2; it should have 0 to 1"):
        Dataset("d", split(targets=np.array([0, 1, 2, 0])), split(), ("no", "yes"), "", "")


def test_the_fingerprint_sees_values_targets_and_order():
    inputs = np.arange(12, dtype=np.float32).reshape(4, 3)
    targets = np.array([0, 1, 0, 1])

    def fingerprint(inputs, targets):
        return Dataset(
            "d", split(inputs=inputs, targets=targets), split(), ("no", "yes"), "", ""
        ).fingerprint()

    first = fingerprint(inputs, targets)
    assert fingerprint(inputs.copy(order="F"), targets) == first
    assert len({first, fingerprint(inputs[::-1], targets), fingerprint(inputs, 1 - targets)}) == 3
