import numpy as np
import pandas as pd
import pytest

from indpriv import ExampleTable
from indpriv.analysis.recorded_run import RecordedRun, choose_groups
from indpriv.attacks import Material
from indpriv.errors import PrivacyWarning
from summaries import audit_of
from synthetic import epsilon_table, people


def test_columns_that_test_examples_lack_are_said(artifacts):
    log, examples = artifacts
    test = examples.frame["split"] == "test"
    whole = audit_of(
        log,
        epsilon_table(np.ones(log.n_examples)),
        RecordedRun(Material(examples)),
        name="x",
        by=["sex"],
    )
    assert not any("test_metadata" in text for text in whole.missing)
    frame = examples.frame.assign(sex=examples.frame["sex"].mask(test))
    summary = audit_of(
        log,
        epsilon_table(np.ones(log.n_examples)),
        RecordedRun(Material(ExampleTable(frame))),
        name="x",
        by=["sex", "label"],
    )
    (text,) = [text for text in summary.missing if "test_metadata" in text]
    assert text.startswith("Test examples have no sex: ")


def test_default_groups():
    train = people(200, "train", 0).assign(street=[f"street {index}" for index in range(200)])
    chosen, left_out = choose_groups(train.drop(columns="hard"), (), ())
    assert chosen == ["label", "sex", "age:bins=10"]
    assert left_out == [
        "street has 200 distinct values and was not grouped by; ask with --by street."
    ]
    assert choose_groups(train, (), ("sex",)) == (["sex"], [])
    assert choose_groups(train, ("age:bins=2", "sex", "sex"), ("label",)) == (
        ["age:bins=2", "sex"],
        [],
    )


def test_labels_get_their_names_only_where_they_fit(artifacts):
    _, examples = artifacts
    assert set(examples.with_label_names(["poor", "rich"]).frame["label"]) == {"poor", "rich"}
    assert examples.with_label_names([]) is examples
    with pytest.warns(
        PrivacyWarning, match="1 names .e.g. only one., and the examples have 2 labels"
    ):
        assert examples.with_label_names(["only one"]) is examples
    with pytest.warns(PrivacyWarning, match="each differently"):  # else the classes are one group
        assert examples.with_label_names(["poor", "poor"]) is examples
    with pytest.warns(
        PrivacyWarning, match="3 names .e.g. none, poor, rich., and the examples have 2"
    ):
        named = examples.with_label_names(["none", "poor", "rich"])
    assert set(named.frame["label"]) == {"none", "poor"}
    gaps = ExampleTable(examples.frame.assign(label=pd.array([None, *[1] * 359], dtype="Int64")))
    named = gaps.with_label_names(["poor", "rich"]).frame["label"]
    assert pd.isna(named.iloc[0])
    assert named.iloc[1] == "rich"
