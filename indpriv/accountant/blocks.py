"""Streams the records of a log through work on blocks of examples, on all cores. Sensitive."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from indpriv import _checks
from indpriv.norm_log.norm_log import NormLog

_READ_BYTES = 1 << 26  # of codes and batch norms that are read together
_ENTRY_BYTES = 16  # of a batch norm, at most

Result = TypeVar("Result")


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(workers: int | None) -> int:
    """The number of threads to use, by default one for each core; InputError if it is below 1."""
    return n_cores() if workers is None else _checks.check_positive_int("workers", workers)


def in_blocks(
    log: NormLog,
    work: Callable[[NormLog], Result],
    *,
    size: int,
    start: int = 0,
    stop: int | None = None,
    workers: int | None = None,
) -> Iterator[Result]:
    """Yield the results of work on consecutive blocks of examples, in order.

    Memory does not grow with the number of examples.

    Args:
        log: the log whose records are read.
        work: takes a block: the log of its examples, in memory.
        size: the largest number of examples of a block.
        start: position of the first example.
        stop: position after the last one; by default all examples.
        workers: the number of threads, by default one for each core.

    Raises:
        InputError: workers below 1, or a negative position.
    """
    stop = log.n_examples if stop is None else _checks.check_positive_int("stop", stop, minimum=0)
    start = _checks.check_positive_int("start", start, minimum=0)
    n_threads = threads(workers)
    blocks = _blocks(log, start, min(stop, log.n_examples), size)
    yield from in_order(work, ((block,) for block in blocks), n_threads)


def in_order(
    work: Callable[..., Result], tasks: Iterator[tuple[Any, ...]], n_threads: int
) -> Iterator[Result]:
    """Yield the results of work(*task) in the order of the tasks; a few tasks run ahead."""
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


def _blocks(log: NormLog, start: int, stop: int, size: int) -> Iterator[NormLog]:
    value_bytes = 8 if log.levels is None else np.dtype(log.levels.dtype).itemsize
    bytes_per_example = log.n_records * value_bytes
    if log.batch_norms is not None:
        bytes_per_example += _ENTRY_BYTES * int(log.settings.sample_rate.sum())
    for begin, end in _ranges(start, stop, max(1, _READ_BYTES // max(1, bytes_per_example))):
        read = log.part(begin, end)
        for first, last in _ranges(begin, end, size):
            yield read.part(first - begin, last - begin)


def _ranges(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)
