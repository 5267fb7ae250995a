"""Streams the rows of a log through work on blocks of examples: constant memory, all cores. Sensitive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from indpriv import _checks
from indpriv.accountant.histogram.cells import n_cores
from indpriv.accountant.histogram.governing_rows import Block
from indpriv.norm_log.norm_log import NormLog

_READ_BYTES = 1 << 26  # of codes and free entries read together
_ENTRY_BYTES = 16  # of a free entry, at most

Result = TypeVar("Result")


def threads(workers: int | None) -> int:
    """Number of threads: one for each core, or as asked; InputError where that is none."""
    return n_cores() if workers is None else _checks.check_positive_int("workers", workers)


def in_blocks(
    log: NormLog,
    work: Callable[[int, int, Block], Result],
    *,
    size: int,
    start: int = 0,
    stop: int | None = None,
    workers: int | None = None,
) -> Iterator[Result]:
    """Yield the results of work on consecutive blocks of examples, in order.

    Args:
        log: whose rows are read, one block after the other.
        work: takes (start, stop, what the log says of the examples at these positions).
        size: examples of a block, at most.
        start: position of the first example.
        stop: position after the last one; default all.
        workers: threads, default one for each core. Memory does not grow with the number of examples.

    Raises:
        InputError: workers or positions that are none.
    """
    stop = log.n_examples if stop is None else _checks.check_positive_int("stop", stop, minimum=0)
    start = _checks.check_positive_int("start", start, minimum=0)
    n_threads = threads(workers)
    tasks = _tasks(log, start, min(stop, log.n_examples), size)
    yield from in_order(work, tasks, n_threads)


def in_order(
    work: Callable[..., Result], tasks: Iterator[tuple[Any, ...]], n_threads: int
) -> Iterator[Result]:
    """Yield the results of work(*task) in the order of the tasks, which are drawn here, a few ahead of their turn."""
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
        finally:  # an error, or nobody wants more: what has not begun need not be done
            for waiting in running:
                waiting.cancel()


def _tasks(log: NormLog, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Block]]:
    bytes_per_example = log.n_records * (
        8 if log.levels is None else np.dtype(log.levels.dtype).itemsize
    )
    if log.batch_norms is not None:
        bytes_per_example += _ENTRY_BYTES * int(log.settings.sample_rate.sum())
    for begin, end in _ranges(start, stop, max(1, _READ_BYTES // max(1, bytes_per_example))):
        block = Block.of(log, begin, end)
        for first, last in _ranges(begin, end, size):
            yield first, last, block.part(first - begin, last - begin)


def _ranges(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)
