"""An account in blocks of examples or units: records stream through threads or Ray. Sensitive."""

import errno
import hashlib
import os
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from threadpoolctl import threadpool_limits

from indpriv import _checks
from indpriv._columns import Ids
from indpriv._facts import refused
from indpriv._files import ROW_GROUP_SIZE, sha256
from indpriv._types import IntArray, NDArray, Progress
from indpriv.accountant.rdp import Columns, joined
from indpriv.epsilon_table import Account, EpsilonTable
from indpriv.errors import check_installed
from indpriv.norm_log.norm_log import NormLog

_READ_BYTES = 1 << 26  # of codes and batch norms that are read together
_BLOCK_BYTES = 1 << 27  # of what is computed for a block: memory does not grow with the examples
_ENTRY_BYTES = 16  # of a batch norm, at most
_MOST_ROWS = 1 << 14  # of the units of a block, unless one alone has more
_SHARES = 8  # of the blocks, for each task that runs at once: they end at about the same time
_RETRIES = 100  # of a task whose worker dies
_ANSWERS_WITHIN = 10.0  # seconds
_PACKAGES = ("indpriv", "numpy", "scipy", "pyarrow")  # that decide the bits of a result
_CODE = ("*.py", "accountant/**/*.py", "norm_log/**/*.py")

Range = tuple[int, int]  # positions of the first example, and after the last
Result = TypeVar("Result")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
_IN_WORKER = threading.Event()  # set in a Ray worker


def n_cores() -> int:
    """Cores this process may use: one in a Ray worker, whose neighbours have the others."""
    if _IN_WORKER.is_set():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_ahead(
    begin: Callable[..., Any],
    result: Callable[[Any], Result],
    cancel: Callable[[Any], object],
    tasks: Iterable[tuple[Any, ...]],
    n_at_once: int,
) -> Iterator[Result]:
    """Yield result(begin(*task)) in the order of the tasks; as many again wait, so no core does."""
    running = deque[Any]()
    try:
        for task in tasks:
            running.append(begin(*task))
            if len(running) > 2 * n_at_once:
                yield result(running.popleft())
        while running:
            yield result(running.popleft())
    finally:  # after an error, or if the caller stops early
        for waiting in running:
            cancel(waiting)


class RayPool:
    """Runs tasks on a Ray cluster, each on one core; n_tasks are expected to run at once.

    Nothing is kept in actors: a task whose worker or node dies runs again elsewhere.
    """

    def __init__(self, ray: Any, n_tasks: int) -> None:
        self._ray, self.n_tasks = ray, n_tasks

    @classmethod
    def connect(cls, workers: int | None = None) -> "RayPool":
        """The cluster at RAY_ADDRESS, the one of this machine, or a new one on this machine.

        InputError: Ray is not installed, the cluster cannot be reached, or workers below 1.
        """
        check_installed("Accounts on a cluster", "ray", "ray")
        import ray

        if not ray.is_initialized():
            _check_answers(os.environ.get("RAY_ADDRESS", ""))
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        if workers is not None:
            return cls(ray, _checks.check_positive_int("workers", workers))
        return cls(ray, max(1, int(ray.cluster_resources().get("CPU", 1))))

    def sent(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Begins work(*task) on a worker: a reference to its result, also for other tasks."""
        run = self._ray.remote(_run).options(num_cpus=1, max_retries=_RETRIES)
        shared = [self._ray.put(work)]  # in a list, Ray does not unpickle it
        return partial(run.remote, shared, versions())

    def in_order(
        self, work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[Result]:
        """Yield the results of work(*task) in the order of the tasks; both can be pickled."""
        yield from _run_ahead(self.sent(work), self._result, self._ray.cancel, tasks, self.n_tasks)

    def _result(self, running: Any) -> Any:
        try:
            return self._ray.get(running)
        except self._ray.exceptions.OutOfDiskError as error:
            raise refused("refusal.cluster", "full") from error
        except self._ray.exceptions.RayTaskError as error:
            cause: BaseException = error
            while isinstance(cause, self._ray.exceptions.RayTaskError):  # of the task that read
                cause = cause.cause
            if isinstance(cause, ModuleNotFoundError):
                raise refused("refusal.cluster", "no_module", name=cause.name) from error
            if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
                raise refused("refusal.cluster", "full") from error
            raise cause from error


def _check_answers(address: str) -> None:
    """InputError if nothing listens at an address with a port; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN).close()
    except OSError as error:
        raise refused("refusal.cluster", "no_answer", address=address, error=error) from error


