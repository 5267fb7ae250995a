"""Rows of training and test examples, in any order of the file."""

import numpy as np
import pandas as pd
import pytest

from indpriv import _columns, _files, example_table
from indpriv._columns import as_rows, frames_of, repeated
from indpriv.errors import InputError, PrivacyWarning
from indpriv.example_table import ExampleTable, open_examples
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


def test_repeated_ids():
    for ids in ([], [1], [1, 2, 5], [5, 1, 2], ["b", "a"], np.array([9, 3], np.uint64)):
        assert not len(repeated(as_rows(pd.DataFrame({"id": ids})), "id"))
    for ids in ([1, 1], [1, 2, 1], ["a", "b", "a"]):
        assert repeated(as_rows(pd.DataFrame({"id": ids})), "id").tolist() == ids[:1]


def test_some_training_rows_and_all_test_rows():
    some = table([4, 0, 1, 5, 2, 3, 6]).with_ids(np.array([1, 3]), None)
    assert some.train["example_id"].tolist() == [1, 3]
    assert len(some.test) == 3
    fewer = some.with_ids(np.array([3]), np.array([2, 3]))
    assert [part["example_id"].tolist() for part in (fewer.train, fewer.test)] == [[3], [2]]


@pytest.fixture
def in_a_file(tmp_path, monkeypatch):
    """Writes a table in row groups of 10, and opens it there."""
    monkeypatch.setattr(_files, "ROW_GROUP_SIZE", 10)
    monkeypatch.setattr(example_table, "LARGEST_IN_MEMORY", 20)

    def opened(frame):
        ExampleTable(frame).to_parquet(tmp_path / "examples.parquet")
        return open_examples(tmp_path / "examples.parquet")

    return opened


def many(n=34, **columns):
    train = rows("train", np.arange(n) % 3, sex=np.where(np.arange(n) % 4, "f", "m"))
    both = pd.concat([train, rows("test", [1, 0, 2], sex=["f", "f", "m"])], ignore_index=True)
    return both.assign(**columns)


def test_a_table_in_a_file_is_the_one_in_memory(in_a_file, tmp_path):
    plain = ExampleTable(many())
    found = in_a_file(many())
    assert found.in_file
    for name in ("train", "test", "frame"):
        pd.testing.assert_frame_equal(getattr(found, name), getattr(plain, name))
    assert (found.n_train, found.metadata_columns) == (34, ["sex"])
    positions = np.array([0, 9, 10, 33])
    for one, two in (
        (found.at(positions, None), plain.at(positions, None)),
        (found.at(positions, np.array([0, 2])), plain.at(positions, np.array([0, 2]))),
        (found.with_ids(np.array([4, 30]), None), plain.with_ids(np.array([4, 30]), None)),
        (found.with_ids(positions, np.array([1])), plain.with_ids(positions, np.array([1]))),
        (found.with_label_names(["a", "b", "c"]), plain.with_label_names(["a", "b", "c"])),
    ):
        for split in ("train", "test"):
            pd.testing.assert_frame_equal(getattr(one, split), getattr(two, split))
    with pytest.warns(PrivacyWarning, match="2 names .e.g. a, b., and the examples have 3 labels"):
        assert found.with_label_names(["a", "b"]) is found
    assert [len(part) for part in frames_of(found.rows("train"), ["loss"])] == [10, 10, 10, 4]
    named = found.with_label_names(["a", "b", "c"])
    named.to_parquet(tmp_path / "copy.parquet")
    assert _columns.Rows.open(tmp_path / "copy.parquet").starts == (0, 10, 20, 30, 34, 37)
    copy = ExampleTable.from_parquet(tmp_path / "copy.parquet")
    pd.testing.assert_frame_equal(copy.frame, named.frame, check_dtype=False)
    assert (tmp_path / "copy.parquet").stat().st_mode & 0o077 == 0


def test_its_training_rows_are_read_by_ranges_in_the_order_of_the_log(in_a_file):
    found = in_a_file(many())
    rows_of_file = found.train_rows(np.arange(34))
    assert list(rows_of_file.ranges()) == [(0, 10), (10, 20), (20, 30), (30, 34)]
    assert rows_of_file.read(8, 12, ["example_id"])["example_id"].tolist() == [8, 9, 10, 11]
    other = found.train_rows(np.arange(34)[::-1])
    assert list(other.ranges()) == [(0, 34)]
    assert other.read(0, 34)["example_id"].tolist() == list(range(34))[::-1]
    with pytest.raises(InputError, match="1 audited examples are not in the example table"):
        found.train_rows(np.arange(1, 35))


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("place", [(3, 31), (9, 10), (35, 36)])
def test_ids_that_occur_twice_are_refused_there_too(in_a_file, tmp_path, place, as_text):
    frame = many()
    frame.loc[place[1], "example_id"] = frame.loc[place[0], "example_id"]
    frame = frame.astype({"example_id": str}) if as_text else frame
    path = tmp_path / "examples.parquet"
    frame.to_parquet(path, row_group_size=10)
    with pytest.raises(InputError, match="1 example ids occur twice within a split"):
        open_examples(path)


def test_a_table_in_a_file_may_have_no_test_rows(in_a_file):
    found = in_a_file(rows("train", np.arange(34) % 3))
    assert (found.in_file, found.n_train) == (True, 34)
    assert found.test.empty
    assert list(found.test) == list(found.train)
    assert len(found.at(np.array([3, 30]), None).train) == 2


def test_units_of_several_rows_are_seen(in_a_file):
    assert in_a_file(many()).has_unit_for_each_row
    units = np.r_[np.arange(33), 2, 0, 1, 2]
    assert not in_a_file(many(unit_id=units)).has_unit_for_each_row


def test_files_of_another_order_are_read_whole(in_a_file, tmp_path):
    mixed = many().sample(frac=1, random_state=1).reset_index(drop=True)
    assert not in_a_file(mixed).in_file
    few = many()[:20].reset_index(drop=True)
    assert not in_a_file(few).in_file
    path = tmp_path / "examples.parquet"
    many(split="valid").to_parquet(path)
    with pytest.raises(InputError, match="'valid'"):
        open_examples(path)


def test_a_column_without_values_at_first_is_written_with_its_type(in_a_file, tmp_path):
    gaps = np.where(np.arange(37) < 15, None, "x")
    found = in_a_file(many(note=gaps, size=np.where(np.arange(37) < 15, np.nan, 3.0)))
    found.to_parquet(tmp_path / "copy.parquet")
    copy = ExampleTable.from_parquet(tmp_path / "copy.parquet")
    pd.testing.assert_frame_equal(copy.frame, found.frame, check_dtype=False)
