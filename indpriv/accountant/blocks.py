"""An account in blocks of examples or units: records stream through threads or Ray. Sensitive.

Every account of one log is computed in this way, whatever its relation, so that it streams, goes on
where it was stopped, and runs on other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from indpriv import _checks
from indpriv._arrays import Ids, IntArray
from indpriv._files import ROW_GROUP_SIZE
from indpriv._progress import Progress
from indpriv.accountant.cluster import RayPool, n_cores, run_ahead
from indpriv.accountant.rdp import Epsilons
from indpriv.epsilon_table import Account, EpsilonTable
from indpriv.norm_log.norm_log import NormLog

_READ_BYTES = 1 << 26  # of codes and batch norms that are read together
_BLOCK_BYTES = 1 << 26  # of what is computed for a block: memory does not grow with the examples
_ENTRY_BYTES = 16  # of a batch norm, at most
_MOST_ROWS = 1 << 14  # of the units of a block, unless one alone has more
_SHARES = 8  # of the blocks, for each task that runs at once: they end at about the same time

Range = tuple[int, int]  # positions of the first example, and after the last
Workers = int | RayPool | None  # threads, by default one for each core, or a cluster
Result = TypeVar("Result")
Found = TypeVar("Found", bound=Sized)  # about the units of a block, whose number is its length
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@dataclass(frozen=True)
class BlockAccount(Generic[Found]):
    """The account of a log, by units: examples, or all rows of a person.

    Attributes:
        log: whose records are read; the rows of a unit lie together in it.
        ids: (n_units,) of the rows of the table.
        work: what is found about the units of a block. It can be pickled.
        table: of the units with these ids, from what was found in their blocks. Its worst case is
            that of the run, or that of these units where only all of them show it.
        size: the largest number of units of a block.
        first_row: (n_units + 1,) where the rows of each unit begin; None if each row is one.
    """

    log: NormLog
    ids: Ids
    work: Callable[[NormLog], Found]
    table: Callable[[NDArray[np.generic], Sequence[Found]], EpsilonTable]
    size: int
    first_row: IntArray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def then(self, change: Callable[[EpsilonTable], EpsilonTable]) -> BlockAccount[Found]:
        """The same account, whose tables are changed in the end."""
        table = self.table
        return replace(self, table=lambda ids, found: change(table(ids, found)))

    def tables(
        self,
        ranges: Sequence[Range],
        *,
        workers: Workers = None,
        progress: Progress | None = None,
    ) -> Iterator[EpsilonTable]:
        """Yield the tables of some ranges of units, each of which begins where blocks do."""
        blocks = self.blocks(ranges, workers=workers, progress=progress)
        for start, stop in ranges:
            found: list[Found] = []
            while sum(map(len, found)) < stop - start:
                found.append(next(blocks))
            yield self.table(self.ids[start:stop], found)

    def blocks(
        self,
        ranges: Sequence[Range] | None = None,
        *,
        workers: Workers = None,
        progress: Progress | None = None,
    ) -> Iterator[Found]:
        """Yield what is found in the blocks of some ranges of units, by default of all.

        progress: called with (position after a block, all units), once it is done.
        """
        ranges = [(0, len(self))] if ranges is None else ranges
        found = in_blocks(
            self.log,
            self.work,
            size=self.size,
            ranges=ranges,
            first_row=self.first_row,
            workers=workers,
        )
        with closing(found):  # nothing runs on if progress or the caller stops it
            for start, stop in ranges:
                while start < stop:
                    block = next(found)
                    start += len(block)
                    if progress is not None:
                        progress(start, len(self))
                    yield block


def epsilon_table(
    worst_case: float,
    claim: tuple[str, str],
    account: Account,
    ids: NDArray[np.generic],
    found: Sequence[Epsilons],
) -> EpsilonTable:
    """The table of some blocks; a `BlockAccount.table` once what all blocks share is given.

    claim: and its reason. account: what epsilons mean.
    """
    units = Epsilons.joined(found)
    return EpsilonTable(
        example_ids=ids,
        epsilon=units.epsilon,
        epsilon_lower=units.epsilon_lower,
        epsilon_upper=units.epsilon,
        worst_case_epsilon=worst_case,
        claim=claim[0],
        claim_reason=claim[1],
        account=account,
        details=units.details,
    )


def block_size(bytes_per_example: int) -> int:
    """The number of examples that are accounted at a time."""
    return max(1, _BLOCK_BYTES // max(1, bytes_per_example))


def one_blas_thread(function: AnyFunction) -> AnyFunction:
    """Make a function use one thread in BLAS: their number changes the last bits of products.

    Blocks have threads of their own.
    """
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
) -> Generator[Result, None, None]:
    """Yield the results of work on consecutive blocks of examples or units, in order.

    Memory does not grow with their number, and blocks do not depend on the workers.

    Args:
        log: the log whose records are read.
        work: takes a block: the log of its examples, in memory.
        size: the largest number of examples, or units, of a block.
        ranges: positions of the examples or units, by default of all; no block is of two ranges.
        first_row: (n_units + 1,) where the rows of each unit begin in the log, if blocks are of
            units, whose rows stay together; None if they are of examples.
        workers: the number of threads, by default one for each core, or a cluster.

    Raises:
        InputError: workers below 1.
    """
    if ranges is None:
        ranges = [(0, log.n_examples if first_row is None else len(first_row) - 1)]
    parts = (part for each in ranges for part in _parts(log, *each, size, first_row))
    if isinstance(workers, int | None):
        yield from in_order(work, _blocks(log, parts), workers)
        return
    for results in workers.in_order(partial(_work_on, work), _shares(log, list(parts), workers)):
        yield from results


def in_order(
    work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], workers: int | None = None
) -> Iterator[Result]:
    """Yield the results of work(*task) in the order of the tasks; a few run ahead on threads."""
    n_threads = n_cores() if workers is None else _checks.check_positive_int("workers", workers)
    if n_threads == 1:
        yield from (work(*task) for task in tasks)
        return
    with ThreadPoolExecutor(n_threads) as pool:
        begin = partial(pool.submit, work)
        yield from run_ahead(begin, Future.result, Future.cancel, tasks, n_threads)


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


def _blocks(log: NormLog, parts: Iterable[list[Range]]) -> Iterator[tuple[NormLog]]:
    """The log of each block; the records of a part are read at once."""
    for part in parts:
        start = part[0][0]
        read = log.part(start, part[-1][1])
        yield from ((read.part(begin - start, end - start),) for begin, end in part)


def _shares(
    log: NormLog, parts: list[list[Range]], pool: RayPool
) -> Iterator[tuple[NormLog, list[Range]]]:
    """The blocks of each part in shares of nearly equal numbers, each beside the log of its part.

    A part is read once, by a task of its own.
    """
    read, n_shares = pool.sent(log.part), -(-_SHARES * pool.n_tasks // max(1, len(parts)))
    for part in parts:
        start, there = part[0][0], read(part[0][0], part[-1][1])
        blocks = [(begin - start, end - start) for begin, end in part]
        ends = np.linspace(0, len(blocks), min(n_shares, len(blocks)) + 1).round().astype(int)
        yield from ((there, blocks[begin:end]) for begin, end in pairwise(ends.tolist()))


def _work_on(work: Callable[[NormLog], Result], read: NormLog, blocks: list[Range]) -> list[Result]:
    return [work(read.part(begin, end)) for begin, end in blocks]
