import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.groups.make_expected import BINNED, COLUMNS, EXPECTED, tables_of
from indpriv._plain import records
from indpriv.analysis.groups import MIN_GROUP, group_table, group_tables
from indpriv.errors import InputError
from synthetic import epsilon_table, rows

NOBODY = rows("test", [])


def table_of(epsilon, label, group, *, test=None, **columns):
    train = rows("train", label, group=group, **columns)
    return group_table(epsilon_table(epsilon), train, NOBODY if test is None else test, "group")


def of(found):
    """The rows of a table, with None for what is unknown."""
    return list(records(found.rows))


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.integers(0, 2), st.sampled_from("abc")),
        min_size=1,
        max_size=80,
    )
)
@settings(max_examples=40, deadline=None)
def test_it_is_pandas_groupby(people):
    epsilon, label, group = (np.array(column) for column in zip(*people, strict=True))
    found = table_of(epsilon, label, group)
    frame = pd.DataFrame({"epsilon": epsilon, "label": label, "group": group})
    expected = frame.groupby("group")["epsilon"]
    assert {row.name for row in of(found)} == set(group)
    for row in of(found):
        mine = expected.get_group(row.name)
        assert row.n == len(mine)
        assert row.mean == pytest.approx(mine.mean())
        assert row.max == mine.max()
        for name, probability in (("median", 0.5), ("p95", 0.95), ("p99", 0.99)):
            how = "linear" if name == "median" else "higher"
            assert getattr(row, name) == pytest.approx(mine.quantile(probability, how))
    means = [row.mean for row in of(found)]
    assert means == sorted(means, reverse=True)
    for within in found.within_label:
        for row in of(within):
            mine = frame[(frame["label"] == int(within.label)) & (frame["group"] == row.name)][
                "epsilon"
            ]
            assert row.n == len(mine)
            assert row.mean == (pytest.approx(mine.mean()) if len(mine) else None)


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.integers(0, 1), st.sampled_from("ab")),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=40, deadline=None)
def test_direct_standardisation(people):
    epsilon, label, group = (np.array(column) for column in zip(*people, strict=True))
    for row in of(table_of(epsilon, label, group)):
        total, lacking = 0.0, []
        for value in np.unique(label):
            cell = (group == row.name) & (label == value)
            lacking += [] if cell.any() else [str(value)]
            total += (label == value).mean() * (epsilon[cell].mean() if cell.any() else 0.0)
        assert list(row.lacks_labels) == lacking
        assert row.standardised_mean == (None if lacking else pytest.approx(total))


def simpson():
    """Men have more of the costly label; within each label women have the larger epsilon."""
    group = np.array(["men"] * 100 + ["women"] * 100)
    label = np.array([1] * 60 + [0] * 40 + [1] * 20 + [0] * 80)
    epsilon = np.where(label == 1, 3.0, 1.0) + np.where(group == "women", 0.2, 0.0)
    return epsilon, label, group


def test_simpsons_paradox_is_shown():
    found = table_of(*simpson())
    assert [row.name for row in of(found)] == ["men", "women"]
    assert (found.ratio.worst, found.ratio.best) == ("men", "women")
    assert found.ratio.value == pytest.approx(2.2 / 1.6)
    assert found.standardised_ratio.value == pytest.approx(1.8 / 2.0)
    assert found.reversed_labels(beyond_chance=True) == ["0", "1"]
    assert [table.ratio.worst for table in found.within_label] == ["women", "women"]


def test_equal_within_a_label_is_no_reversal():
    _, label, group = simpson()
    assert table_of(np.where(label == 1, 3.0, 1.0), label, group).reversals == ()


def test_a_reversal_by_chance_is_marked_as_such():
    epsilon, label, group = simpson()
    noise = np.where(np.arange(200) % 2, 0.5, -0.5)  # sums to 0 in every cell
    few = np.where(label == 1, 3.0, 1.0) + noise + np.where(group == "women", 0.02, 0.0)
    found = table_of(few, label, group)
    assert found.ratio.worst == "men"
    assert found.reversed_labels(beyond_chance=False) == ["0", "1"]
    assert found.reversed_labels(beyond_chance=True) == []
    certain = table_of(epsilon + noise / 20, label, group)
    assert certain.reversed_labels(beyond_chance=True) == ["0", "1"]
    assert all(each.p_value <= 0.05 for each in certain.reversals)


