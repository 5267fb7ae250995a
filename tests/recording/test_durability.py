"""Recording on a machine that fails: kills at random moments, full disks, checkpoints."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from indpriv import InputError, NormLog
from indpriv import _files as journal_module
from indpriv._files import JournalWriter, read_journal
from indpriv.errors import PrivacyWarning
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import NormLogWriter
from indpriv.recording import Recorder
from processes import running
from runs import PER_EXAMPLE, blobs, make_run, record

WRITE_WHILE_TESTED = """
import os, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, {tests!r})
import synthetic
from indpriv.norm_log.writer import LogHeader, NormLogWriter

N = 200
header = LogHeader(0.01, "up", "example", "add_remove", "poisson", False, {{}})
writer = NormLogWriter(Path({run_dir!r}), header, np.arange(N), None, np.zeros(0, dtype=np.int64))
batch = np.arange(0, N, 7)
tester = os.getppid()
for step in range(100_000):
    norms = (np.arange(N) + step) % 97 / 50
    writer.record(step, norms, max_grad_norm=1.0, targets_fingerprint="same", seconds=0.0)
    os.write(1, b"record %d\\n" % step)
    writer.free(step, [(batch, norms[batch])], np.ones(1))
    os.write(1, b"free %d\\n" % step)
    counts = synthetic.session_counts(step + 1, N, 0.1)
    writer.steps(step, 1, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, counts=counts)
    os.write(1, b"steps %d\\n" % step)
    if os.getppid() != tester:
        break
