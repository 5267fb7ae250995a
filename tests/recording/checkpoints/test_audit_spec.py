import pickle
import sys

import numpy as np
import pandas as pd
import pytest
from torch import nn

from indpriv.errors import InputError
from indpriv.recording import AuditSpec
from indpriv.recording.checkpoints.replay import load_spec
from runs import PER_EXAMPLE, blobs, mlp

GOOD = {"model": mlp, "dataset": blobs(), "loss_fn": PER_EXAMPLE}
MODULE = """
from torch import nn
import runs
from indpriv.recording import AuditSpec
spec = AuditSpec(model=runs.mlp, dataset=runs.blobs(), loss_fn=runs.PER_EXAMPLE)
other = 5
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": nn.Linear(2, 2)}, "pass the function that builds it"),
        ({"loss_fn": 5}, "loss_fn is a int"),
        ({"load": "x"}, "load is a str"),
        ({"dataset": iter([1])}, "which has no length"),
        ({"test_set": iter([1])}, "test_set is of type list_iterator, which has no length"),
        ({"dataset": []}, "no examples"),
        ({"test_set": []}, "test_set is empty"),
        ({"example_ids": np.zeros(120)}, "duplicates"),
        ({"unit_ids": np.arange(119)}, "unit_ids has shape (119,)"),
        ({"unit": "city"}, "unit='city'"),
        ({"metadata": pd.DataFrame({"sex": ["x"] * 121})}, "metadata has 121 rows for 120 train examples"),
        ({"metadata": pd.DataFrame({"sex": ["x"] * 119})}, "metadata lacks 1 of 120"),
        ({"metadata": pd.DataFrame({"loss": [1.0] * 120})}, "may not have the columns loss"),
    ],
)  # fmt: skip
def test_bad_specs_are_refused_when_they_are_written(change, words):
    with pytest.raises(InputError) as error:
        AuditSpec(**{**GOOD, **change})
    assert words in str(error.value)


def test_a_spec_from_a_file_and_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_spec(f"{tmp_path}/my_training.py:spec").n_examples == 120
    monkeypatch.chdir(tmp_path)
    assert load_spec("my_training:spec").n_examples == 120
    monkeypatch.delitem(sys.modules, "my_training")


def test_a_spec_file_knows_where_it_is_and_its_own_errors_are_shown(tmp_path, monkeypatch):
    """As in a script: __file__ is set, a class can be pickled, and what it refuses is not wrapped."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "where.py").write_text(MODULE + "class Net: pass\nspec.model.place = __file__\n")
    assert load_spec(f"{tmp_path}/where.py:spec").model.place == str(tmp_path / "where.py")
    place = sys.modules["_indpriv_spec_where"]
    assert type(pickle.loads(pickle.dumps(place.Net()))) is place.Net
    (tmp_path / "bad.py").write_text(MODULE.replace("model=runs.mlp", "model=5"))
    with pytest.raises(InputError, match=r"^AuditSpec: model is a int; pass a function"):
        load_spec(f"{tmp_path}/bad.py:spec")
    for code, words in (
        ("int('x')", "ValueError"),
        ("raise RuntimeError('no data')", "RuntimeError: no data"),
        ("import not_there", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = (", "SyntaxError"),
    ):
        (tmp_path / "worse.py").write_text(f"import sys\n{code}")
        with pytest.raises(InputError) as error:
            load_spec(f"{tmp_path}/worse.py:spec")
        assert f"worse.py cannot be imported: {words}" in str(error.value)
        assert str(error.value).endswith(f"correct {tmp_path}/worse.py, line 2")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: 1 / 0, r"spec\.model\(\) fails: ZeroDivisionError\('division by zero'\)"),
        (lambda width: nn.Linear(width, 2), r"spec\.model\(\) fails: TypeError"),
        (lambda: nn.Linear, r"spec\.model\(\) returns a type"),
        (lambda: None, r"spec\.model\(\) returns a NoneType"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_message(build, words):
    with pytest.raises(InputError, match=words):
        AuditSpec(**{**GOOD, "model": build}).model()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("my_training", "expected module and name, e.g. my_package.training:spec"),
        ("nowhere.py:spec", "nowhere.py does not exist"),
        ("no_such_module:spec", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("my_training.py:missing", "has no 'missing'"),
        ("my_training.py:other", "other is a int, not an AuditSpec"),
        ("broken.py:spec", "broken.py cannot be imported: SyntaxError"),
        (":spec", "expected module and name"),
    ],
)
def test_references_that_lead_nowhere(tmp_path, monkeypatch, reference, words):
    (tmp_path / "my_training.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("spec = (")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        load_spec(reference)
    assert words in str(error.value)
