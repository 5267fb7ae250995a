"""Policies, and runs that go on where they were stopped or killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import indpriv
from indpriv import EvidenceError, InputError, NormLog
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import NormLogWriter
from indpriv.recording import Recorder, RecordingPolicy
from processes import running, wait_for_records
from runs import PER_EXAMPLE, blobs, failed, make_run, record


def test_resuming_continues_the_log(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1)
    log = record(run, tmp_path / "run", epochs=1, resume_at=10)
    assert log.total_steps == 20
    assert log.recorded_steps.tolist() == [0, 3, 6, 9, 12, 15, 18]
    assert failed(tmp_path / "run") == set()
    voided = next(
        check for check in verify(open_run(tmp_path / "run")) if check.title == "no voided steps"
    )
    assert "a process that was killed may have run up to 256 more" in voided.detail


def test_resuming_from_an_earlier_checkpoint_voids_what_came_after(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1, reference_examples=3)
    log = record(run, tmp_path / "run", epochs=1, resume_at=6, reference_examples=3)
    assert log.total_steps == 16
    assert log.recorded_steps.tolist() == [0, 3, 6, 9, 12, 15]
    assert log.reference_examples().recorded_steps.tolist() == list(range(16))


def test_weights_after_a_voided_step_are_not_those_of_a_later_session(tmp_path):
    """The line of steps 0 to 9 was cut off at 4; that of the second session ends at step 14."""
    run, folder = make_run(), tmp_path / "run"
    record(run, folder, epochs=1, every="once")
    record(run, folder, epochs=1, every="once", resume_at=4)
    record(run, folder, epochs=1, every="once", resume_at=10)
    details = [one.detail for one in verify(open_run(folder))]
    assert any("does not know which weights it had after step 10" in one for one in details), (
        details
    )


def test_voided_steps_are_told(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1)
    log = record(run, tmp_path / "run", epochs=1, resume_at=4)
    assert any("6 steps were run and declared void" in caveat for caveat in log.caveats)


def test_each_session_of_a_resumed_run_counts(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1, batch_norms=True)
    log = record(
        make_run(), tmp_path / "run", epochs=1, resume_at=10, seeded=True, batch_norms=True
    )
    assert SEEDED in log.caveats
    other = make_run(poisson_sampling=False)
    shuffled = record(other, tmp_path / "run", epochs=1, resume_at=20, batch_norms=True)
    assert shuffled.sampler != "poisson"


def test_resuming_beyond_the_log_is_refused(tmp_path):
    record(make_run(), tmp_path / "run", epochs=1)
    with pytest.raises(InputError, match=r"resume_at=15, but the log.*proves only 10 steps"):
        record(make_run(), tmp_path / "run", resume_at=15)


def test_resuming_with_other_examples_is_refused(tmp_path):
    record(make_run(), tmp_path / "run", epochs=1)
    with pytest.raises(EvidenceError, match="n_examples"):
        record(make_run(blobs(60)), tmp_path / "run", resume_at=10)


def test_a_policy_is_recorded_and_told(tmp_path):
    policy = RecordingPolicy(every=2, growth=2.0, longest="epoch", reference_examples=3)
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, policy=policy)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(4)
    state = read_state(tmp_path / "run")
    assert state.policy == RecordingPolicy(every=2, growth=2.0, longest=10, reference_examples=3)
    assert [entry["step"] for entry in state.lines["record"]] == [0, 2, 6, 14, 24, 34]
    assert state.pass_seconds > 0
    assert state.training_seconds > 0
    coverage = next(
        check.detail for check in verify(open_run(tmp_path / "run")) if check.title == "coverage"
    )
    assert coverage.startswith(
        "6 of 40 steps have a record of all 120 examples (full passes after 2 steps, each gap 2 "
        "times the last, at most 10; 3 reference examples); "
    )
    assert re.search(r"[\d.]+ s of norm passes beside [\d.]+ s of training \(\d+ %\)", coverage)


@pytest.mark.parametrize("argument", [{"every": 3}, {"reference_examples": 0}])
def test_a_policy_and_what_it_says_itself_are_one_too_many(argument, tmp_path):
    with pytest.raises(InputError, match=f"both {next(iter(argument))}=. and a policy"):
        Recorder(
            tmp_path / "run",
            dataset=blobs(),
            loss_fn=PER_EXAMPLE,
            policy=RecordingPolicy("epoch"),
            **argument,
        )


def test_resuming_goes_on_with_the_logs_own_policy(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1, every=None, policy=RecordingPolicy(1, 3.0))
    log = record(run, tmp_path / "run", epochs=4, every=None, resume_at=10)
    assert log.recorded_steps.tolist() == [0, 1, 4, 13, 40]
    assert log.total_steps == 50


@pytest.mark.parametrize("stopped_at", [3, 10])
def test_a_late_first_pass_comes_when_the_policy_says_also_after_resuming(stopped_at, tmp_path):
    """A run that stopped before its first pass holds no record, and goes on to take it."""
    run = make_run()
    policy = RecordingPolicy("once", batch_norms=True, first=4)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, policy=policy)
    with recorder.attach(run.model, run.optimizer, run.loader):
        batches = iter(run.loader)
        for _ in range(stopped_at):
            run.step(*next(batches))
    before = NormLog.open(tmp_path / "run")
    assert before.recorded_steps.tolist() == [4][: stopped_at > 4]
    assert (
        indpriv.account(before, delta=1e-5).claim == "estimate"
    )  # batch norms alone prove nothing of the other steps
    assert indpriv.account(before, delta=1e-5, between_records="worst_case").claim == "exact"
    log = record(run, tmp_path / "run", epochs=1, every=None, resume_at=stopped_at)
    assert log.recorded_steps.tolist() == [4]
    assert log.batch_norms.steps.tolist() == list(range(stopped_at + 10))
    coverage = next(
        check.detail for check in verify(open_run(tmp_path / "run")) if check.title == "coverage"
    )
    assert "(one full pass before step 4; batch norms of sampled batches)" in coverage


def test_resuming_under_another_policy_is_refused(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1)
    with pytest.raises(EvidenceError, match="the log to continue has policy="):
        record(run, tmp_path / "run", epochs=1, every=4, resume_at=10)
    assert NormLog.open(tmp_path / "run").total_steps == 10


TRAIN_WHILE_TESTED = """
import os, sys, warnings; warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
from runs import *
from indpriv.recording import Recorder
run = make_run()
recorder = Recorder({run_dir!r}, dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
with recorder.attach(run.model, run.optimizer, run.loader):
    tester = os.getppid()
    while os.getppid() == tester:
        run.train(1)
"""


def interrupt(run_dir, number, after_records):
    tests = str(Path(__file__).parents[1])
    code = TRAIN_WHILE_TESTED.format(tests=tests, run_dir=str(run_dir))
    with running([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        wait_for_records(process, run_dir, after_records)
        os.kill(process.pid, number)
        process.wait(30)


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_was_acknowledged_survives_an_interruption(number, tmp_path):
    run_dir = tmp_path / "run"
    interrupt(run_dir, number, after_records=7)
    state = read_state(run_dir)
    assert len(state.lines["record"]) >= 6
    log = NormLog.open(run_dir)
    assert log.recorded_steps.tolist() == list(range(log.total_steps))
    assert any("not closed" in caveat for caveat in log.caveats)
    assert "log closed" in failed(run_dir)
    if number == signal.SIGINT:
        assert not list((run_dir / "records").glob(".*"))


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("moment", ["record", "steps"])
def test_an_interrupt_while_the_log_is_written_waits(moment, tmp_path, monkeypatch):
    """It arrives right after a line is on disk and before the writer knows."""
    run = make_run()
    original = getattr(NormLogWriter, moment)

    def interrupted(self, step, *arguments, **options):
        original(self, step, *arguments, **options)
        if step == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(NormLogWriter, moment, interrupted)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with pytest.raises(KeyboardInterrupt), recorder.attach(run.model, run.optimizer, run.loader):
        run.train()
    log = NormLog.open(tmp_path / "run")
    assert log.recorded_steps.tolist() == list(range(5)) == list(range(log.total_steps))


def test_a_killed_run_is_resumed(tmp_path):
    run_dir = tmp_path / "run"
    interrupt(run_dir, signal.SIGKILL, after_records=4)
    steps = read_state(run_dir).total_steps
    log = record(make_run(), run_dir, epochs=1, every=1, resume_at=steps)
    assert log.total_steps == steps + 10
    assert log.coverage == 1
    assert not list((run_dir / "records").glob(".*"))
