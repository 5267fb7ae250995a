"""Tables of epsilons as files and as folders of parts: the same rows, read a part at a time."""

import pickle

import numpy as np
import pandas as pd
import pytest

from indpriv import EpsilonTable, EvidenceError, ExampleTable, InputError
from indpriv import epsilon_table as tables
from synthetic import epsilon_table, small_run


@pytest.fixture(params=["file", "folder"])
def written(request, tmp_path, monkeypatch):
    """A table of 23 rows with two further columns, in parts of 5 rows."""
    monkeypatch.setattr(tables, "PART_ROWS", 5)
    monkeypatch.setattr(tables._files, "ROW_GROUP_SIZE", 5)
    monkeypatch.setattr(tables, "LARGEST_FILE", 20 if request.param == "folder" else 100)
    table = epsilon_table(np.linspace(0.1, 2.0, 23))
    columns = pd.DataFrame({"label": np.arange(23) % 3, "race": list("abcdefghijklmnopqrstuvw")})
    path = tmp_path / "epsilon.parquet"
    tables.write_epsilons(table, path, columns)
    assert path.is_dir() == (request.param == "folder")
    return path, table, columns


def test_parts_have_the_rows_of_the_table_in_order(written):
    path, table, columns = written
    found = EpsilonTable.open(path)
    assert len(found) == len(table) == 23
    assert found.account == table.account
    assert (found.worst_case_epsilon, found.claim) == (2.0, "exact")
    assert [*found.details][-2:] == ["label", "race"]
    frames = [part.to_frame() for part in found.tables(found.details)]
    assert [len(frame) for frame in frames] == [5, 5, 5, 5, 3]
    whole = pd.concat(frames, ignore_index=True)
    pd.testing.assert_frame_equal(whole[["label", "race"]], columns, check_dtype=False)
    assert np.array_equal(whole["epsilon"], table.epsilon)
    assert np.array_equal(found.table().epsilon, table.epsilon)
    several = np.concatenate([part.epsilon for part in found.tables()])
    assert np.array_equal(several, table.epsilon)
    assert np.array_equal(found.take(np.array([3, 17])).epsilon, table.epsilon[[3, 17]])


def test_a_stored_table_is_pickled_and_its_columns_are_arrays_where_asked(written):
    """For other processes; `epsilon.mean()` was a bare AttributeError."""
    path, table, _ = written
    found = pickle.loads(pickle.dumps(EpsilonTable.open(path)))
    assert not found.in_memory
    assert np.array_equal(found.table().epsilon, table.epsilon)
    assert found.epsilon.mean() == table.epsilon.mean()
    assert found.epsilon.shape == (23,)
    with pytest.raises(AttributeError, match=r"no 'median'; np\.asarray\(it\) reads all rows"):
        _ = found.epsilon.median


def test_details_are_chosen(written):
    found = EpsilonTable.open(written[0])
    assert {tuple(part.details) for part in found.tables(["race"])} == {("race",)}
    assert not found.table().details


def test_any_reader_of_parquet_reads_the_folder(written):
    path, table, _ = written
    assert np.array_equal(pd.read_parquet(path)["epsilon"], table.epsilon)


def test_a_shorter_table_replaces_a_folder(written):
    path, _, _ = written
    tables.write_epsilons(epsilon_table([1.0, 2.0]), path)
    assert path.is_file()
    assert len(EpsilonTable.open(path)) == 2


def test_what_is_damaged_is_named(written):
    path, _, _ = written
    if path.is_file():
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(EvidenceError, match=r"epsilon\.parquet is damaged"):
            EpsilonTable.open(path)
        return
    part = path / "part-00002.parquet"
    content = bytearray(part.read_bytes())
    content[30] ^= 1  # in the first page
    part.write_bytes(content)
    found = EpsilonTable.open(path)
    with pytest.raises(EvidenceError, match=r"part-00002\.parquet is damaged"):
        found.table()
    part.write_bytes((path / "part-00004.parquet").read_bytes())
    with pytest.raises(EvidenceError, match=r"part-00002\.parquet has 3 rows instead of 5"):
        EpsilonTable.open(path)
    part.unlink()
    with pytest.raises(EvidenceError, match=r"lacks part-00002\.parquet of 5 parts"):
        EpsilonTable.open(path)


def test_paths_may_be_texts(tmp_path):
    path = str(tmp_path / "epsilon.parquet")
    epsilon_table([1.0, 2.0]).to_parquet(path)
    assert EpsilonTable.open(path).table().epsilon.tolist() == [1.0, 2.0]
    examples = small_run(n=4)[1]
    examples.to_parquet(path)
    assert len(ExampleTable.from_parquet(path).train) == len(examples.train)


def test_no_table_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        EpsilonTable.open(tmp_path / "epsilon.parquet")
    (tmp_path / "epsilon.parquet").mkdir()
    with pytest.raises(InputError, match=r"_account\.json does not exist"):
        EpsilonTable.open(tmp_path / "epsilon.parquet")