def _run(shared: list[Any], of_driver: dict[str, str], *task: Any) -> Any:
    """The result of one task; InputError if this worker has other versions than the driver."""
    for name, here in versions().items():
        if here != of_driver.get(name):
            said = {"name": name, "here": here, "there": of_driver.get(name)}
            raise refused("refusal.cluster", "versions", **said)
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
Workers = int | RayPool | None  # threads, by default one for each core, or a cluster


@dataclass(frozen=True)
class BlockAccount:
    """The account of a log, by units: examples, or all rows of a person."""

    log: NormLog  # whose records are read; the rows of a unit lie together in it
    ids: Ids  # (n_units,) of the rows of the table
    # what is found about the units of a block. It can be pickled.
    work: Callable[[NormLog], Columns]
    # of the units with these ids, from what was found in their blocks. Its worst case is that of
    # the run, or that of these units where only all of them show it.
    table: Callable[[NDArray[np.generic], Sequence[Columns]], EpsilonTable]
    size: int  # the largest number of units of a block
    # (n_units + 1,) where the rows of each unit begin; None if each row is one
    first_row: IntArray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def then(self, change: Callable[[EpsilonTable], EpsilonTable]) -> "BlockAccount":
        """The same account, whose tables are changed in the end."""
        table = self.table
        return replace(self, table=lambda ids, found: change(table(ids, found)))

    def tables(
        self, ranges: Sequence[Range], *, workers: Workers = None, progress: Progress | None = None
    ) -> Iterator[EpsilonTable]:
        """Yield the tables of some ranges of units, each of which begins where blocks do."""
        blocks = self.blocks(ranges=ranges, workers=workers, progress=progress)
        for start, stop in ranges:
            found: list[Columns] = []
            while start + sum(len(next(iter(block.values()))) for block in found) < stop:
                found.append(next(blocks))
            yield self.table(self.ids[start:stop], found)

    @property
    def blocks(self) -> Callable[..., Iterator[Columns]]:
        """`in_blocks` of this account; it takes ranges, workers and progress."""
        return partial(in_blocks, self.log, self.work, size=self.size, first_row=self.first_row)


def epsilon_table(
    worst_case: float,
    claim: tuple[str, str],
    account: Account,
    ids: NDArray[np.generic],
    found: Sequence[Columns],
) -> EpsilonTable:
    """The table of some blocks; a `BlockAccount.table` once what all blocks share is given."""
    details = joined(found)
    epsilon, lower = details.pop("epsilon"), details.pop("epsilon_lower")
    return EpsilonTable(
        example_ids=ids,
        epsilon=epsilon,
        epsilon_lower=lower,
        epsilon_upper=epsilon,
        worst_case_epsilon=worst_case,
        claim=claim[0],
        claim_reason=claim[1],
        account=account,
        details=details,
    )