def test_reversals_are_corrected_for_groupings():
    epsilon, label, group = simpson()
    train = rows("train", label, group=group, same=group)
    test = rows("test", [])
    one = group_tables(epsilon_table(epsilon), train, test, ["group"])[0].reversals
    two = group_tables(epsilon_table(epsilon), train, test, ["group", "same"])[0].reversals
    assert [each.p_value for each in two] == [2 * each.p_value for each in one]


def test_accuracy_loss_and_the_papers_headline():
    epsilon, label, group = simpson()
    correct = np.where(group == "men", np.arange(200) % 2 == 0, True)
    test = rows(
        "test",
        [0] * 40,
        group=["men"] * 20 + ["women"] * 20,
        correct=[True] * 8 + [False] * 12 + [True] * 20,
    )
    found = table_of(
        epsilon, label, group, test=test, correct=correct, loss=np.where(group == "men", 2.0, 1.0)
    )
    men, women = of(found)
    assert (men.train_accuracy, men.test_accuracy, men.mean_loss, men.n_test) == (
        0.5,
        0.4,
        2.0,
        20,
    )
    assert (women.train_accuracy, women.test_accuracy, women.mean_loss) == (
        1.0,
        1.0,
        1.0,
    )
    assert (found.lowest_accuracy_ratio.worst, found.lowest_accuracy_ratio.best) == (
        "men",
        "women",
    )
    assert found.lowest_accuracy_ratio.value == pytest.approx(2.2 / 1.6)


def test_unknown_accuracy_and_odd_losses():
    loss = np.array([1.0, np.inf, np.nan, 3.0] + [1.0] * 8)
    correct = pd.array([None, True, None, False] + [None] * 8, dtype="boolean")
    (row,) = of(table_of(np.ones(12), [0] * 12, ["a"] * 12, loss=loss, correct=correct))
    assert (row.losses_left_out, row.train_accuracy, row.test_accuracy) == (
        2,
        0.5,
        None,
    )
    assert row.mean_loss == pytest.approx(12 / 10)
    silent = of(
        table_of(np.ones(2), [0, 0], ["a", "a"], loss=[np.inf, np.inf], correct=[None, None])
    )[0]
    assert (silent.mean_loss, silent.train_accuracy) == (None, None)


def test_one_example_one_group_empty_groups():
    found = table_of([2.0], [0], ["only"])
    assert [row.name for row in of(found)] == ["only"]
    assert (found.ratio, found.lowest_accuracy_ratio, of(found)[0].too_small) == (
        None,
        None,
        True,
    )
    test = rows("test", [0], group=["elsewhere"])
    empty = of(table_of([2.0], [0], ["only"], test=test))[-1]
    assert (empty.name, empty.n, empty.n_test, empty.mean, empty.max) == (
        "elsewhere",
        0,
        1,
        None,
        None,
    )


def test_a_label_that_only_test_examples_have():
    test = rows("test", [5], group=["a"])
    found = table_of(np.arange(20.0), [0] * 20, ["a", "b"] * 10, test=test)
    assert [row.n for row in of(found.within_label[-1])] == [0, 0]
    assert sum(row.n_test for row in of(found.within_label[-1])) == 1


def test_missing_values_are_a_group_and_small_groups_are_marked():
    group = ["a"] * MIN_GROUP + [None] * MIN_GROUP + ["b"] * (MIN_GROUP - 1)
    n = len(group)
    found = table_of(np.arange(n), [0] * n, pd.array(group, dtype="string"))
    assert {row.name: row.too_small for row in of(found)} == {
        "a": False,
        "(missing)": False,
        "b": True,
    }
    assert found.too_small == 1
    assert (found.ratio.worst, found.ratio.best) == ("(missing)", "a")


def test_a_ratio_over_zero_is_undefined_and_says_so():
    found = table_of([1.0] * 10 + [0.0] * 10, [0] * 20, ["a"] * 10 + ["b"] * 10)
    assert found.ratio.value is None
    assert found.ratio.reason == "the mean epsilon of b is 0"
    assert found.lowest_accuracy_ratio is None


