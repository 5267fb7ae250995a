"""Rows of training and test examples, in any order of the file."""

import numpy as np
import pandas as pd
import pytest

from indpriv._arrays import all_distinct
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from synthetic import rows


def table(order=None):
    both = [rows("train", [0, 1, 0, 1]), rows("test", [1, 0, 1])]
    frame = pd.concat(both, ignore_index=True)
    return ExampleTable(frame if order is None else frame.iloc[order].reset_index(drop=True))


def test_splits_are_the_same_in_files_of_any_order():
    plain, mixed = table(), table([4, 0, 1, 5, 2, 3, 6])
    for split in ("train", "test"):
        pd.testing.assert_frame_equal(getattr(plain, split), getattr(mixed, split))
    assert (plain.n_train, len(plain.test)) == (4, 3)
    assert ExampleTable(plain.train).test.empty
    ids = np.array([3, 0, 2])
    assert plain.aligned(ids)["example_id"].tolist() == ids.tolist()
    assert plain.aligned(np.arange(4))["label"].tolist() == [0, 1, 0, 1]


def test_an_id_is_unique_within_its_split():
    frame = table().frame
    with pytest.raises(InputError, match=r"2 example ids occur twice within a split, e\.g\. 0$"):
        ExampleTable(frame.assign(example_id=[0, 1, 0, 1, 2, 3, 4]))
    with pytest.raises(InputError, match="1 example ids occur twice"):
        ExampleTable(frame.assign(example_id=list("abcdeae")))


def test_distinct_ids():
    for ids in ([], [1], [1, 2, 5], [5, 1, 2], ["b", "a"]):
        assert all_distinct(np.array(ids))
    for ids in ([1, 1], [1, 2, 1], ["a", "b", "a"]):
        assert not all_distinct(np.array(ids))


def test_some_training_rows_and_all_test_rows():
    some = table([4, 0, 1, 5, 2, 3, 6]).with_train(np.array([1, 3]))
    assert some.train["example_id"].tolist() == [1, 3]
    assert len(some.test) == 3
