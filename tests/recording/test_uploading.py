"""Runs that are recorded on a disk and sent to object storage: in memory, and on an S3 server."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from indpriv import EvidenceError, InputError, NormLog, RoundRecorder, account, upload
from indpriv._files import JournalWriter, read_journal
from indpriv._storage import RemotePath, StorageError, location
from indpriv.analysis import fidelity
from indpriv.audit import audit
from indpriv.errors import PrivacyWarning
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder
from object_storage import s3_server
from processes import running
from runs import PER_EXAMPLE, blobs, failed, make_run, record
from synthetic import small_run, write_run

DELTA = 1e-5


def sent_to(address):
    return {"upload_to": address, "bucket_is_private": True}


def names_below(folder):
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in files if not path.name.startswith("."))


def test_a_bucket_that_nobody_said_is_private_is_refused(bucket, tmp_path):
    run, where = make_run(), {"upload_to": bucket("run")}
    with pytest.raises(InputError, match="bucket_is_private"):
        Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, **where)
    with pytest.raises(InputError, match="bucket_is_private"):
        RoundRecorder(tmp_path / "run", ["a", "b"], sampler="poisson", **where)
    with pytest.raises(InputError, match="is no address of object storage"):
        RoundRecorder(tmp_path / "run", ["a"], sampler="poisson", **sent_to("runs/adult"))
    write_run(tmp_path / "whole", *small_run(n=20, steps=2))
    with pytest.raises(InputError, match="bucket_is_private"):
        upload(tmp_path / "whole", bucket("run"))
    assert not location(bucket("run")).exists()


def test_nothing_is_recorded_straight_into_a_bucket(bucket, tmp_path):
    run = make_run()
    with pytest.raises(InputError, match=r"a run is written on a disk.*with upload_to"):
        Recorder(bucket("run"), dataset=run.dataset, loss_fn=PER_EXAMPLE)
    with pytest.raises(InputError, match="a run is written on a disk"):
        RoundRecorder(bucket("run"), ["a", "b"], sampler="poisson")
    write_run(tmp_path / "run", *small_run(n=20, steps=2))
    with pytest.raises(InputError, match="an audit is written on a disk"):
        audit(tmp_path / "run", bucket("audit"), delta=DELTA)


def test_the_files_of_the_disk_lie_there_once_the_run_is_closed(bucket, tmp_path):
    options = {"batch_norms": True, "test_set": blobs(40), "record_holdout": True}
    there, here = location(bucket("run")), tmp_path / "run"
    record(make_run(), here, **options, **sent_to(bucket("run")))
    assert list(there.files_below()) == names_below(here)
    for name in names_below(here):
        assert (there / name).read_bytes() == (here / name).read_bytes(), name
    logs = [NormLog.open(where) for where in (there, here)]
    assert (logs[0].read() == logs[1].read()).all()
    assert failed(there) == failed(here)
    tables = [account(log, delta=DELTA) for log in logs]
    assert (tables[0].epsilon == tables[1].epsilon).all()


def test_a_run_that_was_interrupted_is_sent_as_far_as_it_got_and_goes_on(bucket, tmp_path):
    run, where = make_run(), {"run_dir": tmp_path / "run", **sent_to(bucket("run"))}
    options = {"dataset": run.dataset, "loss_fn": PER_EXAMPLE, "every": 3}
    recorder = Recorder(**where, **options)

    def interrupted():
        with recorder.attach(run.model, run.optimizer, run.loader):
            for number, batch in enumerate(run.loader):
                if number == 7:
                    raise KeyboardInterrupt
                run.step(*batch)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    there = open_run(location(bucket("run")))
    assert there.log.total_steps == 7
    assert not there.closed
    record(make_run(), **where, epochs=1, every=None, resume_at=7)
    there = open_run(location(bucket("run")))
    assert there.log.total_steps == 17
    assert there.closed
    assert failed(location(bucket("run"))) == failed(tmp_path / "run")


def test_rounds_of_clients_and_their_audit(bucket, tmp_path, monkeypatch):
    for name in ("COARSER", "RULES", "FIDELITY_EPOCHS"):
        monkeypatch.setattr(fidelity, name, ())
    clients, options = ["a", "b", "c"], {"sampler": "fixed_size", **sent_to(bucket("run"))}
    with RoundRecorder(tmp_path / "run", clients, **options) as recorder:
        recorder.round(["c", "a"], [0.3, 1.7], noise_multiplier=1.0, max_grad_norm=0.5)
        assert not location(bucket("run")).exists()
        recorder.round(["b", "a"], [0.3, 1.7], noise_multiplier=1.0, max_grad_norm=0.5)
    with RoundRecorder(tmp_path / "run", clients, resume_at=1, **options) as recorder:
        recorder.round(["b", "c"], [0.3, 1.7], noise_multiplier=1.0, max_grad_norm=0.5)
    assert NormLog.open(bucket("run")).total_steps == 2
    target = bucket("audits/run")
    audit(bucket("run"), tmp_path / "audit", delta=1e-4, **sent_to(target))
    assert list(location(target).files_below()) == names_below(tmp_path / "audit")


@pytest.fixture
def whole(tmp_path):
    return write_run(tmp_path / "whole", *small_run(n=60, steps=4))


def test_the_journal_goes_last_and_files_that_are_there_are_left_out(bucket, whole, monkeypatch):
    plain, sent = RemotePath.put, []

    def fails_at(number):
        def put(self, file):
            if len(sent) == number:
                raise StorageError(f"{self}: cannot write: the server does not answer")
            sent.append(file.name)
            plain(self, file)

        monkeypatch.setattr(RemotePath, "put", put)

    fails_at(3)
    with pytest.raises(StorageError, match="does not answer"):
        upload(whole, **sent_to(bucket("run")))
    with pytest.raises(EvidenceError, match=r"holds no journal\.jsonl"):
        NormLog.open(bucket("run"))
    fails_at(-1)
    upload(whole, **sent_to(bucket("run")))
    assert sorted(sent) == sorted(name.rpartition("/")[2] for name in names_below(whole))
    assert sent[-1] == "journal.jsonl"
    assert (NormLog.open(bucket("run")).read() == NormLog.open(whole).read()).all()
    sent.clear()
    os.utime(whole / "ids.parquet", (time.time() + 100,) * 2)  # as if it was written again
    upload(whole, **sent_to(bucket("run")))
    assert sent == ["ids.parquet", "journal.jsonl"]


def test_what_is_no_run_or_of_another_run_is_not_sent(bucket, whole, tmp_path):
    upload(whole, **sent_to(bucket("run")))
    other = write_run(tmp_path / "other", *small_run(n=61, steps=4))
    with pytest.raises(InputError, match="holds another run or audit; choose another address"):
        upload(other, **sent_to(bucket("run")))
    (tmp_path / "audit").mkdir()
    with pytest.raises(InputError, match="neither a run directory nor an audit directory"):
        upload(tmp_path / "audit", **sent_to(bucket("audit")))
    (tmp_path / "audit" / "audit.json").write_text("{}")
    with pytest.raises(InputError, match="holds another run or audit"):
        upload(tmp_path / "audit", **sent_to(bucket("run")))
    with (
        JournalWriter(other),
        pytest.raises(InputError, match=rf"still being written, by process {os.getpid()}; wait"),
    ):
        upload(other, **sent_to(bucket("other")))
    (tmp_path / "secret").write_text("of the auditor")
    (other / "records" / "x.parquet").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"x\.parquet is a link"):
        upload(other, **sent_to(bucket("other")))
    assert not (location(bucket("other")) / "records" / "x.parquet").exists()


def test_a_bucket_that_cannot_be_written_costs_no_run(bucket, tmp_path, monkeypatch):
    def refuse(self, file):
        raise StorageError(f"{self}: cannot write: the server does not answer")

    monkeypatch.setattr(RemotePath, "put", refuse)
    where, remedy = sent_to(bucket("run")), r"does not answer\. .*indpriv\.upload\("
    with pytest.warns(PrivacyWarning, match=remedy):  # a script goes on, and saves its model
        record(make_run(), tmp_path / "stops", **where)
    run = make_run()
    with pytest.warns(PrivacyWarning, match=remedy):
        record(run, tmp_path / "goes-on", on_write_error="continue", **where)
    assert run.engine.accountant.history == [(1.0, 0.1, 20)]

    def fails():
        with RoundRecorder(tmp_path / "rounds", ["a"], sampler="poisson", **where):
            raise ZeroDivisionError

    with pytest.warns(PrivacyWarning, match=remedy), pytest.raises(ZeroDivisionError):
        fails()
    monkeypatch.undo()
    for name in ("stops", "goes-on"):
        found = {check.key: check.status for check in verify(open_run(tmp_path / name))}
        assert found["journal"] == "passed"


def test_a_server_that_comes_back_is_asked_again(bucket, quick):
    path, answers = location(bucket("file")), [1, 2]

    def call(_system, _key):
        if answers:
            raise OSError(f"AWS Error NETWORK_CONNECTION, answer {answers.pop()}")
        return "read"

    assert path._asked("read", call) == "read"
    answers += [1, 2, 3]
    with pytest.raises(StorageError, match="the server does not answer"):
        path._asked("read", call)
    answers[:] = []

    def refused(_system, _key):
        answers.append(1)
        raise OSError("AWS Error ACCESS_DENIED")

    with pytest.raises(StorageError, match="no right to do so in bucket bucket"):
        path._asked("read", refused)
    assert len(answers) == 1


@pytest.fixture
def quick(monkeypatch):
    """No pause before a server that did not answer is asked again."""
    monkeypatch.setattr("indpriv._storage._PAUSES", (0.0, 0.0))


@pytest.mark.usefixtures("owner", "hears_ctrl_c")
def test_ctrl_c_while_sending_leaves_whole_files(server, whole):
    address = server.address("runs/ctrl-c")
    for seed in range(12):
        timer = threading.Timer(
            random.Random(seed).uniform(0.0, 0.05), os.kill, (os.getpid(), signal.SIGINT)
        )
        with suppress(KeyboardInterrupt):
            timer.start()
            upload(whole, **sent_to(address))
        timer.join()
        there = location(address)
        for name in there.files_below():
            assert (there / name).read_bytes() == (whole / name).read_bytes(), name
    upload(whole, **sent_to(address))
    assert len(read_journal(location(address))[0]) == len(read_journal(whole)[0])


KILLED = """
import sys
from indpriv import upload
print("begins", flush=True)
upload(sys.argv[1], sys.argv[2], bucket_is_private=True)
"""


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("seed", range(3))
def test_what_a_kill_leaves_is_no_run_or_a_whole_one(server, whole, seed):
    address = server.address(f"runs/killed-{seed}")
    command = [sys.executable, "-c", KILLED, str(whole), address]
    with running(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.3))
        process.kill()
    try:
        assert (NormLog.open(address).read() == NormLog.open(whole).read()).all()
    except EvidenceError as error:
        assert "holds no journal.jsonl" in str(error)
    upload(whole, address, bucket_is_private=True)
    assert (NormLog.open(address).read() == NormLog.open(whole).read()).all()


@pytest.mark.usefixtures("owner")
def test_training_outlives_the_server(quick, tmp_path):
    pytest.importorskip("flask_cors", reason="needs an S3 server: pip install moto[server]")
    with s3_server() as mortal:
        mortal.client().create_bucket(Bucket="runs")
        run, options = make_run(), {"loss_fn": PER_EXAMPLE, "on_write_error": "continue"}
        where = sent_to(mortal.address("runs/run"))
        recorder = Recorder(tmp_path / "run", dataset=run.dataset, every=3, **options, **where)

        def trains():
            with recorder.attach(run.model, run.optimizer, run.loader):
                run.train(1)
                mortal.process.kill()
                mortal.process.wait()
                run.train(1)

        with pytest.warns(PrivacyWarning, match=r"server does not answer.*indpriv\.upload"):
            trains()
    assert run.engine.accountant.history == [(1.0, 0.1, 20)]
    assert np.isfinite(next(run.model.parameters()).detach().numpy()).all()
    assert NormLog.open(tmp_path / "run").total_steps == 20
