"""Records of many examples are several files, each with the next examples: read, damaged, and cut short."""

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import synthetic
from indpriv import EvidenceError, NormLog, _columns, _files, account
from indpriv._files import read_verified
from indpriv.norm_log import records
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from norm_log_of_parts import append
from synthetic import small_run, write_run

DELTA, N = 1e-5, 240


@pytest.fixture
def parts_of_50(monkeypatch):
    monkeypatch.setattr(records, "PART_SIZE", 50)
    monkeypatch.setattr(records, "LARGEST_FILE", 200)


@pytest.fixture
def logs(parts_of_50, tmp_path, monkeypatch):
    """The same run with records of one file and of five."""
    log, examples = small_run(n=N, steps=6)
    monkeypatch.setattr(records, "LARGEST_FILE", N)
    whole = write_run(tmp_path / "whole", log, examples)
    monkeypatch.setattr(records, "LARGEST_FILE", 200)
    return whole, write_run(tmp_path / "parts", log, examples)


def test_the_norms_and_epsilons_are_the_same(logs):
    whole, parts = (NormLog.open(path) for path in logs)
    names = sorted(path.name for path in (logs[1] / "records").glob("000000000003*"))
    assert names == [f"000000000003-{number:05d}.parquet" for number in range(5)]
    assert np.array_equal(parts.read(), whole.read())
    for start, stop in ((0, 1), (49, 51), (50, 100), (120, 240), (239, 240)):
        assert np.array_equal(parts.read(start, stop), whole.read(start, stop))
    epsilons = [account(log, delta=DELTA).epsilon for log in (whole, parts)]
    assert np.array_equal(*epsilons)
    assert account(parts.thin(2), delta=DELTA).epsilon.max() > 0


def test_one_line_of_the_journal_makes_all_parts_of_a_record_exist(logs):
    lines = [json.loads(line) for line in (logs[1] / "journal.jsonl").read_text().splitlines()]
    of_records = [line for line in lines if line["kind"] == "record"]
    assert [len(line["parts"]) for line in of_records] == [5] * 6
    assert all("sha256" not in line for line in of_records)


@pytest.mark.usefixtures("parts_of_50")
def test_a_process_that_is_killed_between_parts_leaves_no_record(tmp_path):
    """By SIGKILL; the next process writes the record again, and the log goes on."""
    norms = np.random.default_rng(0).uniform(0, 1.2, (4, N))
    np.save(tmp_path / "norms.npy", norms)
    code = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(synthetic.__file__)!r})
