"""Rows that share a value, whose hashes may agree in half of their bits."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv import _columns
from indpriv._columns import as_rows, joined, numbers_of, repeated, repeats

RANGES = [(0, 7), (7, 8), (8, 8), (8, 20)]


def rows_of(values):
    return joined([as_rows(pd.DataFrame({"id": values[start:stop]})) for start, stop in RANGES])


def found_in(parts, most=None):
    n = sum(map(len, parts))
    positions, distinct, counted = repeats(lambda: parts, n, most)
    assert counted == n
    return positions.tolist(), distinct


def repeats_of(values, ranges=RANGES):
    return found_in([numbers_of(values[start:stop]) for start, stop in ranges])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [int, str, float])
def test_they_are_what_pandas_finds(seed, kind):
    values = np.random.default_rng(seed).integers(0, 25, 20).astype(kind)
    if kind is str:
        values = values.astype(object)
    column = pd.Series(values)
    expected = np.flatnonzero(column.duplicated(keep=False)).tolist()
    assert repeats_of(values) == (expected, column.nunique())
    twice = column[column.duplicated()].tolist()
    assert repeated(rows_of(values), "id").tolist() == twice


def test_a_missing_value_in_one_range_hides_no_repeat():
    values = [1, 2, 1, 2, None, 1, 2, 2.5]
    ranges = [pd.Series(values[:4]), pd.Series(values[4:]).dropna()]
    assert [part.dtype.kind for part in ranges] == ["i", "f"]
    assert found_in([*map(numbers_of, ranges)]) == ([0, 1, 2, 3, 4, 5], 3)
    large = np.array([2**53, 2**53 + 1])  # equal as floats
    assert len(set(numbers_of(large).tolist())) == 2


def test_only_whole_groups_are_given_up_to_a_number():
    values = np.repeat(np.arange(4), 5)
    positions, distinct = found_in([numbers_of(values)], most=7)
    assert distinct == 4
    assert len(positions) == 10
    assert set(np.bincount(values[positions])) <= {0, 5}


def test_whole_numbers_in_order_are_only_looked_at(monkeypatch):
    monkeypatch.setattr(_columns, "repeats", None)
    ids = np.arange(20) * 3
    assert not len(repeated(rows_of(ids), "id"))
    ids = np.where(ids == 24, 21, ids)  # the first of a range repeats the last of the one before
    with pytest.raises(TypeError):
        repeated(rows_of(ids), "id")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=30), st.integers(1, 7))
def test_numbers_with_equal_halves_are_told_apart(halves, size):
    numbers = np.array([low + (high << 32) for low, high in halves], np.uint64)
    parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    column = pd.Series(numbers)
    expected = np.flatnonzero(column.duplicated(keep=False)).tolist()
    assert found_in(parts) == (expected, column.nunique())


@given(st.lists(st.integers(-5, 5), max_size=30))
def test_nothing_is_lost(values):
    array = np.array(values, np.int64)
    positions, distinct = repeats_of(array, [(0, len(array))])
    assert distinct == len(set(values))
    assert positions == [k for k, value in enumerate(values) if values.count(value) > 1]
