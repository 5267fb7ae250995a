"""Streams the records of a log through work on blocks of examples: threads or a pool. Sensitive."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from threadpoolctl import threadpool_limits

from indpriv import _checks
from indpriv.norm_log.norm_log import NormLog

_READ_BYTES = 1 << 26  # of codes and batch norms that are read together
_ENTRY_BYTES = 16  # of a batch norm, at most
_SHARES = 8  # of the blocks, for each task that runs at once: they end at about the same time
WHERE = ("local", "ray")

Range = tuple[int, int]  # positions of the first example, and after the last
Result = TypeVar("Result")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def one_blas_thread(function: AnyFunction) -> AnyFunction:
    """Make a function use one thread in BLAS: their number changes the last bits of products.

    Blocks have threads of their own.
    """
    return cast(AnyFunction, threadpool_limits.wrap(limits=1, user_api="blas")(function))


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Lock:
    """A lock among the threads of one process: a copy in another process is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


class Pool(Protocol):
    """Computes blocks elsewhere than on threads of this process; see `indpriv._ray`."""

    n_tasks: int  # that run at once

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
    from indpriv._ray import RayPool  # Ray is an extra

    return RayPool.connect(workers)


def in_blocks(
    log: NormLog,
    work: Callable[[NormLog], Result],
    *,
    size: int,
    start: int = 0,
    stop: int | None = None,
    workers: Workers = None,
) -> Iterator[Result]:
    """Yield the results of work on consecutive blocks of examples, in order.

    Memory does not grow with the number of examples, and blocks do not depend on the workers.

    Args:
        log: the log whose records are read.
        work: takes a block: the log of its examples, in memory.
        size: the largest number of examples of a block.
        start: position of the first example.
        stop: position after the last one; by default all examples.
        workers: the number of threads, by default one for each core, or a pool.

    Raises:
        InputError: workers below 1, or a negative position.
    """
    stop = log.n_examples if stop is None else _checks.check_positive_int("stop", stop, minimum=0)
    start = _checks.check_positive_int("start", start, minimum=0)
    parts = _parts(log, start, min(stop, log.n_examples), size)
    if workers is None or isinstance(workers, int):
        blocks = ((block,) for part in parts for block in _read(log, part))
        yield from in_order(work, blocks, workers)
        return
    blocks_of_tasks = _shares(
        [block for part in parts for block in part], _SHARES * workers.n_tasks
    )
    tasks = ((share,) for share in blocks_of_tasks)
    for results in workers.in_order(partial(_read_and_work, log, work), tasks):
        yield from results


def in_order(
    work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], workers: Workers = None
) -> Iterator[Result]:
    """Yield the results of work(*task) in the order of the tasks; a few tasks run ahead."""
    if not (workers is None or isinstance(workers, int)):
        yield from workers.in_order(work, tasks)
        return
    n_threads = _threads(workers)
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


def _threads(workers: int | None) -> int:
    return n_cores() if workers is None else _checks.check_positive_int("workers", workers)


def _parts(log: NormLog, start: int, stop: int, size: int) -> Iterator[list[Range]]:
    """Blocks of at most `size` examples, in parts that are read together."""
    value_bytes = 8 if log.levels is None else np.dtype(log.levels.dtype).itemsize
    bytes_per_example = log.n_records * value_bytes
    if log.batch_norms is not None:
        bytes_per_example += _ENTRY_BYTES * int(log.settings.sample_rate.sum())
    for begin, end in _ranges(start, stop, max(1, _READ_BYTES // max(1, bytes_per_example))):
        yield list(_ranges(begin, end, size))


def _read(log: NormLog, blocks: list[Range]) -> Iterator[NormLog]:
    """The logs of consecutive blocks, whose records are read at once."""
    start = blocks[0][0]
    read = log.part(start, blocks[-1][1])
    return (read.part(begin - start, end - start) for begin, end in blocks)


def _read_and_work(
    log: NormLog, work: Callable[[NormLog], Result], blocks: list[Range]
) -> list[Result]:
    return [work(block) for block in _read(log, blocks)]


def _shares(blocks: list[Range], n: int) -> Iterator[list[Range]]:
    """Consecutive blocks in at most n shares of nearly the same number of blocks."""
    ends = np.linspace(0, len(blocks), min(n, len(blocks)) + 1).round().astype(int)
    return (blocks[begin:end] for begin, end in pairwise(ends.tolist()))


def _ranges(start: int, stop: int, size: int) -> Iterator[Range]:
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)
