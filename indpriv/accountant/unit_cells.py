"""Cells of units with several rows: each stands for a number of equal rows of one norm. Sensitive.

[8.3] and [8.4] of docs/explanation/proofs.md say why this bounds what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.norms import AT_CLIPPING_NORM, GoverningNorms
from indpriv.accountant.rdp import Counts
from indpriv.accountant.steps import StepKinds, collected, neighbours
from indpriv.norm_log.norm_log import NormLog

MOST_ROWS = 1000  # equal rows of a cell; a unit with more rows is counted as this many larger ones
# Each number of rows up to the first of these has cells; beyond, numbers in this ratio.
_EVERY_NUMBER, _ROWS_RATIO = 64, 1.02
_MAX_LEVELS = 512  # levels of all settings together; beyond, shifts are nodes of a grid
_MAX_RATES = 32  # distinct sample rates; if there are more, they are rounded up to this many
# Of a grid of shifts. Between nodes a step is shared, which overstates RDP by 1e-4.
_NODE_RATIO, _SMALLEST = 1.02, 1e-3
_ROUNDING = 1e-12  # relative; far more than the floating-point error of sums of norms
_AT_ONCE = 1 << 19  # norms that are summed together


def row_numbers(largest: int) -> IntArray:
    """Numbers of rows that have cells, ascending from 1 to the first that is at least `largest`.

    None is above MOST_ROWS. They are taken from one fixed series, so that the epsilon of a unit
    does not depend on how many rows other units have.
    """
    beyond = math.ceil(math.log(MOST_ROWS / _EVERY_NUMBER) / math.log(_ROWS_RATIO))
    series = np.minimum(np.round(_EVERY_NUMBER * _ROWS_RATIO ** np.arange(beyond + 1)), MOST_ROWS)
    numbers = np.unique(np.concatenate([np.arange(1, _EVERY_NUMBER + 1), series])).astype(np.int64)
    return numbers[: int(np.searchsorted(numbers, min(largest, MOST_ROWS))) + 1]


@dataclass(frozen=True)
class UnitCells:
    """Cells (setting, number of rows, node): the node runs fastest.

    Attributes:
        mechanisms: of the cells.
        norms: which norm of a row counts in which step.
        row_numbers: (n_numbers,) see `row_numbers`.
        nodes: (n_nodes,) ascending from 0, among which norms of rows are located: levels, or
            shifts.
        scale: (n_settings,) from a relative norm to the unit of the nodes, by setting of a step.
        setting: (n_settings,) setting of a cell, by setting of a step.
        between_nodes: whether norms lie between nodes, not on them.
    """

    mechanisms: StepKinds
    norms: GoverningNorms
    row_numbers: IntArray
    nodes: FloatArray
    scale: FloatArray
    setting: IntArray
    between_nodes: bool

    @classmethod
    def of(cls, log: NormLog, between_records: str, largest_unit: int) -> UnitCells:
        """The cells of a log whose largest unit has this number of rows."""
        norms = GoverningNorms.of(log, between_records)
        distinct, numbers = norms.settings, row_numbers(largest_unit)
        pairs = np.stack([distinct.noise_multiplier, distinct.sample_rate], axis=1)
        settings, setting = np.unique(pairs, axis=0, return_inverse=True)
        tables = np.unique(norms.codes.table(distinct.max_grad_norm), axis=0)
        levels = np.unique(tables[0])
        few = len(settings) * len(levels) <= _MAX_LEVELS and largest_unit <= MOST_ROWS
        if norms.codes.direct and len(tables) == 1 and few:
            mechanisms = _all_rows(levels / settings[:, :1], settings[:, 1], numbers)
            scale = np.ones(len(setting))
            return cls(mechanisms, norms, numbers, levels, scale, setting.ravel(), False)
        rates, rate = _rounded_up(distinct.sample_rate)
        noise = distinct.noise_multiplier
        largest = max(1.0, largest_unit / MOST_ROWS) / noise.min()
        nodes = _shift_nodes(_SMALLEST / noise.max(), largest)
        mechanisms = _all_rows(np.broadcast_to(nodes, (len(rates), len(nodes))), rates, numbers)
        return cls(mechanisms, norms, numbers, nodes, 1 / noise, rate, True)

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self.mechanisms)

    @property
    def bytes_per_unit(self) -> int:
        """Memory that the counts of one unit take."""
        counts = 8 * self.n_cells if self._dense else 32 * self._n_entries
        return counts + self.norms.bytes_per_example

    @property
    def _dense(self) -> bool:
        return self._n_entries > self.n_cells

    @property
    def _n_entries(self) -> int:
        return (4 if self.between_nodes else 2) * len(self.norms.record)

    def counts(self, block: NormLog, starts: IntArray) -> Counts:
        """Counts over the cells of the units whose rows are consecutive examples of a block.

        starts: (n_units,) position of each unit's first example.
        """
        entries = self._entries(self.norms.read(block), starts)
        return collected(entries, len(starts), self.n_cells, dense=self._dense)

    def _entries(
        self, values: NDArray[Any], starts: IntArray
    ) -> Iterator[tuple[IntArray, FloatArray]]:
        """(k, n_units) cells and steps, some groups of steps at a time."""
        norms = self.norms
        n_rows = np.diff(np.append(starts, values.shape[1]))
        chunk = max(1, _AT_ONCE // values.shape[1])
        for begin in range(0, len(norms.record), chunk):
            index = np.arange(begin, min(begin + chunk, len(norms.record)))
            largest, total = self._sums(values, starts, n_rows, index)
            setting = norms.setting[index]
            scale = self.scale[setting][:, None]
            first = self.setting[setting][:, None] * (len(self.row_numbers) * len(self.nodes))
            steps = norms.steps[index].astype(np.float64)[:, None]
            for cell, share in self._located(largest * scale, total * scale):
                yield first + cell, steps * share

    def _sums(
        self, values: NDArray[Any], starts: IntArray, n_rows: IntArray, index: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """(len(index), n_units) the largest relative norm of a unit's rows, and the sum of them."""
        norms = self.norms
        record, clip = norms.record[index], norms.settings.max_grad_norm[norms.setting[index]]
        largest = np.ones((len(index), len(starts)))
        total = np.broadcast_to(n_rows.astype(np.float64), largest.shape).copy()
        known = np.flatnonzero(record != AT_CLIPPING_NORM)
        if len(known):
            relative = norms.codes.relative(values[record[known]], clip[known, None])
            largest[known] = np.maximum.reduceat(relative, starts, axis=1)
            total[known] = np.add.reduceat(relative, starts, axis=1) * (1 + _ROUNDING)
        return largest, total

    def _located(
        self, largest: FloatArray, total: FloatArray
    ) -> Iterator[tuple[IntArray, FloatArray]]:
        """Cells of the first setting, and the shares of a step that count there.

        Sharing a step between neighbouring cells is a bound [8.3] [8.4].
        """
        n_nodes = len(self.nodes)
        if self.between_nodes:
            norm = np.maximum(largest, total / MOST_ROWS)
            below, above, up = neighbours(self.nodes, norm, np.positive)
            parts = [(below, 1 - up), (above, up)]
        else:  # levels, and few enough rows
            above = np.minimum(np.searchsorted(self.nodes, largest), n_nodes - 1)
            norm, parts = self.nodes[above], [(above, np.ones(largest.shape))]
        rows = np.divide(total, norm, out=np.ones(norm.shape), where=norm > 0)
        fewer, more, rest = neighbours(self.row_numbers.astype(np.float64), rows, np.positive)
        for node, part in parts:
            yield fewer * n_nodes + node, part * (1 - rest)
            yield more * n_nodes + node, part * rest


