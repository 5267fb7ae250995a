"""Cells that are levels under a setting: exact histograms of runs with few distinct settings. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.cells import Mechanisms, clipped_mechanisms
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.governing_records import Participations
from indpriv.accountant.histogram.governing_rows import CodeTable, GoverningRows, Rows

_TABLE_BYTES = 1 << 18  # of one histogram in the making: it stays in cache


@dataclass(frozen=True)
class Group:
    """Rows whose codes fall into the same cells with one weight; cell has shape (n_codes,) and ascends."""

    rows: IntArray
    cell: IntArray
    weight: float


@dataclass(frozen=True)
class LevelCells:
    """Cells that are levels under a setting.

    Attributes:
        mechanisms: the cells.
        certain: (n_cells,) steps that every example spends in a cell: those counted at max_grad_norm.
        groups: how codes fall into cells.
    """

    mechanisms: Mechanisms
    certain: FloatArray
    groups: tuple[Group, ...]

    @classmethod
    def of(
        cls, governing: GoverningRows, codes: CodeTable, keys: FloatArray, key_of: IntArray
    ) -> LevelCells:
        """The cells of segments with these distinct settings; see `distinct_settings`."""
        segments, known = governing.segments, governing.known
        relative = np.minimum(codes.value[keys[:, 3].astype(np.int64)] * keys[:, 2:3], 1.0)
        settings = np.broadcast_to(keys[:, None, :2], (*relative.shape, 2))
        met = np.concatenate([relative[:, :, None], settings], axis=2).reshape(-1, 3)
        clipped, steps = clipped_mechanisms(segments)
        certain = np.stack(
            [clipped.relative_norms, clipped.noise_multiplier, clipped.sample_rate], axis=1
        )
        cells, inverse = np.unique(np.concatenate([met, certain]), axis=0, return_inverse=True)
        inverse = inverse.ravel()
        cell_of_code = inverse[: len(met)].reshape(relative.shape)
        kinds, kind_of = np.unique(
            np.stack([key_of, segments.count[known]], axis=1), axis=0, return_inverse=True
        )
        groups = (
            Group(segments.row[known[kind_of.ravel() == kind]], cell_of_code[key], float(count))
            for kind, (key, count) in enumerate(kinds)
        )
        return cls(
            Mechanisms(cells[:, 0], cells[:, 1], cells[:, 2]),
            np.bincount(inverse[len(met) :], weights=steps, minlength=len(cells)).astype(
                np.float64
            ),
            tuple(groups),
        )

    @property
    def bytes_per_example(self) -> int:
        """See Cells."""
        return 8 * len(self.certain)

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Cells."""
        return self.mechanisms.divergences(orders)

    def counts(self, rows: Rows) -> DenseCounts:
        """See Cells."""
        counts = np.tile(self.certain, (rows.shape[1], 1))
        for group in self.groups:
            _add_group(counts, rows, group)
        return DenseCounts(counts)

    def participations(self, rows: Rows) -> Participations:
        """See Cells; counts are whole numbers."""
        return self.mechanisms.participations(self.counts(rows).value)


def distinct_settings(governing: GoverningRows, codes: CodeTable) -> tuple[FloatArray, IntArray]:
    """Distinct (noise_multiplier, sample_rate, unit / max_grad_norm, row of the code table) of the known segments.

    Returns:
        (n_keys, 4) and the (n_known,) key of each segment.
    """
    segments, known = governing.segments, governing.known
    setting, row = segments.setting[known], segments.row[known]
    table = (
        np.where(row >= governing.n_records, row, 0)
        if codes.translate
        else np.zeros(len(row), np.int64)
    )
    ratio = codes.unit[row] / segments.max_grad_norm[setting]
    columns = np.stack(
        [segments.noise_multiplier[setting], segments.sample_rate[setting], ratio, table], axis=1
    )
    keys, inverse = np.unique(columns, axis=0, return_inverse=True)
    return keys, inverse.ravel()


def _add_group(counts: FloatArray, rows: Rows, group: Group) -> None:
    """Count codes without weights, then move the counts to their cells."""
    n_codes = len(group.cell)
    cells, starts = np.unique(group.cell, return_index=True)
    consecutive = cells[-1] - cells[0] == len(cells) - 1
    target: slice | IntArray = slice(cells[0], cells[-1] + 1) if consecutive else cells
    repeated = np.setdiff1d(
        np.arange(n_codes), starts
    )  # codes that share the cell of the code before them
    step = max(1, _TABLE_BYTES // (8 * n_codes))
    everything = len(group.rows) == len(rows)
    for start in range(0, rows.shape[1], step):
        block = rows[:, start : start + step]
        block = block if everything else block[group.rows]
        flat = block + np.arange(block.shape[1]) * n_codes
        seen = np.bincount(flat.ravel(), minlength=block.shape[1] * n_codes).reshape(-1, n_codes)
        for code in repeated[::-1]:
            seen[:, code - 1] += seen[:, code]
        counts[start : start + step, target] += group.weight * seen[:, starts]
