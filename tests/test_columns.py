from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv import _columns
from indpriv._columns import (
    MISSING,
    as_rows,
    frames_of,
    groupable_columns,
    grouping_of,
    label_grouping,
    to_floats,
    to_texts,
)
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from synthetic import rows


def split(values, by="group", test=()):
    train = rows("train", [0] * len(values), group=values)
    others = rows("test", [0] * len(test), group=list(test))
    found = grouping_of(train, others, by)
    return found.names, found.codes(train).tolist(), found.codes(others).tolist()


def names(values, by="group", test=()):
    found, codes, _ = split(values, by, test)
    return [found[code] for code in codes]


def test_values_are_names():
    assert names(["b", "a", "b"]) == ["b", "a", "b"]
    assert names([2, 1, 10]) == ["2", "1", "10"]
    assert names([1.0, 2.0, np.nan]) == ["1", "2", MISSING]
    assert names([True, False]) == ["True", "False"]
    assert names([1.5, 2.0]) == ["1.5", "2"]
    assert names(pd.array([1, None], dtype="Int64")) == ["1", MISSING]


def test_missing_and_empty_are_told_from_values_that_look_like_them():
    assert names(["(missing)", None, "", "(empty)"]) == [
        "'(missing)'",
        MISSING,
        "(empty)",
        "'(empty)'",
    ]


def test_mixed_kinds_with_one_name_are_one_group():
    assert names(pd.Series([1, "1", 1.0], dtype=object)) == ["1", "1", "1"]


def test_test_rows_share_the_groups():
    found, _, codes = split(["a", "b"], test=["b", "c", None])
    assert found == ("a", "b", "c", MISSING)
    assert codes == [1, 2, 3]


def test_a_column_that_the_test_rows_lack_is_missing_there():
    test = rows("test", [0, 0])
    found = grouping_of(rows("train", [0], group=["a"]), test, "group")
    assert found.names == ("a", MISSING)
    assert found.codes(test).tolist() == [1, 1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80), st.integers(2, 12))
def test_bins_are_ordered_and_nobody_is_lost(values, bins):
    found, codes, _ = split(values, f"group:bins={bins}")
    order = np.argsort(values, kind="stable")
    assert np.all(np.diff(np.array(codes)[order]) >= 0)
    assert len(found) <= bins
    assert len(set(found)) == len(found)
    assert np.all(np.bincount(codes, minlength=len(found)) > 0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=80), st.integers(2, 12))
def test_bins_have_short_names_that_are_true(values, bins):
    """The names are the cuts: every row is where its name says, and training rows as ever."""
    found, codes, others = split(values, f"group:bins={bins}", test=values)
    assert others == codes
    cuts = [float(name.split("<")[-1].strip("> =")) for name in found[:-1]]
    assert np.searchsorted(cuts, values, side="right").tolist() == codes
    exact = np.unique(np.quantile(values, np.arange(1, bins) / bins, method="closest_observation"))
    exact = exact[exact > min(values)]
    assert np.searchsorted(exact, values, side="right").tolist() == codes


def test_bins_are_named_by_few_digits():
    values = np.random.default_rng(0).normal(50, 10, 4000)
    found, *_ = split(values.tolist(), "group:bins=5")
    assert max(map(len, found)) <= len("50.1234 to <52.1234")
    assert split(list(range(300, 400)), "group:bins=2")[0] == ("< 349", ">= 349")


def test_bins_hold_about_as_many():
    found, codes, others = split(list(range(100)), "group:bins=4", test=[-5, 1000, None])
    assert np.bincount(codes).min() >= 24
    assert found[0].startswith("< ")
    assert found[-2].startswith(">= ")
    assert others == [0, 3, 4]


def test_one_value_makes_one_bin():
    assert set(names([7.0] * 5, "group:bins=3")) == {"all"}


def test_a_column_whose_name_looks_like_bins_comes_first():
    train = rows("train", [0, 0], **{"age:bins=2": ["x", "y"]})
    assert grouping_of(train, None, "age:bins=2").names == ("x", "y")