def _all_rows(shifts: FloatArray, rates: FloatArray, numbers: IntArray) -> StepKinds:
    """Mechanisms by setting, number of rows and node; shifts has shape (n_settings, n_nodes)."""
    shape = (len(rates), len(numbers), shifts.shape[1])
    return StepKinds(
        np.broadcast_to(shifts[:, None, :], shape).ravel(),
        np.broadcast_to(rates[:, None, None], shape).ravel(),
        np.broadcast_to(numbers[None, :, None], shape).ravel(),
    )


def _shift_nodes(smallest: float, largest: float) -> FloatArray:
    """0, then a geometric series from smallest to largest."""
    n = int(np.ceil(np.log(largest / smallest) / np.log(_NODE_RATIO))) + 1
    return np.append(0.0, np.geomspace(smallest, largest, max(n, 2)) * (1 + _ROUNDING))


def _rounded_up(rates: FloatArray) -> tuple[FloatArray, IntArray]:
    """Distinct sample rates and their indices; too many are rounded up to a geometric series."""
    distinct, index = np.unique(rates, return_inverse=True)
    if len(distinct) <= _MAX_RATES:
        return distinct, index.ravel()
    series = np.minimum(
        np.geomspace(distinct[0], distinct[-1], _MAX_RATES) * (1 + _ROUNDING), distinct[-1]
    )
    series[-1] = distinct[-1]
    return series, np.searchsorted(series, rates)
