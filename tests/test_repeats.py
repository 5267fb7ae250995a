"""Rows that share a value, found in one file in memory or in several on disk."""

import errno
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv import InputError, _columns
from indpriv._columns import Repeats, as_rows, joined, numbers_of, repeated

RANGES = [(0, 7), (7, 8), (8, 8), (8, 20)]


@pytest.fixture(autouse=True, params=[1, 3, 1 << 20])
def rows_of_a_file(request, monkeypatch):
    monkeypatch.setattr(_columns, "_AT_ONCE", request.param)


def rows_of(values):
    return joined([as_rows(pd.DataFrame({"id": values[start:stop]})) for start, stop in RANGES])


def repeats_of(values, ranges=RANGES):
    with Repeats(len(values)) as found:
        for start, stop in ranges:
            found.add(numbers_of(values[start:stop]))
        return found.positions().tolist(), found.distinct()


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
    with Repeats(7) as found:
        for part in ranges:
            found.add(numbers_of(part))
        assert found.positions().tolist() == [0, 1, 2, 3, 4, 5]
        assert found.distinct() == 3
    large = np.array([2**53, 2**53 + 1])  # equal as floats
    assert len(set(numbers_of(large).tolist())) == 2


def test_only_whole_groups_are_given_up_to_a_number():
    values = np.repeat(np.arange(4), 5)
    with Repeats(20) as found:
        found.add(numbers_of(values))
        positions = found.positions(most=7)
    assert len(positions) == 10
    assert set(np.bincount(values[positions])) <= {0, 5}


def test_whole_numbers_in_order_are_only_looked_at(monkeypatch):
    monkeypatch.setattr(_columns, "Repeats", None)
    ids = np.arange(20) * 3
    assert not len(repeated(rows_of(ids), "id"))
    ids = np.where(ids == 24, 21, ids)  # the first of a range repeats the last of the one before
    with pytest.raises(TypeError):
        repeated(rows_of(ids), "id")


@given(st.lists(st.integers(-5, 5), max_size=30))
def test_nothing_is_lost(values):
    array = np.array(values, np.int64)
    positions, distinct = repeats_of(array, [(0, len(array))])
    assert distinct == len(set(values))
    assert positions == [k for k, value in enumerate(values) if values.count(value) > 1]


FULL = Path("/dev/full")  # every write to it finds no space
full = pytest.mark.skipif(not FULL.is_char_device(), reason="there is no /dev/full")


def full_file():
    return FULL.open("r+b")


@full
@pytest.mark.parametrize("n", [3000, 30])  # of which few wait for the file to be read or closed
def test_a_full_folder_of_temporary_files_is_named_with_what_is_needed(n, monkeypatch):
    monkeypatch.setattr(_columns, "_AT_ONCE", n // 3)
    monkeypatch.setattr(_columns, "TemporaryFile", full_file)
    message = (
        rf"{tempfile.gettempdir()}, the folder of temporary files, is full\. To find repeated rows, "
        rf"{n:,} hashes take up to 1 MiB there; free it, or set TMPDIR to a folder with room"
    )
    values = np.arange(n)[::-1]
    for use in (Repeats.positions, Repeats.distinct, lambda found: None):
        with pytest.raises(InputError, match=message), Repeats(n) as found:
            found.add(numbers_of(values))
            use(found)
    with pytest.raises(InputError, match=message):
        repeated(as_rows(pd.DataFrame({"id": values})), "id")


def test_other_errors_of_temporary_files_go_on(monkeypatch):
    def refused():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(_columns, "_AT_ONCE", 1)
    monkeypatch.setattr(_columns, "TemporaryFile", refused)
    with pytest.raises(OSError, match="Too many open files") as caught:
        Repeats(3)
    assert not isinstance(caught.value, InputError)


def test_no_folder_for_temporary_files(monkeypatch):
    def none_usable():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    with pytest.raises(InputError, match=r"no folder for temporary files can be written\. To find"):
        Repeats(3)
