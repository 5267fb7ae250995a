"""Batch norms of many examples, which are divided by examples when a log is closed."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batch_norm_runs import STEPS, N, as_dict, draws, expected, make_many, write, writer_of
from indpriv import EvidenceError, NormLog
from indpriv._journal import JournalWriter
from indpriv.norm_log.batch_norms import FileBatchNorms
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import NormLogWriter


@pytest.fixture
def many(monkeypatch):
    make_many(monkeypatch)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("rounding", [0.01, 0])
def test_many_examples_share_files_by_position_once_the_log_is_closed(
    rounding, tmp_path, monkeypatch
):
    batches = draws()
    write(tmp_path, batches, rounding=rounding)
    free, read = NormLog.open(tmp_path).batch_norms, []
    per_file = free.parts[0].examples[1]
    assert 1 < per_file < N // 2
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert names[0] == "000000000000.parquet"
    assert [name[:7] for name in names[1:]] == ["divided"] * (-(-N // per_file))
    assert free.steps.tolist() == list(range(STEPS))
    assert as_dict(free.read(0, N)) == expected(batches, encode=bool(rounding))
    plain = FileBatchNorms._read

    def noted(self, part, start, stop):
        read.append(part.examples)
        return plain(self, part, start, stop)

    monkeypatch.setattr(FileBatchNorms, "_read", noted)
    some = as_dict(free.read(per_file, 2 * per_file), per_file)
    assert some == {
        key: norm
        for key, norm in expected(batches, encode=bool(rounding)).items()
        if per_file <= key[0] < 2 * per_file
    }
    assert read == [(per_file, 2 * per_file)]
    assert not [check for check in verify(open_run(tmp_path)) if check.status == "failed"]


@pytest.mark.usefixtures("many")
def test_a_divided_log_goes_on_and_is_divided_again(tmp_path):
    write(tmp_path, draws())
    other = draws(seed=1, steps=40)
    write(tmp_path, other, resume_at=17)
    free = NormLog.open(tmp_path).batch_norms
    assert free.steps.tolist() == list(range(40))
    assert as_dict(free.read(0, N)) == expected([*draws()[:17], *other[17:]])
    first = {part.file.path.name for part in free.parts}
    there = {path.name for path in (tmp_path / "records").iterdir()}
    assert there - {"000000000000.parquet"} == first


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("moment", [0, 2, "divided", "close"])
def test_a_crash_while_dividing_loses_nothing(moment, tmp_path, monkeypatch):
    class Crash(BaseException):
        pass

    written, plain, append = [], NormLogWriter._write, JournalWriter.append

    def crash_at_file(self, name, content):
        if name.startswith("divided"):
            written.append(name)
            if len(written) - 1 == moment:
                raise Crash
        return plain(self, name, content)

    def crash_at_line(self, kind, **values):
        if kind == moment:
            raise Crash
        append(self, kind, **values)

    monkeypatch.setattr(NormLogWriter, "_write", crash_at_file)
    monkeypatch.setattr(JournalWriter, "append", crash_at_line)
    with pytest.raises(Crash):
        write(tmp_path, draws())
    monkeypatch.setattr(NormLogWriter, "_write", plain)
    monkeypatch.setattr(JournalWriter, "append", append)
    opened = open_run(tmp_path)
    assert not opened.state.closed
    assert not opened.faults
    assert as_dict(opened.log.batch_norms.read(0, N)) == expected(draws())
    write(tmp_path, draws(), resume_at=20)
    assert as_dict(NormLog.open(tmp_path).batch_norms.read(0, N)) == expected(draws())


@pytest.mark.usefixtures("many")
def test_steps_without_batch_norms_stay_missing(tmp_path):
    batches = draws()
    batches[3] = batches[22] = None
    write(tmp_path, batches)
    assert np.setdiff1d(np.arange(STEPS), NormLog.open(tmp_path).batch_norms.steps).tolist() == [
        3,
        22,
    ]


@pytest.mark.usefixtures("many")
def test_a_changed_divided_file_is_named(tmp_path):
    write(tmp_path, draws())
    path = sorted((tmp_path / "records").glob("divided-*"))[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))
    with pytest.raises(EvidenceError, match=rf"{path.name} was changed"):
        NormLog.open(tmp_path).batch_norms.read(0, N)
    assert NormLog.open(tmp_path, unreadable="worst_case").batch_norms is None


@pytest.mark.usefixtures("many")
def test_a_changed_file_of_training_is_not_divided(tmp_path):
    write(tmp_path, draws(), close=False)
    path = tmp_path / "records" / "free-000000000010.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    write(tmp_path, draws(), resume_at=20)
    with pytest.raises(EvidenceError, match=path.name):
        NormLog.open(tmp_path)


# Kills. A process forks others: each begins to close a log of its own, and is killed.
KILLED = """
import os, random, shutil, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import pytest
from batch_norm_runs import STEPS, finish, make_many, writer_of