import numpy as np
from indpriv.norm_log import records, writer
records.PART_SIZE = 50
records.LARGEST_FILE = 200
plain = writer.NormLogWriter._write
def killed(self, name, content):
    if name == "000000000002-00003.parquet":
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, name, content)
writer.NormLogWriter._write = killed
from norm_log_of_parts import append
append({str(tmp_path / "run")!r}, np.load({str(tmp_path / "norms.npy")!r}), 0)
"""
    found = subprocess.run([sys.executable, "-c", code], timeout=240)
    assert found.returncode == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "run" / "records").glob("000000000002-*"))
    assert left == [f"000000000002-{number:05d}.parquet" for number in range(3)]
    log = NormLog.open(tmp_path / "run")
    assert (log.total_steps, log.recorded_steps.tolist()) == (2, [0, 1])
    append(tmp_path / "run", norms, 2)
    log = NormLog.open(tmp_path / "run")
    assert log.recorded_steps.tolist() == [0, 1, 2, 3]
    expected = np.array([log.levels.encode(row, 1.0) for row in norms])
    assert np.array_equal(log.read(), expected)


def test_a_flipped_bit_is_named_when_its_part_is_read(logs):
    path = logs[1] / "records" / "000000000002-00003.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    log = NormLog.open(logs[1])
    assert log.read(0, 150).shape == (6, 150)  # other parts can be read
    with pytest.raises(EvidenceError, match=r"000000000002-00003\.parquet was changed"):
        account(log, delta=DELTA)
    states = [
        check.status for check in verify(open_run(logs[1], hash_all=True)) if check.key == "records"
    ]
    assert states == ["failed"]
    counted, whole = NormLog.open(logs[1], unreadable="worst_case"), NormLog.open(logs[0])
    assert counted.unreadable_steps == (2,)
    expected = whole.read().copy()
    expected[2, 150:200] = whole.levels.max_code
    assert np.array_equal(counted.read(), expected)


@pytest.mark.parametrize(
    "change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x")]
)
def test_a_missing_or_cut_part_is_named_at_once(logs, change):
    change(logs[1] / "records" / "000000000002-00003.parquet")
    with pytest.raises(EvidenceError, match=r"000000000002-00003\.parquet: record of step 2"):
        NormLog.open(logs[1])


def test_a_report_says_when_hashes_were_compared(logs):
    def detail(run):
        return next(check.detail for check in verify(run) if check.key == "records")

    assert "30 of them compared when they are read" in detail(open_run(logs[1]))
    assert "when they are read" not in detail(open_run(logs[1], hash_all=True))
    assert "when they are read" not in detail(open_run(logs[0]))


def test_a_file_that_vanishes_is_named(tmp_path):
    with pytest.raises(EvidenceError, match="gone is missing"):
        read_verified(tmp_path / "gone", "0" * 64)


@pytest.fixture(params=["numbers", "texts"])
def stored_ids(request, tmp_path, monkeypatch):
    """A run whose ids stay in their file, in row groups of 50, and what they are."""
    monkeypatch.setattr(_files, "ROW_GROUP_SIZE", 50)
    monkeypatch.setattr(records, "LARGEST_FILE", 200)
    log, _ = small_run(n=N, steps=3)
    texts = np.array([f"p{k}" for k in range(N)], object)
    ids = np.arange(N)[::-1] if request.param == "numbers" else texts
    return write_run(tmp_path / "run", replace(log, example_ids=ids), None, exact=3), ids


def test_many_ids_are_read_when_they_are_asked_for(stored_ids, monkeypatch):
    run_dir, ids = stored_ids
    log, read = NormLog.open(run_dir), []
    plain = _columns.Rows.read
    monkeypatch.setattr(
        _columns.Rows, "read", lambda rows, *part: read.append(part[:2]) or plain(rows, *part)
    )
    assert isinstance(log.example_ids, _columns.StoredColumn)
    assert (len(log.example_ids), log.n_examples, read) == (N, N, [])
    assert log.example_ids[60:70].tolist() == ids[60:70].tolist()
    assert read == [(60, 70)]
    mask = np.arange(N) % 7 == 0
    for key in (slice(None), slice(99, 101), [3, 200, 3], np.array([], int), mask, slice(9, 2)):
        assert np.array_equal(log.example_ids[key], ids[key])
    assert log.example_ids[-1] == ids[-1]
    assert np.array_equal(log.example_ids[[-1, 0, -N]], ids[[-1, 0, -N]])
    for outside in (N, -N - 1, [0, N], mask[:-1]):
        with pytest.raises(IndexError, match=f"{N}"):
            log.example_ids[outside]
    assert np.array_equal(np.asarray(log.example_ids), ids)
    assert log.reference_positions.tolist() == [0, 1, 2]
    copied = pickle.loads(pickle.dumps(log.example_ids))
    assert np.array_equal(copied[40:60], ids[40:60])


def test_epsilons_have_stored_ids(stored_ids):
    run_dir, ids = stored_ids
    table = account(NormLog.open(run_dir), delta=DELTA)
    assert isinstance(table.example_ids, np.ndarray)
    assert np.array_equal(table.example_ids, ids)
    some = NormLog.open(run_dir).take([199, 7, 60])
    assert np.array_equal(some.example_ids, ids[[199, 7, 60]])


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_stored_ids_that_are_not_the_journals_are_refused(stored_ids, damage):
    path = stored_ids[0] / "ids.parquet"
    if damage == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(EvidenceError, match=f"ids.parquet (was changed|is {damage})"):
        NormLog.open(stored_ids[0])
