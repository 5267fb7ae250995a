"""Blocks of examples, on threads and on Ray: the same bits as on threads, whatever becomes of the workers."""

import errno
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import indpriv.accountant.blocks
from every_account import ACCOUNTS, QUICK
from indpriv import NormLog, account
from indpriv.accountant.account import account_parts, table_for
from indpriv.accountant.blocks import RayPool, in_blocks, n_cores, versions
from indpriv.accountant.method import Method
from indpriv.errors import EvidenceError, InputError
from synthetic import small_run, write_run

DELTA = 1e-6


def read_only(value, between=lambda: None):
    """A copy by pickle whose arrays lie in memory that cannot be written, as in Ray's object store.

    between: called before the copy is made.
    """
    buffers = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    between()
    return pickle.loads(content, buffers=[bytes(buffer.raw()) for buffer in buffers])


class PicklingPool:
    """What a pool of processes does to work, tasks and results, in this process."""

    n_tasks = 2

    def sent(self, work):
        work = read_only(work)
        return lambda *task: read_only(work(*read_only(task)))

    def in_order(self, work, tasks):
        begin = self.sent(work)
        for task in tasks:
            yield begin(*task)


class InProcess(PicklingPool):
    """The same without copies."""

    def sent(self, work):
        return work


def log_of(n=20_000, records=6, **options):
    rng = np.random.default_rng(0)
    norms = rng.uniform(0, 1.3, (records, n)).round(2)
    run = {"total_steps": 5 * records, "noise_multiplier": 1.2, "max_grad_norm": 1.0}
    options = run | {"sample_rate": 0.02, "rounding": 0.01} | options
    return NormLog.from_arrays(norms, 5 * np.arange(records), **options)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_pool_gives_the_same_bits(accountant):
    log = log_of(30 if accountant == "pld" else 20_000)
    method, told = Method(delta=DELTA, accountant=accountant), []
    table = table_for(
        log, method, workers=PicklingPool(), progress=lambda done, total: told.append((done, total))
    )
    assert np.array_equal(table.epsilon, account(log, delta=DELTA, accountant=accountant).epsilon)
    assert told[-1] == (log.n_examples, log.n_examples)


@pytest.mark.parametrize("kind", QUICK)
def test_every_account_has_the_same_bits_in_a_pool(kind):
    make, options = ACCOUNTS[kind]
    log = make()
    found = table_for(log, Method(delta=DELTA, **options), workers=PicklingPool())
    whole = account(log, delta=DELTA, **options)
    assert np.array_equal(found.epsilon, whole.epsilon)
    assert np.array_equal(found.epsilon_lower, whole.epsilon_lower)


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_blocks_are_the_same_wherever_they_run(size):
    log = log_of(100)

    def ids(block):
        return block.example_ids.tolist()

    local = list(in_blocks(log, ids, size=size, workers=1))

    assert list(in_blocks(log, ids, size=size, workers=InProcess())) == local
    assert [each for block in local for each in block] == log.example_ids.tolist()


def test_a_pool_reads_each_part_once(monkeypatch):
    log, read, plain = log_of(2000), [], NormLog.part

    def part(self, start, stop):
        if self.n_examples == log.n_examples:
            read.append((start, stop))
        return plain(self, start, stop)

    monkeypatch.setattr(NormLog, "part", part)
    monkeypatch.setattr(indpriv.accountant.blocks, "_READ_BYTES", 3000)  # 500 examples
    found = list(in_blocks(log, lambda block: block.n_examples, size=20, workers=InProcess()))
    assert found == [20] * 100
    assert read == [(start, start + 500) for start in range(0, 2000, 500)]


def test_a_ray_worker_uses_one_core(monkeypatch):
    monkeypatch.setattr(indpriv.accountant.blocks, "_IN_WORKER", threading.Event())
    monkeypatch.setattr(indpriv.accountant.blocks, "threadpool_limits", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda shared: n_cores))
    assert indpriv.accountant.blocks._run([None], versions()) == 1
    assert n_cores() == 1


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'indpriv\[ray\]'"):
        account(log_of(10), delta=DELTA, engine="ray")


def test_another_engine_is_refused():
    with pytest.raises(InputError, match="engine='dask'"):
        account(log_of(10), delta=DELTA, engine="dask")


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="the extra indpriv[ray] is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "options", "log"),
    [
        (20_000, {}, {}),
        (20_000, {}, {"rounding": 0}),
        (300, {"accountant": "pld"}, {}),
        (600, {}, {"unit": "user", "unit_ids": np.arange(600) // 3}),
    ],
    ids=["rdp", "unrounded", "pld", "people"],
)
def test_ray_gives_the_same_bits_whatever_the_workers(ray, n, options, log):
    log, threads = log_of(n, **log), []
    for workers in (1, 2):
        threads.append(account(log, delta=DELTA, workers=workers, **options))
        threads.append(account(log, delta=DELTA, engine="ray", workers=workers, **options))
    for table in threads[1:]:
        assert np.array_equal(table.epsilon, threads[0].epsilon)
        assert np.array_equal(table.epsilon_lower, threads[0].epsilon_lower)


@pytest.mark.slow
def test_workers_that_are_killed_change_no_bit(ray, tmp_path):
    log = log_of(700_000)  # three parts
    whole, over, killed = account(log, delta=DELTA), threading.Event(), []

    @ray.remote
    def pid():
        time.sleep(0.05)
        return os.getpid()

    def kill():
        random = np.random.default_rng(0)
        while not over.is_set() and len(killed) < 50:
            time.sleep(random.uniform(0.02, 0.2))
            victims = set(ray.get([pid.remote() for _ in range(2)]))
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while len(killed) < 50:
            folder = tmp_path / str(len(killed))
            parts = account_parts(log, Method(delta=DELTA), folder, {}, workers=RayPool.connect())
            assert np.array_equal(parts.table().epsilon, whole.epsilon)
            shutil.rmtree(folder)
    finally:
        over.set()
        killer.join()


@pytest.mark.slow
def test_a_changed_record_stops_the_account_and_names_it(ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", *small_run())
    log = NormLog.open("run")  # workers find it though the path is relative
    assert len(account(log, delta=DELTA, engine="ray")) == log.n_examples
    record = sorted((tmp_path / "run" / "records").glob("0*.parquet"))[0]
    record.unlink()
    with pytest.raises(EvidenceError, match=record.name):
        account(log, delta=DELTA, engine="ray")


def _no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_full_disk_of_a_worker_is_named(ray):
    with pytest.raises(InputError, match="the disk of a Ray node is full: free it, or"):
        list(RayPool.connect(1).in_order(_no_space, [()]))


@pytest.mark.slow
def test_other_versions_are_refused(ray, monkeypatch):
    monkeypatch.setattr(
        indpriv.accountant.blocks, "versions", lambda: {"Python": "3.99", "numpy": "1.0"}
    )
    with pytest.raises(InputError, match=r"a Ray worker has .*, and this process .*install the"):
        account(log_of(100), delta=DELTA, engine="ray")


def test_a_disk_to_which_ray_spills_is_named():
    class OutOfDiskError(Exception):
        pass

    def get(_):
        raise OutOfDiskError

    exceptions = SimpleNamespace(OutOfDiskError=OutOfDiskError, RayTaskError=KeyError)
    with pytest.raises(InputError, match="the disk of a Ray node is full: free it, or"):
        RayPool(SimpleNamespace(get=get, exceptions=exceptions), 1)._result(None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_named(monkeypatch, address):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match=f"no Ray cluster answers at RAY_ADDRESS={address}"):
        RayPool.connect()
