"""Cells that are nodes of a grid: for norms without rounding. Sensitive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.cells import Mechanisms, clipped_mechanisms
from indpriv.accountant.histogram.counts import Counts, bytes_of, collected
from indpriv.accountant.histogram.governing_records import Participations
from indpriv.accountant.histogram.governing_rows import GoverningRows, Rows
from indpriv.accountant.histogram.grid import NodeGrid

_SMALLEST_NORM = 1e-4  # relative; smaller ones share the chord to 0
_SMALLEST_WHOLE = (
    1e-3  # the same where steps are not shared: smaller ones count as this, or as nothing
)
_AT_ONCE = 1 << 20  # norms that are located together


@dataclass(frozen=True)
class NodeCells:
    """Cells that are the nodes of a grid.

    Attributes:
        mechanisms: the nodes.
        certain: (n_cells,) steps that every example spends in a cell: those counted at max_grad_norm.
        governing: rows and segments. grid: the nodes.
    """

    mechanisms: Mechanisms
    certain: FloatArray
    governing: GoverningRows
    grid: NodeGrid

    @classmethod
    def of(cls, governing: GoverningRows, *, between_nodes: str) -> NodeCells:
        """The cells of a run; between_nodes: see NodeGrid."""
        segments = governing.segments
        noise = segments.noise_multiplier
        smallest = _SMALLEST_NORM if between_nodes == "share" else _SMALLEST_WHOLE
        shifts = (smallest / noise.max(), 1 / noise.min())
        grid = NodeGrid.covering(shifts, segments.sample_rate, between_nodes=between_nodes)
        return cls(grid.mechanisms, grid.summed(*clipped_mechanisms(segments)), governing, grid)

    @property
    def _n_entries(self) -> int:
        return self.grid.n_corners * len(self.governing.known)

    @property
    def bytes_per_example(self) -> int:
        """See Cells."""
        return bytes_of(self._n_entries, len(self.certain))

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Cells."""
        return self.mechanisms.divergences(orders)

    def counts(self, rows: Rows) -> Counts:
        """See Cells."""
        return collected(self._entries(rows), rows.shape[1], self._n_entries, self.certain)

    def participations(self, rows: Rows) -> Participations:
        """See Cells; counts are whole numbers where the grid does not share."""
        counts = self.counts(rows).dense()
        used = np.flatnonzero(counts.any(axis=0))
        return self.mechanisms.take(used).participations(counts[:, used])

    def _entries(self, rows: Rows) -> Iterator[tuple[IntArray, FloatArray]]:
        """(k, n_examples) cells and steps, k segments at a time."""
        segments, known = self.governing.segments, self.governing.known
        chunk = max(1, _AT_ONCE // rows.shape[1])
        for start in range(0, len(known), chunk):
            index = known[start : start + chunk]
            setting = segments.setting[index]
            relative = np.minimum(
                rows[segments.row[index]] / segments.max_grad_norm[setting][:, None], 1.0
            )
            shift = relative / segments.noise_multiplier[setting][:, None]
            steps = np.broadcast_to(segments.count[index].astype(np.float64)[:, None], shift.shape)
            for cell, part in self.grid.share(shift, segments.sample_rate[setting]):
                yield cell, steps * part
