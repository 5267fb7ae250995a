"""An account in blocks: what all of them share, and the table of any units from theirs. Sensitive.

Every account of one log is computed in this way, whatever its relation, so that it streams, goes on
where it was stopped, and runs on other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import Ids, IntArray
from indpriv._progress import Advance, Progress, advancing
from indpriv.accountant.blocks import Range, Workers, in_blocks
from indpriv.accountant.engine import Epsilons, joined
from indpriv.accountant.prepared import owners_of
from indpriv.accountant.units import Units
from indpriv.epsilon_table import Account, EpsilonTable
from indpriv.norm_log.norm_log import NormLog

_FIRST, _ONE_IN = 8192, 50  # tables for a pool are filled by 8192 units, or by 2 % if fewer


class Sized(Protocol):
    """What is found about the units of a block."""

    def __len__(self) -> int:
        """The number of units."""
        ...


Found = TypeVar("Found", bound=Sized)


class BlockWork(Protocol[Found]):
    """What a worker does with a block of a log; it can be pickled."""

    def block(self, block: NormLog) -> Found:
        """What is found about the units of a block."""
        ...

    def watched(self, advance: Advance) -> BlockWork[Found]:
        """The same, which may call advance for at most the units of each block meanwhile."""
        ...

    def filled(self, block: NormLog) -> BlockWork[Found]:
        """The same, with the tables that a block needs, which go along where it is sent."""
        ...


@dataclass(frozen=True)
class BlockAccount(Generic[Found]):
    """The account of a log, by units: examples, or all rows of a person.

    Attributes:
        log: whose records are read; the rows of a unit lie together in it.
        ids: (n_units,) of the rows of the table.
        work: what is done with a block.
        table: of the units with these ids, from what was found in their blocks. Its worst case is
            that of the run, or that of these units where only all of them show it.
        size: the largest number of units of a block.
        first_row: (n_units + 1,) where the rows of each unit begin; None if each row is one.
    """

    log: NormLog
    ids: Ids
    work: BlockWork[Found]
    table: Callable[[NDArray[np.generic], Sequence[Found]], EpsilonTable]
    size: int
    first_row: IntArray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def then(self, change: Callable[[EpsilonTable], EpsilonTable]) -> BlockAccount[Found]:
        """The same account, whose tables are changed in the end."""
        table = self.table
        return replace(self, table=lambda ids, found: change(table(ids, found)))

    def blocks(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        workers: Workers = None,
        progress: Progress | None = None,
    ) -> Iterator[Found]:
        """Yield what is found in consecutive blocks of the units at positions start to stop.

        Memory does not grow with their number.

        Args:
            start: position of the first unit.
            stop: position after the last one; by default all units.
            workers: threads, by default one for each core, or a pool.
            progress: called with (units done, all units), from any of the threads.
        """
        report = advancing(len(self), progress)
        in_range = partial(
            in_blocks,
            self.log,
            size=self.size,
            start=start,
            stop=stop,
            first_row=self.first_row,
            workers=workers,
        )
        if not (workers is None or isinstance(workers, int)):  # progress is not heard from there
            filled = self._filled_work(start, len(self) if stop is None else stop)
            for found in in_range(filled.block):
                report(len(found))
                yield found
            return

        def work(block: NormLog) -> Found:
            within: list[float] = []

            def advance(more: float) -> None:
                within.append(more)
                report(more)

            found = self.work.watched(advance).block(block)
            report(len(found) - sum(within))
            return found

        yield from in_range(work)

    def _filled_work(self, start: int, stop: int) -> BlockWork[Found]:
        """The work, most tables filled by a few units, so that not each worker fills its own."""
        end = start + min(_FIRST, (stop - start) // _ONE_IN)
        if end == start:
            return self.work
        rows = (start, end) if self.first_row is None else self.first_row[[start, end]].tolist()
        return self.work.filled(self.log.part(*rows))

    def tables(
        self,
        ranges: Sequence[Range],
        *,
        workers: Workers = None,
        progress: Progress | None = None,
    ) -> Iterator[EpsilonTable]:
        """Yield the tables of some ranges of units, each of which begins where blocks do.

        Blocks of ranges that follow each other run ahead from one to the next.
        """
        ends = [0, *(i for i, (one, other) in enumerate(pairwise(ranges), 1) if one[1] != other[0])]
        for begin, end in pairwise([*ends, len(ranges)]):
            yield from self._consecutive(ranges[begin:end], workers, progress)

    def _consecutive(
        self, ranges: Sequence[Range], workers: Workers, progress: Progress | None
    ) -> Iterator[EpsilonTable]:
        if not ranges:
            return
        first, last = ranges[0][0], ranges[-1][1]
        told = progress and (lambda done, total: progress(min(first + done, total), total))
        blocks = self.blocks(first, last, workers=workers, progress=told)
        for start, stop in ranges:
            found: list[Found] = []
            while sum(map(len, found)) < stop - start:
                found.append(next(blocks))
            yield self.table(self.ids[start:stop], found)


def tables_of_epsilons(
    worst_case: float, claim: tuple[str, str], account: Account
) -> Callable[[NDArray[np.generic], Sequence[Epsilons]], EpsilonTable]:
    """`BlockAccount.table` where epsilons are found block by block, and the rest is known before.

    Args:
        worst_case: epsilon of the run.
        claim: and its reason.
        account: what epsilons mean.
    """

    def table(ids: NDArray[np.generic], found: Sequence[Epsilons]) -> EpsilonTable:
        units = joined(found)
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

    return table


def rows_together(log: NormLog, units: Units) -> tuple[NormLog, IntArray]:
    """The log with the rows of each unit together, and where these begin (n_units + 1,).

    If they do not lie like that already, the log is read into memory.
    """
    as_they_lie = len(units.positions) == log.n_examples and bool(
        np.all(np.diff(units.positions) == 1)
    )
    first_row = np.append(units.starts, len(units.positions))
    return log if as_they_lie else log.take(units.positions), first_row


def first_rows(block: NormLog) -> IntArray:
    """(n_units,) where the rows of each unit of a block begin."""
    owners = owners_of(block)
    if owners is None:
        return np.arange(block.n_examples)
    return np.flatnonzero(np.append(True, owners[1:] != owners[:-1]))
