"""Streams the records of a log through work on blocks of examples: threads, or Ray. Sensitive."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from threadpoolctl import threadpool_limits

from indpriv import _checks
from indpriv._arrays import IntArray
from indpriv._files import ROW_GROUP_SIZE, sha256
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

_READ_BYTES = 1 << 26  # of codes and batch norms that are read together
_ENTRY_BYTES = 16  # of a batch norm, at most
_MOST_ROWS = 1 << 14  # of the units of a block, unless one alone has more
_SHARES = 8  # of the blocks, for each task that runs at once: they end at about the same time
WHERE = ("local", "ray")
_RETRIES = 100  # of a task whose worker dies
_ANSWERS_WITHIN = 10.0  # seconds
_IN_WORKER = threading.Event()  # set in a Ray worker
_PACKAGES = ("indpriv", "numpy", "scipy", "pyarrow")  # that decide the bits of a result
_CODE = ("*.py", *(f"{name}/**/*.py" for name in ("accountant", "epsilon_table", "norm_log")))

Range = tuple[int, int]  # positions of the first example, and after the last
Result = TypeVar("Result")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def one_blas_thread(function: AnyFunction) -> AnyFunction:
    """Make a function use one thread in BLAS: their number changes the last bits of products.

    Blocks have threads of their own.
    """
    return cast(AnyFunction, threadpool_limits.wrap(limits=1, user_api="blas")(function))


def n_cores() -> int:
    """Cores this process may use: one in a Ray worker, whose neighbours have the others."""
    if _IN_WORKER.is_set():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool(Protocol):
    """Computes blocks elsewhere than on threads of this process; see `RayPool`."""

    n_tasks: int  # that run at once

    def sent(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Begins work(*task) elsewhere; what it returns may stand in tasks for the result."""
        ...

    def in_order(
        self, work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[Result]:
        """Yield the results of work(*task) in the order of the tasks; both can be pickled."""
        ...


Workers = int | Pool | None  # threads, by default one for each core, or a pool


def workers_of(engine: str, workers: int | None = None) -> Workers:
    """The workers of an engine, "local" or "ray"; InputError if there is no such engine."""
    if _checks.check_choice("engine", engine, WHERE) == "local":
        return workers
    return RayPool.connect(workers)


def in_blocks(
    log: NormLog,
    work: Callable[[NormLog], Result],
    *,
    size: int,
    start: int = 0,
    stop: int | None = None,
    first_row: IntArray | None = None,
    workers: Workers = None,
) -> Iterator[Result]:
    """Yield the results of work on consecutive blocks of examples or units, in order.

    Memory does not grow with their number, and blocks do not depend on the workers.

    Args:
        log: the log whose records are read.
        work: takes a block: the log of its examples, in memory.
        size: the largest number of examples, or units, of a block.
        start: the first example or unit.
        stop: the one after the last; by default all.
        first_row: (n_units + 1,) where the rows of each unit begin in the log, if blocks are of
            units, whose rows stay together; None if they are of examples.
        workers: the number of threads, by default one for each core, or a pool.

    Raises:
        InputError: workers below 1, or a negative position.
    """
    n = log.n_examples if first_row is None else len(first_row) - 1
    stop = n if stop is None else _checks.check_positive_int("stop", stop, minimum=0)
    start = _checks.check_positive_int("start", start, minimum=0)
    parts = _parts(log, start, min(stop, n), size, first_row)
    if workers is None or isinstance(workers, int):
        blocks = ((block,) for part in parts for block in _read(log, part))
        yield from in_order(work, blocks, workers)
        return
    for results in workers.in_order(partial(_work_on, work), _tasks(log, list(parts), workers)):
        yield from results


def in_order(
    work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], workers: Workers = None
) -> Iterator[Result]:
    """Yield the results of work(*task) in the order of the tasks; a few tasks run ahead."""
    if not (workers is None or isinstance(workers, int)):
        yield from workers.in_order(work, tasks)
        return
    n_threads = n_cores() if workers is None else _checks.check_positive_int("workers", workers)
    if n_threads == 1:
        yield from (work(*task) for task in tasks)
        return
    with ThreadPoolExecutor(n_threads) as pool:
        running: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                running.append(pool.submit(work, *task))
                if len(running) > 2 * n_threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:  # after an error, or if the caller stops early
            for waiting in running:
                waiting.cancel()


