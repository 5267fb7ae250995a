"""Runs that are recorded straight into object storage: in memory, and on an S3 server."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch

from audits.training.checkpoints import list_checkpoints, load_checkpoint
from audits.training.dp_sgd import train
from command_lines import run as run_command
from indpriv import InputError, NormLog, RoundRecorder, account
from indpriv._journal import JournalWriter, read_journal
from indpriv._storage import RemotePath, StorageError, location, remote_lock, remote_path
from indpriv.analysis import variants
from indpriv.audit import audit, read_audit
from indpriv.errors import PrivacyWarning
from indpriv.norm_log import writer
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import NormLogWriter
from indpriv.recording import Recorder
from object_storage import s3_server
from processes import running
from runs import PER_EXAMPLE, blobs, failed, make_run, record
from tests.experiments.training.test_resuming import config, toy
from tests.recording.test_durability import WRITE_WHILE_TESTED, check_what_is_left

DELTA = 1e-5


@pytest.fixture
def quick(monkeypatch):
    """No pause before a server that did not answer is asked again."""
    monkeypatch.setattr(remote_path, "_PAUSES", (0.0, 0.0))


def test_a_bucket_that_nobody_said_is_private_is_refused(bucket):
    run = make_run()
    with pytest.raises(InputError, match="bucket_is_private"):
        Recorder(bucket("run"), dataset=run.dataset, loss_fn=PER_EXAMPLE)
    with pytest.raises(InputError, match="bucket_is_private"):
        RoundRecorder(bucket("run"), ["a", "b"], sampler="poisson")
    with pytest.raises(InputError, match="bucket_is_private"):
        train(config(), bucket("run"), dataset=toy())
    assert not location(bucket("run")).exists()


def test_the_same_files_as_on_a_disk(bucket, tmp_path):
    """Norms of a model that is never updated depend on nothing that is drawn."""
    options = {
        "batch_norms": True,
        "reference_examples": 0,
        "test_set": blobs(40),
        "record_holdout": True,
    }
    for run_dir in (tmp_path / "run", bucket("run")):
        run = make_run(learning_rate=0.0)
        record(run, run_dir, bucket_is_private=True, **options)
    there, here = location(bucket("run")), tmp_path / "run"
    names = sorted(path.relative_to(here).as_posix() for path in here.rglob("*"))
    names = [name for name in names if (here / name).is_file() and "/." not in f"/{name}"]
    found = sorted("/".join(path.parts[len(there.parts) :]) for path in there.rglob("*"))
    assert found == names
    drawn = {"journal.jsonl", "run.json"}
    for name in names:
        if not ({name.rpartition("/")[2]} & drawn or "free-" in name):
            assert (there / name).read_bytes() == (here / name).read_bytes(), name
    logs = [NormLog.open(where) for where in (there, here)]
    assert (logs[0].read() == logs[1].read()).all()
    assert failed(there) == failed(here)
    tables = [account(log, delta=DELTA) for log in logs]
    assert (tables[0].epsilon == tables[1].epsilon).all()


def test_it_goes_on_and_is_not_overwritten(bucket):
    where = {"run_dir": bucket("run"), "bucket_is_private": True}
    record(make_run(), **where, epochs=1)
    with pytest.raises(InputError, match="already holds a recorded run"):
        record(make_run(), **where)
    log = record(make_run(), **where, epochs=1, every=None, resume_at=7)
    assert log.total_steps == 17
    assert any("3 steps were run and declared void" in caveat for caveat in log.caveats)


def test_batch_norms_of_many_examples_are_there(bucket, monkeypatch):
    monkeypatch.setattr(writer, "LARGEST_FILE", 50)
    monkeypatch.setattr(writer, "PART_SIZE", 30)
    for module in ("records", "reader"):
        for name, value in (("LARGEST_FILE", 50), ("PART_SIZE", 30)):
            monkeypatch.setattr(f"indpriv.norm_log.{module}.{name}", value, raising=False)
    log = record(make_run(), bucket("run"), batch_norms=True, bucket_is_private=True)
    state = read_state(location(bucket("run")))
    assert "parts" in state.records[0]
    assert len(log.batch_norms.read(0, 120)) == state.sessions[0].draws.participations
    found = {check.key: check.status for check in verify(open_run(location(bucket("run"))))}
    assert found["took_part"] == "passed"  # counted part by part


def test_rounds_of_clients(bucket):
    path, clients = bucket("run"), ["a", "b", "c"]
    options = {"sampler": "fixed_size", "bucket_is_private": True}
    with RoundRecorder(path, clients, **options) as recorder:
        recorder.round(["c", "a"], [0.3, 1.7], noise_multiplier=1.0, max_grad_norm=0.5)
        recorder.round(["b", "a"], [0.3, 1.7], noise_multiplier=1.0, max_grad_norm=0.5)
    with RoundRecorder(path, clients, resume_at=1, **options) as recorder:
        recorder.round(["b", "c"], [0.3, 1.7], noise_multiplier=1.0, max_grad_norm=0.5)
    assert NormLog.open(path).total_steps == 2


def test_a_run_of_train_is_stopped_resumed_and_audited(bucket, tmp_path, monkeypatch):
    for name in ("COARSER", "RULES", "FIDELITY_EPOCHS"):
        monkeypatch.setattr(variants, name, ())
    plan, there = config(), bucket("run")
    seeded = {"dataset": toy(), "seed": 3}
    whole = train(plan, tmp_path / "run", **seeded)

    def interrupt(stage, done, total):
        if (stage, done) == ("training", 7):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match=r"after 7 of .*; --resume goes on"):
        train(plan, there, bucket_is_private=True, progress=interrupt, **seeded)
    with pytest.raises(InputError, match="already holds a run that has not ended"):
        train(plan, there, bucket_is_private=True, **seeded)
    resumed = train(plan, there, bucket_is_private=True, resume=True, **seeded)
    for mine, other in zip(
        resumed.module.state_dict().values(), whole.module.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, other)
    assert str(resumed.run_dir) == there
    assert (NormLog.open(there).read() == NormLog.open(whole.run_dir).read()).all()
    saved = list_checkpoints(location(there))
    assert {load_checkpoint(path).step for path in saved} >= {0, 7, 12}
    target = bucket("audits/run")
    audit(there, target, delta=1e-4, bucket_is_private=True)
    audit(whole.run_dir, tmp_path / "audit", delta=1e-4)
    epsilons = [read_audit(folder)[0].epsilon for folder in (target, tmp_path / "audit")]
    assert (epsilons[0] == epsilons[1]).all()


def test_the_command_line(bucket, tmp_path, capsys):
    words = ["audits", "train", "audits/digits.toml", "--run-dir", bucket("digits")]
    assert run_command(words) == 2
    assert "bucket_is_private" in capsys.readouterr().err
    assert not location(bucket("digits")).exists()


# What fails.


def test_a_server_that_comes_back_is_asked_again(bucket, monkeypatch, quick):
    path, answers = location(bucket("file")), [1, 2]

    def call():
        if answers:
            raise OSError(f"AWS Error NETWORK_CONNECTION, answer {answers.pop()}")
        return "read"

    assert path._asked("read", call) == "read"
    answers += [1, 2, 3]
    with pytest.raises(StorageError, match="the server does not answer"):
        path._asked("read", call)
    answers[:] = []

    def refused():
        answers.append(1)
        raise OSError("AWS Error ACCESS_DENIED")

    with pytest.raises(StorageError, match="no right to do so in bucket bucket"):
        path._asked("read", refused)
    assert len(answers) == 1


def test_training_stops_or_goes_on_where_a_bucket_cannot_be_written(bucket, monkeypatch):
    plain, lines = RemotePath.write_bytes, []

    def sometimes(self, content):
        lines.append(self.name)
        if lines.count("journal.jsonl") > 6:
            raise StorageError(f"{self}: cannot write: the server does not answer")
        plain(self, content)

    monkeypatch.setattr(RemotePath, "write_bytes", sometimes)
    with pytest.raises(StorageError, match="the server does not answer"):
        record(make_run(), bucket("stops"), bucket_is_private=True)
    lines.clear()
    goes_on, run = {"on_write_error": "continue", "bucket_is_private": True}, make_run()
    with pytest.warns(PrivacyWarning, match="does not answer.*training goes on"):
        record(run, bucket("goes-on"), **goes_on)
    assert run.engine.accountant.history == [(1.0, 0.1, 20)]
    monkeypatch.undo()


def test_a_line_that_was_not_put_is_not_in_the_journal(bucket, monkeypatch):
    path = location(bucket("run"))
    with JournalWriter(path) as journal:
        journal.append("header", number=1)
        journal.append("waits", wait=False)
        assert [entry["kind"] for entry in read_journal(path)[0]] == ["header"]
        with monkeypatch.context() as patch:
            patch.setattr(RemotePath, "write_bytes", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                journal.append("lost")
        journal.append("next")
    entries, torn = read_journal(path)
    assert [entry["kind"] for entry in entries] == ["header", "waits", "next"]
    assert not torn


@contextmanager
def everything_is_old():
    """Whoever begins now forgets all other claims."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_lock, "_FORGOTTEN_AFTER", -1.0)
        yield