@pytest.mark.parametrize(
    ("values", "by", "message"),
    [
        (
            ["a"],
            "shoe_size",
            "no column 'shoe_size' to group by; choose among label, group, correct, loss",
        ),
        (["a"], "unit_id", "no column 'unit_id'"),
        (["a"], "group:bins=3", "group is not numeric"),
        ([True], "group:bins=3", "group is not numeric"),
        ([1.0, 2.0], "group:bins=1", "at least 2"),
        ([1.0, 2.0], "group:bins=5000", "at most 1,000"),
        ([np.nan, np.inf], "group:bins=2", "no finite value"),
        ([np.nan, np.nan], "group:bins=2", "no finite value"),
        (
            list(range(60)),
            "group",
            "numeric with 60 distinct values, too many for groups; pass group:bins=10",
        ),
    ],
)
def test_bad_requests(values, by, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        split(values, by)


def test_odd_names_pass_through_unchanged():
    odd = ["<b>&amp;", "=1+1", "a,b", "👩‍🔬", "$x$", "[red]"]
    assert sorted(names(odd)) == sorted(odd)


def test_groupable_columns_leave_out_the_fixed_ones():
    frame = rows("train", [0], sex=["a"]).assign(epsilon=1.0, epsilon_lower=0.0, epsilon_upper=1.0)
    assert groupable_columns(frame) == ["label", "sex"]


@pytest.mark.parametrize(
    "column",
    [
        pd.Series([True, None, False], dtype=object),
        pd.Series([True, pd.NA, False], dtype="boolean"),
        pd.Series([1, None, 0], dtype="Int64"),
        pd.Series([1.0, np.nan, 0.0]),
    ],
)
def test_columns_with_gaps_are_floats(column):
    assert np.array_equal(to_floats(column), [1.0, np.nan, 0.0], equal_nan=True)


def test_combinations_that_occur_are_groups():
    train = rows("train", [0, 1, 1], sex=["f", "m", None], place=["a,b", "<b>", "a,b"])
    test = rows("test", [1], sex=["f"], place=["<b>"])
    found = grouping_of(train, test, "sex, place,label")
    assert found.columns == ("sex", "place", "label")
    assert found.names == ("f × <b> × 1", "f × a,b × 0", "m × <b> × 1", "(missing) × a,b × 1")
    assert [found.names[code] for code in found.codes(train)] == [
        found.names[index] for index in (1, 2, 3)
    ]
    assert found.codes(test).tolist() == [0]


def test_a_column_with_a_comma_in_its_name_comes_first():
    train = rows("train", [0, 1]).assign(**{"sex,place": ["x", "y"]})
    assert grouping_of(train, train, "sex,place").names == ("x", "y")
    with pytest.raises(InputError, match="there is no column 'sex'"):
        grouping_of(train, train, "label,sex")


def test_results_of_the_model_are_groups_if_asked():
    train = rows("train", [0] * 4, loss=[0.1, 0.2, 3.0, 4.0], correct=[True, True, False, None])
    test = rows("test", [0], loss=[9.0], correct=[False])
    correct = grouping_of(train, test, "correct")
    assert correct.names == ("False", "True", MISSING)
    assert (correct.codes(train).tolist(), correct.codes(test).tolist()) == ([1, 1, 0, 2], [0])
    loss = grouping_of(train, test, "loss:bins=2")
    assert (loss.codes(train).tolist(), loss.codes(test).tolist()) == ([0, 1, 1, 1], [1])
    assert groupable_columns(train) == ["label"]


@pytest.mark.parametrize(
    "values",
    [
        np.array([3, 1, 2**53 + 1, 3]),
        np.array([True, False, True]),
        np.array([0.5, -0.0, np.nan, 1e16, 0.1]),
        np.array([0.1, 1.0, np.nan], np.float32),
        np.array([0.1, 1.0], np.float16),
        np.array([255, 0], np.uint8),
    ],
)
def test_numbers_read_as_the_same_values_in_objects_do(values):
    plain, boxed = pd.Series(values), pd.Series(values.astype(object))
    assert to_texts(plain).tolist() == to_texts(boxed).tolist()
    assert to_floats(plain).tobytes() == to_floats(boxed).tobytes()


def test_floats_are_a_copy():
    column = pd.Series([1.0, 2.0])
    to_floats(column)[0] = 5.0
    assert column.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_rows_come_in_the_order_of_the_ids(order):
    examples = ExampleTable(rows("train", [0, 1, 0], group=["a", "b", "c"]))
    ids = examples.train["example_id"].to_numpy()[order]
    found = examples.aligned(ids)
    assert found.columns[0] == "example_id"
    assert found["example_id"].tolist() == ids.tolist()
    assert found["group"].tolist() == ["abc"[index] for index in order]
    assert found.index.equals(pd.RangeIndex(3))


def in_ranges(frame):
    """Rows in memory that are read seven at a time."""
    return replace(as_rows(frame), starts=[*range(0, len(frame), 7), len(frame)])


@pytest.mark.parametrize(
    "by", ["group", "age:bins=4", "label", "group,age:bins=3", "correct", "flag", "gaps"]
)
def test_groups_found_range_by_range_are_those_of_all_rows(by):
    rng = np.random.default_rng(0)
    frames = [
        rows(
            split,
            rng.integers(0, 3, n),
            group=rng.choice(["a", "b", None], n),
            age=rng.integers(17, 90, n).astype(float),
            flag=np.where(np.arange(n) < 8, None, rng.random(n) < 0.5),
            gaps=np.where(np.arange(n) < 8, np.nan, rng.integers(0, 4, n)),
        )
        for split, n in (("train", 40), ("test", 11))
    ]
    whole = grouping_of(*frames, by)
    found = grouping_of(in_ranges(frames[0]), in_ranges(frames[1]), by)
    assert (found.columns, found.names) == (whole.columns, whole.names)
    assert found.codes(frames[1]).tolist() == whole.codes(frames[1]).tolist()
    codes = [found.codes(frame) for frame in frames_of(in_ranges(frames[0]))]
    assert [len(part) for part in codes] == [7, 7, 7, 7, 7, 5]
    assert np.concatenate(codes).tolist() == whole.codes(frames[0]).tolist()


def test_many_values_range_by_range_are_refused(monkeypatch):
    monkeypatch.setattr(_columns, "MOST_GROUPS", 20)
    train = rows("train", np.arange(40) / 7, group=[f"g{k}" for k in range(40)])
    for found in (in_ranges(train), as_rows(train)):
        several = len(found.ranges()) > 1
        assert (label_grouping(found, train[:0]) is None) == several
    with pytest.raises(InputError, match="group has more than 20 distinct values"):
        grouping_of(in_ranges(train), train[:0], "group")
    with pytest.raises(InputError, match="group has more than 20 distinct values"):
        grouping_of(as_rows(train[:2]), in_ranges(train), "group")
    with pytest.raises(InputError, match="label is numeric with at least 14 distinct values"):
        grouping_of(in_ranges(train), train[:0], "label", max_values=10)


def test_a_part_of_rows_ends_where_it_ends():
    """Training rows, which test rows follow in a file, are never read with these."""
    every = as_rows(pd.DataFrame({"value": range(10)}))
    train, test = every.part(0, 4), every.part(4, 10)
    assert train.read(2, 9)["value"].tolist() == [2, 3]
    assert test.read(4, 99)["value"].tolist() == [8, 9]