def _parts(
    log: NormLog, start: int, stop: int, size: int, first_row: IntArray | None
) -> Iterator[list[Range]]:
    """Rows of blocks of at most `size` examples or units, in parts that are read together.

    None goes beyond ROW_GROUP_SIZE of them, so that whole parts of an account have whole blocks.
    """
    value_bytes = 8 if log.levels is None else np.dtype(log.levels.dtype).itemsize
    bytes_per_example = log.n_records * value_bytes
    if log.batch_norms is not None:
        bytes_per_example += _ENTRY_BYTES * int(log.settings.sample_rate.sum())
    at_once = max(1, _READ_BYTES // max(1, bytes_per_example))
    for group in range(start // ROW_GROUP_SIZE, -(-stop // ROW_GROUP_SIZE)):
        first, last = group * ROW_GROUP_SIZE, (group + 1) * ROW_GROUP_SIZE
        inside = max(start, first), min(stop, last)
        for begin, end in _ranges(*inside, at_once, first_row, at_once):
            blocks = _ranges(begin, end, size, first_row, _MOST_ROWS)
            if first_row is not None:
                blocks = ((int(first_row[one]), int(first_row[next_])) for one, next_ in blocks)
            yield list(blocks)


def _read(log: NormLog, blocks: list[Range]) -> Iterator[NormLog]:
    """The logs of consecutive blocks, whose records are read at once."""
    start = blocks[0][0]
    read = log.part(start, blocks[-1][1])
    return (read.part(begin - start, end - start) for begin, end in blocks)


def _tasks(
    log: NormLog, parts: list[list[Range]], pool: Pool
) -> Iterator[tuple[NormLog, list[Range]]]:
    """The blocks of each part in shares, each beside the log of its part, which is read once."""
    read, n_shares = pool.sent(log.part), -(-_SHARES * pool.n_tasks // max(1, len(parts)))
    for part in parts:
        start, there = part[0][0], read(part[0][0], part[-1][1])
        for share in _shares(part, n_shares):
            yield there, [(begin - start, end - start) for begin, end in share]


def _work_on(work: Callable[[NormLog], Result], read: NormLog, blocks: list[Range]) -> list[Result]:
    return [work(read.part(begin, end)) for begin, end in blocks]


def _shares(blocks: list[Range], n: int) -> Iterator[list[Range]]:
    """Consecutive blocks in at most n shares of nearly the same number of blocks."""
    ends = np.linspace(0, len(blocks), min(n, len(blocks)) + 1).round().astype(int)
    return (blocks[begin:end] for begin, end in pairwise(ends.tolist()))


def _ranges(
    start: int, stop: int, most: int, first_row: IntArray | None = None, most_rows: int = 0
) -> Iterator[Range]:
    """Consecutive ranges of `most` examples, or of units with few enough rows, one at least."""
    while start < stop:
        end = min(start + most, stop)
        if first_row is not None:
            fits = np.searchsorted(first_row, first_row[start] + most_rows, side="right") - 1
            end = min(end, max(int(fits), start + 1))
        yield start, end
        start = end


class RayPool:
    """Runs tasks on a Ray cluster, each on one core.

    Nothing is kept in actors: a task whose worker or node dies runs again elsewhere.

    Attributes:
        n_tasks: that the cluster is expected to run at once. Twice as many are submitted, and one
            more, so that no core waits; a cluster with more cores runs all of them.
    """

    def __init__(self, ray: Any, n_tasks: int) -> None:
        self._ray, self.n_tasks = ray, n_tasks

    @classmethod
    def connect(cls, workers: int | None = None) -> RayPool:
        """The cluster at RAY_ADDRESS, the one of this machine, or a new one on this machine.

        Args:
            workers: n_tasks, by default the cores of the cluster.

        Raises:
            InputError: Ray is not installed, the cluster cannot be reached, or workers below 1.
        """
        try:
            import ray
        except ImportError as error:
            raise InputError('engine="ray" needs Ray: pip install "indpriv[ray]"') from error
        if not ray.is_initialized():
            _check_answers(os.environ.get("RAY_ADDRESS", ""))
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        return cls(
            ray, cores if workers is None else _checks.check_positive_int("workers", workers)
        )

    def sent(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """See Pool; results lie in Ray's object store, from which workers read them in place."""
        run = self._ray.remote(_run).options(num_cpus=1, max_retries=_RETRIES)
        shared = [self._ray.put(work)]  # in a list, Ray does not unpickle it
        return partial(run.remote, shared, versions())

    def in_order(
        self, work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[Result]:
        """See Pool; work is sent once, and a few tasks run ahead.

        Raises:
            InputError: a worker has another version of Python or of a package, or lacks one.
            Exception: whatever work raises.
        """
        begin, running = self.sent(work), deque[Any]()
        try:
            for task in tasks:
                running.append(begin(*task))
                if len(running) > 2 * self.n_tasks:
                    yield self._result(running.popleft())
            while running:
                yield self._result(running.popleft())
        finally:  # after an error, or if the caller stops early
            for waiting in running:
                self._ray.cancel(waiting)

    def _result(self, running: Any) -> Any:
        full = (
            "the disk of a Ray node is full: free it, or start Ray with another directory for what "
            "it spills (ray start --temp-dir)"
        )
        try:
            return self._ray.get(running)
        except self._ray.exceptions.OutOfDiskError as error:
            raise InputError(full) from error
        except self._ray.exceptions.RayTaskError as error:
            cause: BaseException = error
            while isinstance(cause, self._ray.exceptions.RayTaskError):  # of the task that read
                cause = cause.cause
            if isinstance(cause, ModuleNotFoundError):
                raise InputError(
                    f"a Ray worker cannot import {cause.name}: install indpriv on every node"
                ) from error
            if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
                raise InputError(full) from error
            raise cause from error


def _check_answers(address: str) -> None:
    """InputError if nothing listens at an address with a port; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN).close()
    except OSError as error:
        raise InputError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error}); start one with `ray start "
            "--head`, or unset RAY_ADDRESS to use this machine"
        ) from error


def _run(shared: list[Any], of_driver: dict[str, str], *task: Any) -> Any:
    """The result of one task; InputError if this worker has other versions than the driver."""
    for name, here in versions().items():
        if here != of_driver.get(name):
            raise InputError(
                f"a Ray worker has {name} {here}, and this process {of_driver.get(name)}: results "
                "could depend on where they are computed; install the same on every node"
            )
    if not _IN_WORKER.is_set():  # for good: the limit takes a while to set
        _IN_WORKER.set()
        threadpool_limits(1, user_api="blas")  # as in the process that prepared the work
    return _unpickled(shared[0])(*task)


@lru_cache(maxsize=2)  # what reads, and what computes
def _unpickled(shared: Any) -> Callable[..., Any]:
    """The work of the tasks, once in each worker process, with the tables that it has filled."""
    import ray

    return cast(Callable[..., Any], ray.get(shared))


@lru_cache
def versions() -> dict[str, str]:
    """Versions of all that decides the bits of a result."""
    packages = {name: version(name) for name in _PACKAGES}
    code = code_hash(Path(_checks.__file__).parent)
    return {"Python": platform.python_version(), **packages, "indpriv's code": code}


def code_hash(package: Path) -> str:
    """Hash of the sources that decide a result: in a checkout they change, the version does not."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in _CODE for path in package.glob(pattern)}):
        found.update(f"{path.relative_to(package).as_posix()}\0{sha256(path)}\0".encode())
    return found.hexdigest()[:16]


versions()  # now: the files of a checkout may be others than those that were imported later
