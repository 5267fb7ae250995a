"""Cells that are codes of a row, with all the steps that the row governs: for many settings or levels. Sensitive.

However many settings the steps of a record have, an example meets one cell a record. The divergence of a cell is a sum
over the nodes of a grid of mechanisms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.cells import Mechanisms, clipped_mechanisms
from indpriv.accountant.histogram.counts import Counts, DenseCounts, SparseCounts
from indpriv.accountant.histogram.governing_records import Participations, Segments
from indpriv.accountant.histogram.governing_rows import CodeTable, GoverningRows, Rows
from indpriv.accountant.histogram.grid import NodeGrid

_FEW_SCALES = (
    64  # so many distinct (noise_multiplier, clipping ratio) keep their own levels as nodes
)
_UNROLLED_NODES = (
    8  # so many nodes a cell are cheaper to count than a table of all cells is to make
)
_AT_ONCE = 1 << 20  # (segment, code) pairs that are located together


@dataclass(frozen=True)
class CompositeCells:
    """Cells that are codes of rows of one kind: rows that govern the same numbers of steps under the same settings.

    Where the steps of a cell fall on a few nodes only, its nodes are counted in its place.

    Attributes:
        mechanisms: the nodes that are used.
        steps: (n_cells, n_nodes) steps of each cell at each node; the last cell holds the steps that every example
            counts at max_grad_norm.
        first: (n_rows,) cell of code 0 of each row.
        unrolled: (n_cells, k) nodes and weights of each cell, or None.
    """

    mechanisms: Mechanisms
    steps: csr_array
    first: IntArray
    unrolled: tuple[NDArray[np.int32], FloatArray] | None

    @classmethod
    def of(
        cls, governing: GoverningRows, codes: CodeTable, keys: FloatArray, *, between_nodes: str
    ) -> CompositeCells:
        """The cells of a run with these distinct settings (see level_cells); between_nodes: see NodeGrid."""
        segments = governing.segments
        grid = _grid(governing, codes, keys, between_nodes)
        kind, representative = _kinds(governing, codes)
        chosen = np.isin(segments.row, representative)
        certain = grid.summed(*clipped_mechanisms(segments))
        last = len(representative) * codes.n_codes
        cell, node, steps = _entries(segments, codes, grid, np.flatnonzero(chosen), kind)
        everyone = np.flatnonzero(certain)
        used = np.union1d(node, everyone)
        table = csr_array(
            (
                np.append(steps, certain[everyone]),
                (
                    np.append(cell, np.full(len(everyone), last)),
                    np.searchsorted(used, np.append(node, everyone)),
                ),
            ),
            shape=(last + 1, len(used)),
        )
        return cls(grid.mechanisms.take(used), table, kind * codes.n_codes, _unrolled(table[:last]))

    @property
    def _n_entries(self) -> int:
        return len(self.first) * (1 if self.unrolled is None else self.unrolled[0].shape[1]) + 1

    @property
    def _dense(self) -> bool:
        return self.unrolled is not None and self._n_entries > len(self.mechanisms)

    @property
    def bytes_per_example(self) -> int:
        """See Cells."""
        return 32 * self._n_entries + (8 * len(self.mechanisms) if self._dense else 0)

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Cells."""
        values = self.mechanisms.divergences(orders)
        return (
            values if self.unrolled is not None else np.ascontiguousarray((self.steps @ values.T).T)
        )

    def counts(self, rows: Rows) -> Counts:
        """See Cells."""
        cells = (rows.T + self.first).astype(np.int32)
        if self.unrolled is None:
            certain = np.zeros(self.steps.shape[0])
            certain[-1] = 1.0
            return SparseCounts(cells, np.ones(cells.shape), certain)
        node, weight = self.unrolled[0][cells], self.unrolled[1][cells]
        shape = (len(cells), node[0].size)
        counts = SparseCounts(
            node.reshape(shape), weight.reshape(shape), self.steps[[-1]].toarray()[0]
        )
        return DenseCounts(counts.dense()) if self._dense else counts

    def participations(self, rows: Rows) -> Participations:
        """See Cells; counts are whole numbers where the grid does not share."""
        counts = self.counts(rows)
        if self.unrolled is not None:
            return self.mechanisms.participations(counts.dense())
        met = SparseCounts(
            (rows.T + self.first).astype(np.int32),
            np.ones(rows.T.shape),
            np.zeros(self.steps.shape[0]),
        )
        certain = self.steps[[-1]].toarray()
        return self.mechanisms.participations((met.matrix() @ self.steps).toarray() + certain)