def block_size(bytes_per_example: int) -> int:
    """The number of examples that are accounted at a time."""
    return max(1, _BLOCK_BYTES // max(1, bytes_per_example))


def one_blas_thread(function: AnyFunction) -> AnyFunction:
    """Make a function use one thread in BLAS: their number changes the last bits of products."""
    return cast(AnyFunction, threadpool_limits.wrap(limits=1, user_api="blas")(function))


def workers_of(engine: str, workers: int | None = None) -> Workers:
    """The workers of an engine, "local" or "ray"; InputError if there is no such engine."""
    if _checks.check_choice("engine", engine, ("local", "ray")) == "local":
        return workers
    return RayPool.connect(workers)


def in_blocks(
    log: NormLog,
    work: Callable[[NormLog], Result],
    *,
    size: int,
    ranges: Sequence[Range] | None = None,
    first_row: IntArray | None = None,
    workers: Workers = None,
    progress: Progress | None = None,
) -> Generator[Result, None, None]:
    """Yield the results of work on consecutive blocks of examples or units, in order.

    Memory does not grow with their number, and blocks do not depend on the workers. work takes the
    log of a block, in memory, of at most `size` examples or units, by default of all; no block is
    of two ranges. first_row: see `BlockAccount`. progress: called with (position after a block, all
    examples or units), once it is done.
    """
    n = log.n_examples if first_row is None else len(first_row) - 1
    ranges = [(0, n)] if ranges is None else ranges
    parts = [part for each in ranges for part in _parts(log, *each, size, first_row)]
    done = (end for part in parts for _, end in part)
    if first_row is not None:
        parts = [[(int(first_row[one]), int(first_row[next_])) for one, next_ in p] for p in parts]
    work_on = partial(_work_on, work)
    if isinstance(workers, int | float | str | None):  # it is checked there
        shares: Any = in_order(work_on, _shares(log.part, parts), workers)
    else:
        n_shares = -(-_SHARES * workers.n_tasks // max(1, len(parts)))
        shares = workers.in_order(work_on, _shares(workers.sent(log.part), parts, n_shares))
    with closing(shares):  # nothing runs on if progress or the caller stops it
        results = (result for share in shares for result in share)
        for end, result in zip(done, results, strict=True):
            if progress is not None:
                progress(end, n)
            yield result


def in_order(
    work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], workers: int | None = None
) -> Generator[Result, None, None]:
    """Yield the results of work(*task) in the order of the tasks; a few run ahead on threads."""
    n_threads = n_cores() if workers is None else _checks.check_positive_int("workers", workers)
    if n_threads == 1:
        yield from (work(*task) for task in tasks)
        return
    with ThreadPoolExecutor(n_threads) as pool:
        begin = partial(pool.submit, work)
        yield from _run_ahead(begin, Future.result, Future.cancel, tasks, n_threads)


def _parts(
    log: NormLog, start: int, stop: int, size: int, first_row: IntArray | None
) -> Iterator[list[Range]]:
    """Blocks of at most `size` examples or units, in parts that are read together.

    None goes beyond ROW_GROUP_SIZE of them, so that whole parts of an account have whole blocks.
    """
    bytes_per_example = log.n_records * np.dtype(log.levels.dtype).itemsize
    if log.batch_norms is not None:
        bytes_per_example += _ENTRY_BYTES * int(log.settings.sample_rate.sum())
    at_once = max(1, _READ_BYTES // max(1, bytes_per_example))
    for group in range(start // ROW_GROUP_SIZE, -(-stop // ROW_GROUP_SIZE)):
        first, last = group * ROW_GROUP_SIZE, (group + 1) * ROW_GROUP_SIZE
        inside = max(start, first), min(stop, last)
        for begin, end in _ranges(*inside, at_once, first_row, at_once):
            yield list(_ranges(begin, end, size, first_row, _MOST_ROWS))


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


def _shares(
    read: Callable[[int, int], Any], parts: Iterable[list[Range]], n_shares: int = 1 << 30
) -> Iterator[tuple[Any, list[Range]]]:
    """The blocks of each part, which is read once, in shares, by default of one, beside its log."""
    for part in parts:
        start, there = part[0][0], read(part[0][0], part[-1][1])
        blocks = [(begin - start, end - start) for begin, end in part]
        ends = np.linspace(0, len(blocks), min(n_shares, len(blocks)) + 1).round().astype(int)
        yield from ((there, blocks[begin:end]) for begin, end in pairwise(ends.tolist()))


def _work_on(work: Callable[[NormLog], Result], read: NormLog, blocks: list[Range]) -> list[Result]:
    return [work(read.part(begin, end)) for begin, end in blocks]
