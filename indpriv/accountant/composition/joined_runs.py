"""The counts of several runs side by side: cells of each run in turn. Sensitive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.counts import Counts, DenseCounts
from indpriv.accountant.histogram.histogram import Histogram
from indpriv.accountant.histogram.mechanisms import Mechanisms
from indpriv.accountant.histogram.unit_cells import UnitCells
from indpriv.accountant.known import known_units
from indpriv.accountant.method import Method
from indpriv.accountant.units import Units
from indpriv.norm_log.norm_log import NormLog

_SHARES = 2.0**24  # of the largest squared mu of a run, in whole numbers of which PLD counts


@dataclass(frozen=True)
class KnownCells:
    """A run with known participation: one Gaussian mechanism for each of its people.

    Attributes:
        squared_mu: (n,) of each of the run's n people.
        worst: of the most exposed one, at max_grad_norm.
    """

    squared_mu: FloatArray
    worst: float

    @classmethod
    def of(cls, log: NormLog, units: Units | None, method: Method) -> KnownCells:
        """units: None if each row is one; people are in the order of units, or of the log."""
        known = known_units(log, method, units)
        return cls(known["own"], float(known["clipped"].max()))

    @property
    def mechanisms(self) -> Mechanisms:
        """(1,) a Gaussian mechanism whose squared mu is a small share of the largest one."""
        noise = np.sqrt(_SHARES / max(self.worst, 1e-300)) * (1 - 1e-14)
        return Mechanisms(np.ones(1), np.array([noise]), np.ones(1))

    @property
    def most(self) -> float:
        """How many of these the most exposed one met."""
        return _SHARES if self.worst > 0 else 0.0

    def steps(self, start: int, stop: int) -> FloatArray:
        """(stop - start, 1) how many of these bound what people from start to stop met."""
        share = _SHARES / max(self.worst, 1e-300)
        return np.minimum(np.ceil(self.squared_mu[start:stop, None] * share), _SHARES)

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Divergences; one count is a squared mu of 1."""
        return orders[:, None] / 2

    def divergences_at(self, cells: IntArray, orders: FloatArray) -> FloatArray:
        """See SlowDivergences."""
        return orders / 2


@dataclass(frozen=True)
class RunPart:
    """One run, with its people in the order of the composed table.

    Attributes:
        log: rows in that order. cells: how they are counted.
        first_row: (n + 1,) where the rows of each of the run's n people begin.
        first: (n_people + 1,) how many of the run's people come before each.
    """

    log: NormLog
    cells: Histogram | UnitCells | KnownCells
    first_row: IntArray
    first: IntArray

    @classmethod
    def of(
        cls, log: NormLog, units: Units, place: IntArray, method: Method, most: int | None
    ) -> RunPart:
        """most: rows of the run's largest unit; None if no unit of any run has several."""
        present = place[place >= 0]
        first = np.append(0, np.cumsum(place >= 0))
        if method.participation == "known":
            owned = len(units) < log.n_examples
            known = KnownCells.of(log, units if owned else None, method)
            people = present if owned else units.positions[units.starts[present]]
            known = replace(known, squared_mu=known.squared_mu[people])
            return cls(log, known, np.arange(len(present) + 1), first)
        rows = [units.positions[first : first + n] for first, n in
                zip(units.starts[present], units.n_rows[present], strict=True)]  # fmt: skip
        order = np.concatenate(rows)
        if not np.array_equal(order, np.arange(log.n_examples)):
            log = log.take(order)
        if most is None:
            between_nodes = "up" if method.accountant == "pld" else "share"
            cells: Histogram | UnitCells | KnownCells = Histogram.of(
                log, method.between_records, between_nodes
            )
        else:
            cells = UnitCells.of(log, method.between_records, most)
        first_row = np.append(0, np.cumsum(units.n_rows[present]))
        return cls(log, cells, first_row, first)

    @property
    def n_columns(self) -> int:
        """Number of columns of the counts."""
        if isinstance(self.cells, KnownCells):
            return 1
        if isinstance(self.cells, UnitCells):
            return self.cells.n_cells
        return len(self.cells.mechanisms if self.cells.dense else self.cells.certain)

    def counts(self, start: int, stop: int) -> tuple[Counts | None, IntArray]:
        """Counts of the run's people among those from start to stop; each one's place, or -1."""
        inside = np.diff(self.first[start : stop + 1]) > 0
        place = np.where(inside, np.cumsum(inside) - 1, -1)
        rows = self.first_row[self.first[start] : self.first[stop] + 1]
        if len(rows) == 1:
            return None, place
        if isinstance(self.cells, KnownCells):
            return DenseCounts(self.cells.squared_mu[rows[0] : rows[-1], None]), place
        block = self.log.part(int(rows[0]), int(rows[-1]))
        if isinstance(self.cells, UnitCells):
            return self.cells.counts(block, rows[:-1] - rows[0]), place
        return self.cells.counts(block), place


@dataclass(frozen=True)
class JoinedCounts:
    """Counts over the cells of all runs, side by side; see Counts.

    Attributes:
        parts: of each run, the counts, the place of each of the n people in them, or -1, and the
            columns.
    """

    n: int
    parts: Sequence[tuple[Counts | None, IntArray, slice]]

    def __len__(self) -> int:
        return self.n

    def totals(self, table: FloatArray) -> FloatArray:
        """See Counts."""
        totals = np.zeros((self.n, len(table)))
        for counts, place, columns in self.parts:
            if counts is not None:
                totals[place >= 0] += counts.totals(np.ascontiguousarray(table[:, columns]))
        return totals

    def totals_at(self, examples: IntArray, table: FloatArray, rows: IntArray) -> FloatArray:
        """See Counts."""
        totals = np.zeros(len(examples))
        for counts, place, columns in self.parts:
            here = np.flatnonzero(place[examples] >= 0)
            if counts is not None and len(here):
                used, row = np.unique(rows[here], return_inverse=True)
                own = np.ascontiguousarray(table[used, columns])
                totals[here] += counts.totals_at(place[examples[here]], own, row)
        return totals

    def used_cells(self, examples: IntArray) -> NDArray[np.bool_]:
        """See Counts."""
        used = np.zeros(self.parts[-1][2].stop, dtype=bool)
        for counts, place, columns in self.parts:
            here = place[examples]
            if counts is not None:
                used[columns] = counts.used_cells(here[here >= 0])
        return used


@dataclass(frozen=True)
class JoinedCells:
    """The cells of runs of single rows, side by side; see Divergences."""

    parts: Sequence[RunPart]

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Divergences."""
        found = [part.cells.divergences(orders) for part in self.parts
                 if not isinstance(part.cells, UnitCells)]  # fmt: skip
        return np.hstack(found)


@dataclass(frozen=True)
class JoinedUnitCells:
    """The cells of runs of units, side by side; see SlowDivergences."""

    parts: Sequence[RunPart]

    @property
    def n_cells(self) -> int:
        """See SlowDivergences."""
        return sum(part.n_columns for part in self.parts)

    def divergences_at(self, cells: IntArray, orders: FloatArray) -> FloatArray:
        """See SlowDivergences."""
        ends, found = np.cumsum([part.n_columns for part in self.parts]), np.empty(len(cells))
        run = np.searchsorted(ends, cells, side="right")
        for number, part in enumerate(self.parts):
            if not isinstance(part.cells, Histogram):
                own = np.flatnonzero(run == number)
                first = ends[number] - part.n_columns
                found[own] = part.cells.divergences_at(cells[own] - first, orders[own])
        return found