@pytest.mark.parametrize("renewed", [False, True])
def test_a_writer_that_was_forgotten_writes_no_more(renewed, bucket):
    """renewed: its claim is put again after it was removed, as by a thread that was asleep."""
    path = location(bucket("run"))
    with JournalWriter(path) as first:
        first.append("header")
        with pytest.raises(InputError, match=rf"is being written by process {os.getpid()} on"):
            JournalWriter(path)
        with everything_is_old():
            second = JournalWriter(path)
        second.append("taken over")
        if renewed:
            first._lock._lock._renew()
        for _ in range(2):
            with pytest.raises(InputError, match="may have been taken by another process"):
                first.append("lost")
            second.append("goes on")
        second.close()
    kinds = [entry["kind"] for entry in read_journal(path)[0]]
    assert kinds == ["header", "taken over", "goes on", "goes on"]
    assert [file.name for file in path.iterdir()] == ["journal.jsonl"]


def test_a_forgotten_recorder_replaces_no_file(bucket):
    """It fails with the record of its next step, and the run that went on keeps its own."""
    run, path = make_run(), bucket("run")
    recorder = Recorder(
        path, dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1, bucket_is_private=True
    )
    with (
        pytest.raises(InputError, match="may have been taken by another process"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        for number, batch in enumerate(run.loader):
            if number == 3:
                saved = recorder.state_dict()
                with everything_is_old():
                    resumed = {"resume_at": saved, "every": None, "bucket_is_private": True}
                    record(make_run(), path, epochs=1, **resumed)
            run.step(*batch)
    log = NormLog.open(path)
    assert log.total_steps == 13
    assert log.read().shape == (13, 120)  # with all hashes as they were written


def test_a_lock_that_nobody_holds_is_free(bucket):
    """As of a recorder that a notebook has dropped."""
    path = location(bucket("run"))
    journal = JournalWriter(path)
    journal.append("header")
    del journal
    gc.collect()
    with JournalWriter(path) as second:
        second.append("goes on")
    assert len(read_journal(path)[0]) == 2


def test_the_thread_that_renews_ends_before_the_claim(bucket, monkeypatch):
    monkeypatch.setattr(remote_lock, "_RENEWED_EVERY", 0.001)
    path = location(bucket("run"))
    for _ in range(20):
        with JournalWriter(path) as journal:
            journal.append("line")
            time.sleep(0.004)
        assert [file.name for file in path.iterdir()] == ["journal.jsonl"]


def test_an_error_at_the_beginning_leaves_no_claim(bucket, monkeypatch):
    path = location(bucket("run"))
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "times", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            JournalWriter(path)
    JournalWriter(path).close()


@pytest.mark.usefixtures("owner", "hears_ctrl_c")
def test_ctrl_c_in_a_put_leaves_a_whole_journal(server):
    path = location(server.address("runs/ctrl-c"))
    with JournalWriter(path) as journal:
        journal.append("header")
        for seed in range(25):
            delay = random.Random(seed).uniform(0.0, 0.02)
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            with suppress(KeyboardInterrupt):
                timer.start()
                while True:
                    journal.append("line", padding="x" * 1000)
            timer.join()
            entries, _ = read_journal(path)
            assert len(entries) - len(journal) in (0, 1)  # 1: the line that was interrupted


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


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("seed", range(3))
def test_a_kill_loses_nothing_that_was_acknowledged(server, seed, monkeypatch):
    address = server.address(f"runs/killed-{seed}")
    code = WRITE_WHILE_TESTED.format(
        tests=os.path.dirname(os.path.dirname(__file__)), run_dir=address
    ).replace("Path(", "location(")
    code = code.replace("from pathlib import Path", "from indpriv._storage import location")
    with running([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        first = process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.5))
        process.kill()
        told = (first + process.stdout.read()).decode().split("\n")[:-1]
    acknowledged = {"record": -1, "free": -1, "steps": -1}
    acknowledged.update({kind: int(step) for kind, step in map(str.split, told)})
    acknowledged["free"] = acknowledged["steps"]  # batch norms wait for the line of their steps
    path = location(address)
    check_what_is_left(path, acknowledged)
    with pytest.raises(InputError, match=r"is being written by process .* forgotten after 300 s"):
        JournalWriter(path)
    monkeypatch.setattr(remote_lock, "_FORGOTTEN_AFTER", -1.0)
    steps = read_state(path).total_steps
    with JournalWriter(path) as journal:
        journal.append("truncate", step=steps)
    assert read_state(path).total_steps == steps


@pytest.mark.usefixtures("owner")
def test_training_outlives_the_server(quick):
    pytest.importorskip("flask_cors", reason="needs an S3 server: pip install moto[server]")
    with s3_server() as mortal:
        mortal.client().create_bucket(Bucket="runs")
        address, run = mortal.address("runs/run"), make_run()
        recorder = Recorder(
            address,
            dataset=run.dataset,
            loss_fn=PER_EXAMPLE,
            every=3,
            on_write_error="continue",
            bucket_is_private=True,
        )
        with recorder.attach(run.model, run.optimizer, run.loader):
            run.train(1)
            mortal.process.kill()
            mortal.process.wait()
            with pytest.warns(PrivacyWarning, match="server does not answer.*training goes on"):
                run.train(1)
    assert run.engine.accountant.history == [(1.0, 0.1, 20)]
    assert np.isfinite(next(run.model.parameters()).detach().numpy()).all()