def test_a_group_without_a_label_has_no_standardised_ratio():
    found = table_of(
        [2.0] * 10 + [1.0] * 20, [1] * 10 + [0] * 10 + [1] * 10, ["a"] * 10 + ["b"] * 20
    )
    assert of(found)[0].lacks_labels == ("0",)
    assert (found.standardised_ratio.value, found.standardised_ratio.reason) == (
        None,
        "a lacks a label",
    )


def test_by_label_has_no_table_within_label():
    train = rows("train", ["x"] * 12 + ["y"] * 12)
    found = group_table(epsilon_table([1.0] * 12 + [2.0] * 12), train, NOBODY, "label")
    assert [row.name for row in of(found)] == ["y", "x"]
    assert (found.within_label, found.standardised_ratio, found.reversals) == ((), None, ())
    assert found.ratio.value == 2.0


def test_a_regression_target_is_no_class():
    n = 300
    found = table_of(np.arange(n), np.linspace(0, 1, n), ["a", "b"] * (n // 2))
    assert found.within_label == ()
    assert "300 distinct labels" in found.notes[0]


@pytest.mark.slow
def test_ten_thousand_groups_get_one_table():
    rng = np.random.default_rng(0)
    n = 100_000
    group = rng.integers(0, 10_000, n).astype(str)
    found = table_of(rng.random(n), rng.integers(0, 10, n), group)
    assert len(found.rows) == 10_000
    assert "too many for tables within label" in found.notes[0]
    assert found.standardised_ratio is not None


def test_rows_must_be_aligned():
    with pytest.raises(InputError, match="train has 2 rows for 1 epsilons"):
        group_table(epsilon_table([1.0]), rows("train", [0, 1], group=["a", "b"]), NOBODY, "group")


def test_every_mean_and_ratio_has_an_interval():
    found = table_of(*simpson())
    for row in of(found):
        assert row.mean_interval.low < row.mean < row.mean_interval.high
        # Within a label nothing varies, so that nothing is left to resample once the label shares are fixed.
        assert row.standardised_interval is None
    assert found.ratio.interval.low < found.ratio.value < found.ratio.interval.high
    assert [row.ratio_to_best for row in of(found)] == [pytest.approx(2.2 / 1.6), 1.0]
    assert found.confidence == 0.95


def test_what_cannot_be_read_has_no_interval_and_no_p_value():
    rng = np.random.default_rng(0)
    group = ["a"] * 20 + ["b"] * 20 + ["c"] * (MIN_GROUP - 1)
    found = table_of(rng.random(49), [0] * 49, group)
    small = next(row for row in of(found) if row.name == "c")
    assert (small.mean_interval, small.p_value, small.p_value_within_label) == (
        None,
        None,
        None,
    )
    assert all(row.mean_interval and row.p_value for row in of(found) if row.name != "c")
    constant = table_of(np.ones(40), [0] * 40, group[:40])
    assert (
        constant.spread,
        constant.spread_within_label,
        of(constant)[0].mean_interval,
    ) == (
        None,
        None,
        None,
    )


def test_the_least_size_can_be_chosen():
    train = rows("train", [0] * 8, group=["a"] * 4 + ["b"] * 4)
    found = group_table(epsilon_table(np.arange(8.0)), train, NOBODY, "group", min_size=3)
    assert found.too_small == 0
    assert found.ratio.worst == "b"
    with pytest.raises(InputError, match="min_size=0"):
        group_table(epsilon_table(np.arange(8.0)), train, NOBODY, "group", min_size=0)


def test_a_difference_that_labels_explain_is_gone_within_them():
    rng = np.random.default_rng(1)
    group = np.repeat(["a", "b"], 200)
    label = rng.random(400) < np.where(group == "a", 0.8, 0.2)
    found = table_of(label + rng.exponential(0.3, 400), label, group)
    assert found.spread.p_value == found.spread.corrected <= 0.001
    assert found.spread_within_label.p_value > 0.05
    assert of(found)[0].p_value <= 0.001 < 0.05 < of(found)[0].p_value_within_label


def test_tests_are_corrected_for_the_number_of_groupings():
    rng = np.random.default_rng(2)
    noise = {f"noise{number}": rng.integers(0, 2, 100).astype(str) for number in range(3)}
    train = rows("train", [0] * 100, group=["a", "b"] * 50, **noise)
    found = group_tables(
        epsilon_table(np.tile([1.0, 2.0], 50) + rng.random(100)), train, NOBODY, ["group", *noise]
    )
    assert found[0].spread.p_value == 0.001
    assert found[0].spread.corrected == pytest.approx(0.004)
    assert all(table.spread.corrected >= table.spread.p_value for table in found)
    assert group_tables(epsilon_table(np.ones(100)), train, NOBODY, []) == ()


def test_combinations_of_columns():
    _, label, _ = simpson()
    train = rows("train", label, sex=["f", "m"] * 100, age=np.arange(200))
    found = group_table(epsilon_table(np.arange(200.0)), train, NOBODY, "sex,age:bins=2")
    assert found.columns == ("sex", "age")
    assert {row.name: row.n for row in of(found)} == {
        "f × < 99": 50, "m × < 99": 49, "f × >= 99": 50, "m × >= 99": 51
    }  # fmt: skip
    by_label = group_table(epsilon_table(np.arange(200.0)), train, NOBODY, "sex,label")
    assert (by_label.within_label, by_label.spread_within_label) == ((), None)


def test_worse_accuracy_and_worse_epsilon_go_together():
    group = np.repeat(list("abcdef"), 20)
    epsilon = np.repeat(np.arange(6.0), 20) + np.tile([0.0, 0.5], 60)
    correct = [index % 20 >= 2 * "abcdef".index(name) for index, name in enumerate(group)]
    test = rows("test", [0] * 120, group=group, correct=correct)
    rank = table_of(epsilon, [0] * 120, group, test=test).accuracy_rank
    assert (rank.value, rank.n_groups) == (pytest.approx(-1.0), 6)
    assert rank.p_value == pytest.approx(2 / 720)  # two of the 6! orders are as extreme
    assert table_of(epsilon[:40], [0] * 40, group[:40], test=test).accuracy_rank is None


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.sampled_from("ab")),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=40, deadline=None)
def test_rates_of_two_classes_are_those_of_predictions(people):
    label, predicted, group = (np.array(column) for column in zip(*people, strict=True))
    train = rows("train", [0, 1] * 2, group=["a", "a", "b", "b"])
    test = rows("test", label, group=group, correct=predicted == label)
    found = group_table(epsilon_table([1.0, 2.0, 3.0, 4.0]), train, test, "group")
    assert found.positive_class == "1"
    for row in of(found):
        for rate, interval, side in (
            (row.true_positive_rate, row.true_positive_rate_interval, 1),
            (row.false_positive_rate, row.false_positive_rate_interval, 0),
        ):
            mine = predicted[(group == row.name) & (label == side)]
            assert rate == (pytest.approx(mine.mean()) if len(mine) else None)
            assert interval is None if rate is None else interval.low <= rate <= interval.high


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=60),
)
@settings(max_examples=40, deadline=None)
def test_rates_of_several_classes_are_averaged(people):
    people += [(0, 0), (1, 2), (2, 2)]
    label, predicted = (np.array(column) for column in zip(*people, strict=True))
    train = rows("train", [0, 1, 2], group=["a"] * 3)
    test = rows("test", label, group=["a"] * len(label), correct=predicted == label)
    found = group_table(epsilon_table([1.0, 2.0, 3.0]), train, test, "group")
    (row,) = of(found)
    recall = [(predicted[label == each] == each).mean() for each in range(3)]
    false = sum(((predicted == each) & (label != each)).sum() for each in range(3))
    negatives = sum((label != each).sum() for each in range(3))
    assert found.positive_class is None
    assert row.true_positive_rate == pytest.approx(np.mean(recall))
    assert row.false_positive_rate == pytest.approx(false / negatives)


def test_rates_need_classes_and_predictions():
    train, test = rows("train", [0, 0], group=["a"] * 2), rows("test", [0], group=["a"])
    (row,) = of(group_table(epsilon_table([1.0, 2.0]), train, test, "group"))
    assert row.true_positive_rate is row.false_positive_rate is None


@pytest.mark.parametrize("name", [*COLUMNS, BINNED])
def test_every_figure_is_as_before(name):
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))[name]
    assert_equal(tables_of(name), expected, name)


def assert_equal(found, expected, where):
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{where}/{number}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12), where
    else:
        assert found == expected, where