"""


def kill_at_a_random_moment(run_dir, seed):
    """Write a log in another process and kill it.

    Returns the last step of each kind of line that it acknowledged.
    """
    code = WRITE_WHILE_TESTED.format(tests=str(Path(__file__).parents[1]), run_dir=str(run_dir))
    with running([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        first = process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.15))
        process.kill()
        lines = (first + process.stdout.read()).decode().split("\n")
    acknowledged = {"record": -1, "free": -1, "steps": -1}
    for line in lines[:-1]:
        kind, step = line.split()
        acknowledged[kind] = int(step)
    return acknowledged


def check_what_is_left(run_dir, acknowledged):
    state = read_state(run_dir)
    assert len(state.lines["record"]) - 1 >= acknowledged["record"]
    assert len(state.lines["free"]) - 1 >= acknowledged["free"]
    assert state.total_steps - 1 >= acknowledged["steps"]
    if state.total_steps == 0:
        return
    log = NormLog.open(run_dir)
    steps = np.arange(log.total_steps)
    norms = (np.arange(200) + steps[:, None]) % 97 / 50
    assert log.recorded_steps.tolist() == steps.tolist()
    assert np.array_equal(log.read(), log.levels.encode(norms, 1.0))
    entries = log.batch_norms.read(0, 200)
    assert len(entries) == log.total_steps * len(range(0, 200, 7))
    assert np.array_equal(
        entries.norm, log.levels.encode(norms[entries.step, entries.position], 1.0)
    )
    assert any("not closed" in caveat for caveat in log.caveats)


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_a_random_moment_loses_nothing_that_was_acknowledged(seed, tmp_path):
    check_what_is_left(tmp_path, kill_at_a_random_moment(tmp_path, seed))


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path):
    for seed in range(100, 200):
        run_dir = tmp_path / str(seed)
        run_dir.mkdir()
        check_what_is_left(run_dir, kill_at_a_random_moment(run_dir, seed))


def test_a_killed_log_is_continued(tmp_path):
    kill_at_a_random_moment(tmp_path, 0)
    steps = read_state(tmp_path).total_steps
    with JournalWriter(tmp_path) as writer:
        writer.append("truncate", step=steps)
    assert read_state(tmp_path).total_steps == steps


# Full disks.


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("moment", ["record", "steps", "free"])
def test_a_full_disk_stops_training_and_keeps_what_was_logged(moment, tmp_path, monkeypatch):
    fail_from(monkeypatch, moment, step=6)
    with pytest.raises(OSError, match="No space left"):
        record(make_run(), tmp_path / "run", batch_norms=True)
    monkeypatch.undo()
    assert NormLog.open(tmp_path / "run").total_steps == 6
    assert any("not closed" in caveat for caveat in NormLog.open(tmp_path / "run").caveats)


@pytest.mark.parametrize("moment", ["record", "steps", "free"])
def test_training_goes_on_with_a_full_disk_where_that_was_chosen(moment, tmp_path, monkeypatch):
    fail_from(monkeypatch, moment, step=6)
    run = make_run()
    with pytest.warns(PrivacyWarning, match="No space left on device.*training goes on"):
        record(
            run,
            tmp_path / "run",
            batch_norms=True,
            individual_clipping=True,
            on_write_error="continue",
        )
    assert run.engine.accountant.history == [(1.0, 0.1, 20)]
    monkeypatch.undo()
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == 6
    assert any("not closed" in caveat for caveat in log.caveats)
    assert "log closed" in {
        check.title for check in verify(open_run(tmp_path / "run")) if check.status == "failed"
    }


def fail_from(monkeypatch, moment, step):
    plain = getattr(NormLogWriter, moment)

    def full(self, first, *arguments, **options):
        if first >= step:
            no_space()
        plain(self, first, *arguments, **options)

    monkeypatch.setattr(NormLogWriter, moment, full)


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_line_that_did_not_fit_leaves_no_torn_line_behind(fails, tmp_path, monkeypatch):
    with JournalWriter(tmp_path) as writer:
        writer.append("header", number=1)
        plain = os.write
        if fails == "write":
            monkeypatch.setattr(
                journal_module.os, "write", lambda target, data: plain(target, data[:9])
            )
        else:
            monkeypatch.setattr(journal_module.os, "fsync", no_space)
        with pytest.raises(OSError, match=r"bytes were written|No space left"):
            writer.append("lost", number=2)
        monkeypatch.undo()
        writer.append("next", number=3)
    entries, torn = read_journal(tmp_path)
    assert [entry["kind"] for entry in entries] == ["header", "next"]
    assert not torn


def test_steps_that_were_logged_before_a_failure_are_not_logged_twice(tmp_path, monkeypatch):
    """Changing settings make several lines of one flush; at the end the disk has room again."""
    run = make_run()
    plain, calls = NormLogWriter.steps, []

    def full_once(self, first, *arguments, **options):
        calls.append(first)
        if len(calls) == 3:
            no_space()
        plain(self, first, *arguments, **options)

    monkeypatch.setattr(NormLogWriter, "steps", full_once)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=5)
    with (
        pytest.raises(OSError, match="No space"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        for batch in run.loader:
            run.step(*batch)
            run.optimizer.noise_multiplier *= 1.1
    assert read_state(tmp_path / "run").total_steps == 5


def test_a_directory_that_cannot_be_written_is_said_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    run = make_run()
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'file'} is a file")):
        record(run, tmp_path / "file" / "run")
    assert run.engine.accountant.history == []


# Checkpoints.


def test_a_checkpoint_carries_the_recorders_state(tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=100)
    saved = None
    with (
        pytest.raises(KeyboardInterrupt),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        for number, batch in enumerate(run.loader):
            run.step(*batch)
            if number == 3:
                saved = recorder.state_dict()
                assert (
                    read_state(tmp_path / "run").total_steps == 4
                )  # a kill right now would not undo the checkpoint
            if number == 6:
                raise KeyboardInterrupt
    assert saved["step"] == 4
    record(run, tmp_path / "run", epochs=1, every=None, resume_at=saved)
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == 14
    assert any("3 steps were run and declared void" in caveat for caveat in log.caveats)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    states = []
    for name in ("one", "other"):
        run = make_run()
        recorder = Recorder(tmp_path / name, dataset=run.dataset, loss_fn=PER_EXAMPLE, every=100)
        with recorder.attach(run.model, run.optimizer, run.loader):
            run.train(1)
            states.append(recorder.state_dict())
    with pytest.raises(InputError, match="while another run was recorded"):
        record(make_run(), tmp_path / "one", every=None, resume_at=states[1])
    with pytest.raises(InputError, match=r"pass a step, or what Recorder.state_dict\(\) returned"):
        record(make_run(), tmp_path / "one", every=None, resume_at={"step": 3})
    with pytest.raises(InputError, match="is not attached"):
        Recorder(tmp_path / "new", dataset=run.dataset, loss_fn=PER_EXAMPLE).state_dict()


def test_lines_of_steps_are_written_once_where_the_log_of_the_test_set_fails(tmp_path, monkeypatch):
    plain, failures = NormLogWriter.steps, [1]

    def fails_once(self, first, *arguments, **options):
        if self.run_dir.name == "holdout" and failures:
            failures.pop()
            raise OSError("no answer")
        plain(self, first, *arguments, **options)

    monkeypatch.setattr(NormLogWriter, "steps", fails_once)
    with pytest.raises(OSError, match="no answer"):
        record(make_run(), tmp_path / "run", test_set=blobs(40), record_holdout=True)
    steps = {read_state(tmp_path / folder).total_steps for folder in ("run", "run/holdout")}
    assert len(steps) == 1
    assert steps != {0}