make_many(pytest.MonkeyPatch())
started, runs = Path({started!r}), Path({runs!r})

def close(run_dir, last, began):
    '''Close a log; before file operation number `last`, die by kill -9.'''
    operations = 0

    def count(event, arguments):
        nonlocal operations
        if event in ("open", "os.rename", "os.remove"):
            operations += 1
            if operations == last:
                os.kill(os.getpid(), signal.SIGKILL)

    writer = writer_of(run_dir)
    os.write(began, b"!")
    sys.addaudithook(count)
    finish(writer, STEPS)
    os._exit(0)

def killed(name, last=None, after=None):
    '''Whether a process that closes a copy of the log was killed, and how long it lived.'''
    shutil.copytree(started, runs / name)
    ready, began = os.pipe()
    process = os.fork()
    if not process:
        close(runs / name, last, began)
    os.read(ready, 1)
    start = time.monotonic()
    if after is not None:
        time.sleep(after)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0, time.monotonic() - start

"""
AT_EVERY_OPERATION = (
    KILLED
    + """
last = 1
while killed(f"{{last:03d}}", last=last)[0]:
    last += 1
"""
)
AT_RANDOM = (
    KILLED
    + """
alive, lives = killed("whole")
assert not alive
for number in range(100):
    killed(f"{{number:03d}}", after=random.Random(number).uniform(0, 1.2 * lives))
"""
)


def killed_logs(tmp_path, code):
    """Directories of logs, each of whose processes was killed while it closed the log."""
    started, runs = tmp_path / "started", tmp_path / "runs"
    write(started, draws(), flush=5, close=False)
    tests = str(Path(__file__).parents[1])
    code = code.format(tests=tests, started=str(started), runs=str(runs))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    return sorted(runs.iterdir())


def used(opened):
    return {file["file"] for file in opened.state.files}


def there(run_dir):
    return {path.name for path in (run_dir / "records").iterdir()}


def check_killed(run_dir, resumed_at):
    """What a killed process left is read, resumed and closed; whether files were left over."""
    opened = open_run(run_dir)
    assert not opened.faults
    assert as_dict(opened.log.batch_norms.read(0, N)) == expected(draws())
    left_over = there(run_dir) - used(opened)
    write(run_dir, draws(), flush=5, resume_at=resumed_at)
    opened = open_run(run_dir)
    assert opened.state.closed
    assert as_dict(opened.log.batch_norms.read(0, N)) == expected(draws())
    assert there(run_dir) == used(opened)
    failed = {check.key for check in verify(opened) if check.status == "failed"}
    assert failed == (set() if resumed_at == STEPS else {"no_voided_steps"})
    return {name.partition("-")[0] for name in left_over}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
@pytest.mark.usefixtures("many")
def test_a_kill_before_any_file_operation_of_dividing_loses_and_leaves_nothing(tmp_path):
    """By kill -9, before each of its files is opened, renamed or removed."""
    logs = killed_logs(tmp_path, AT_EVERY_OPERATION)
    left_over = [check_killed(run_dir, STEPS) for run_dir in logs]
    assert len(left_over) > 20
    assert {"divided"} in left_over  # before the line of the journal
    assert {"free"} in left_over  # after it


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
@pytest.mark.usefixtures("many")
def test_a_hundred_kills_while_dividing_lose_and_leave_nothing(tmp_path):
    for number, run_dir in enumerate(killed_logs(tmp_path, AT_RANDOM)):
        check_killed(run_dir, random.Random(number).choice([10, 15, 25, STEPS]))


@pytest.mark.usefixtures("many")
def test_only_records_that_no_line_counts_on_are_removed(tmp_path):
    write(tmp_path, draws())
    write(tmp_path, draws(), resume_at=10, flush=5, close=False)
    write(tmp_path, draws()[:20], resume_at=15, flush=5, close=False)  # voids two files
    before, records = there(tmp_path), tmp_path / "records"
    for name in ("free-000000000000", "divided-000000000099-00000", "000000000007", "mine-1"):
        (records / f"{name}.parquet").write_bytes(b"left by a crash")
    (records / "notes.txt").write_text("mine")
    writer_of(tmp_path).close()
    assert "free-000000000025.parquet" in before  # a line names it that was declared void
    assert there(tmp_path) == before | {"mine-1.parquet", "notes.txt"}
    assert as_dict(NormLog.open(tmp_path).batch_norms.read(0, N)) == expected(draws()[:20])


@pytest.mark.usefixtures("many")
def test_another_run_removes_nothing(tmp_path):
    write(tmp_path, draws(), close=False)
    left = tmp_path / "records" / "000000000007.parquet"
    left.write_bytes(b"left by a crash")
    with pytest.raises(EvidenceError, match="record another run in another directory"):
        writer_of(tmp_path, rounding=0.02)
    assert left.is_file()