def _grid(
    governing: GoverningRows, codes: CodeTable, keys: FloatArray, between_nodes: str
) -> NodeGrid:
    """A grid for all levels under all settings: the levels themselves where settings are few."""
    scales = np.unique(keys[:, [0, 2, 3]], axis=0)
    levels = codes.value[scales[:, 2].astype(np.int64)]
    first = np.minimum(levels[:, 1] * scales[:, 1], 1.0) / scales[:, 0]
    noise = governing.segments.noise_multiplier
    largest = float(1 / noise.min())
    own = None
    if len(scales) <= _FEW_SCALES:
        own = np.minimum(levels * scales[:, 1:2], 1.0) / scales[:, :1]
        own = np.unique(np.append(own.ravel(), 1 / noise))
    shifts = (min(float(first.min()), largest / 2), largest)
    return NodeGrid.covering(
        shifts, governing.segments.sample_rate, own=own, between_nodes=between_nodes
    )


def _kinds(governing: GoverningRows, codes: CodeTable) -> tuple[IntArray, IntArray]:
    """Kind of each row, and a row of each kind: rows of one kind have equal codes, settings and numbers of steps."""
    segments, known = governing.segments, governing.known
    rows, starts = np.unique(segments.row[known], return_index=True)
    seen: dict[tuple[object, ...], int] = {}
    kind, representative = np.zeros(len(codes.value), np.int64), []
    for row, part in zip(rows, np.split(known, starts[1:]), strict=True):
        table = int(row) if codes.translate and row >= governing.n_records else -1
        key = (
            table,
            codes.unit[row],
            segments.setting[part].tobytes(),
            segments.count[part].tobytes(),
        )
        if key not in seen:
            seen[key] = len(seen)
            representative.append(row)
        kind[row] = seen[key]
    return kind, np.array(representative, dtype=np.int64)


def _entries(
    segments: Segments, codes: CodeTable, grid: NodeGrid, index: IntArray, kind: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """Cell, node and steps of each entry of these segments; like steps of a row fall together."""
    n_nodes = len(grid.mechanisms)
    chunk = max(1, _AT_ONCE // codes.n_codes)
    parts = [
        _located(segments, codes, grid, index[at : at + chunk], kind)
        for at in range(0, len(index), chunk)
    ]
    key, steps = _merged(parts)
    return key // n_nodes, key % n_nodes, steps


def _located(
    segments: Segments, codes: CodeTable, grid: NodeGrid, index: IntArray, kind: IntArray
) -> tuple[IntArray, FloatArray]:
    """Steps by cell * n_nodes + node of some segments."""
    setting, row = segments.setting[index], segments.row[index]
    relative = codes.relative_norms(row, segments.max_grad_norm[setting])
    shift = relative / segments.noise_multiplier[setting][:, None]
    count = segments.count[index].astype(np.float64)[:, None]
    first = (kind[row][:, None] * codes.n_codes + np.arange(codes.n_codes)) * len(grid.mechanisms)
    parts = []
    for node, share in grid.share(shift, segments.sample_rate[setting]):
        parts.append(((node + first).ravel(), np.broadcast_to(count * share, node.shape).ravel()))
    return _merged(parts)


def _merged(parts: list[tuple[IntArray, FloatArray]]) -> tuple[IntArray, FloatArray]:
    keys, inverse = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    total = np.bincount(
        inverse.ravel(), weights=np.concatenate([part[1] for part in parts])
    ).astype(np.float64)
    return keys[total > 0], total[total > 0]


def _unrolled(steps: csr_array) -> tuple[NDArray[np.int32], FloatArray] | None:
    """(n_cells, k) nodes and weights of each cell, where k is small."""
    lengths = np.diff(steps.indptr)
    width = int(lengths.max(initial=0))
    if width > _UNROLLED_NODES:
        return None
    node, weight = np.zeros((len(lengths), width), np.int32), np.zeros((len(lengths), width))
    cell = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(cell)) - np.repeat(steps.indptr[:-1], lengths)
    node[cell, place], weight[cell, place] = steps.indices, steps.data
    return node, weight
