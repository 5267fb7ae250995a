"""Counts the steps of examples by cell: a code of a record, with all the steps that it governs.

Records of one *mix* govern the same numbers of steps under the same settings, up to a factor. A
cell is (mix, code): however many settings the steps of a record have, an example meets one cell per
record. If cells are few, mixes are single settings, and mechanisms are counted in place of cells.
Sensitive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.counts import Counts, DenseCounts, SparseCounts
from indpriv.accountant.histogram.governing_records import AT_CLIPPING_NORM, GoverningRecords
from indpriv.accountant.histogram.lattice import Lattice
from indpriv.accountant.histogram.mechanisms import Mechanisms, Participations
from indpriv.accountant.histogram.norm_codes import NormCodes

Located = Sequence[
    tuple[NDArray[np.integer], FloatArray | None]
]  # codes, and their shares of a step

# The number of (setting, code) mechanisms up to which each is a node of its own, and of nodes of a
# lattice beyond. Accountants of loss distributions need far longer for each.
_MOST_OWN = {"share": 1 << 14, "up": 1 << 13, "down": 1 << 13}
_RATIO = {"share": 4e-3, "up": 1.5e-3, "down": 1.5e-3}  # of neighbouring nodes, if these suffice
_MOST_NODES = {"share": 1 << 14, "up": 1 << 14, "down": 1 << 14}
_MOST_DENSE = 2048  # (setting, code) cells that are counted in a dense array
_TABLE_BYTES = 1 << 18  # of the counts in the making: they stay in cache
_AT_ONCE = 1 << 20  # (setting, code) pairs that are located together


@dataclass(frozen=True)
class Cells:
    """Cells (mix, code) of a log, the code running fastest.

    Attributes:
        mechanisms: (n_mechanisms,) that the steps of cells are taken with.
        steps: (n_cells, n_mechanisms) steps of one count of each cell.
        n_codes: of each mix.
        record: (n_entries,) records that examples are counted at.
        first: (n_entries,) cell of code 0 of the record's mix. weight: (n_entries,) counts.
        certain: (n_cells,) counts of every example, for steps at max_grad_norm.
        dense: counts are of mechanisms, not of cells.
        exact: mechanisms are those of the codes, not nodes of a lattice.
    """

    mechanisms: Mechanisms
    steps: csr_array
    n_codes: int
    record: IntArray
    first: IntArray
    weight: IntArray
    certain: FloatArray
    dense: bool
    exact: bool

    @classmethod
    def of(cls, governing: GoverningRecords, codes: NormCodes) -> Cells:
        """The cells of a log."""
        n_codes, n_settings = codes.n_codes, len(governing.sample_rate)
        dense = n_settings * n_codes <= _MOST_DENSE
        if dense:
            record, mix, weight = governing.record, governing.setting, governing.steps
            mixes = csr_array(np.eye(n_settings))
        else:
            record, mix, weight, mixes = _mixes(governing, n_settings)
        known = record != AT_CLIPPING_NORM
        certain = np.zeros(mixes.shape[0] * n_codes)
        np.add.at(certain, (mix[~known] + 1) * n_codes - 1, weight[~known])
        mechanisms, steps = _steps_of_cells(mixes, governing, codes)
        return cls(
            mechanisms,
            steps,
            n_codes,
            record[known],
            mix[known] * n_codes,
            weight[known],
            certain,
            dense,
            n_settings * n_codes <= _MOST_OWN[codes.between_nodes],
        )

    @property
    def bytes_per_example(self) -> int:
        """Memory that the counts of one example take."""
        n_cells = len(self.certain) + len(self.mechanisms)
        return 8 * n_cells if self.dense else 64 * len(self.record)

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n) Rényi divergences of one count of each column of the counts."""
        values = self.mechanisms.divergences(orders)
        return values if self.dense else np.ascontiguousarray((self.steps @ values.T).T)

    def counts(self, located: Located) -> Counts:
        """Counts of the examples whose records (n_records, n_examples) have these codes."""
        if not self.dense:
            return self._entries(located)
        counts = np.tile(self.certain, (located[0][0].shape[1], 1))
        for first in np.unique(self.first):
            chosen = self.first == first
            target = counts[:, first : first + self.n_codes]
            for codes, part in located:
                _add_codes(target, codes, part, self.record[chosen], self.weight[chosen])
        return self.mechanism_counts(counts)

    def mechanism_counts(self, counts: FloatArray) -> DenseCounts:
        """Counts by mechanism, from counts (n_examples, n_cells)."""
        return DenseCounts(np.ascontiguousarray(counts @ self.steps))

    def participations(self, counts: Counts) -> Participations:
        """The histogram over the mechanisms that any of the examples met."""
        if isinstance(counts, SparseCounts):
            found = (counts.matrix() @ self.steps).toarray() + counts.certain @ self.steps
        else:
            found = counts.dense()
        used = np.flatnonzero(found.any(axis=0))
        return self.mechanisms.take(used).participations(found[:, used])

    def _entries(self, located: Located) -> SparseCounts:
        cells, weights = [], []
        for codes, part in located:
            chosen = codes[self.record]
            cells.append((chosen + self.first[:, None]).T.astype(np.int32))
            weight = (
                self.weight[:, None] if part is None else part[self.record] * self.weight[:, None]
            )
            weights.append(np.broadcast_to(weight, chosen.shape).T)
        return SparseCounts(
            np.concatenate(cells, axis=1),
            np.concatenate(weights, axis=1, dtype=np.float64),
            self.certain,
        )


def _mixes(
    governing: GoverningRecords, n_settings: int
) -> tuple[IntArray, IntArray, IntArray, csr_array]:
    """Records, their mixes and weights, and the (n_mixes, n_settings) steps of one count."""
    records, starts = np.unique(governing.record, return_index=True)
    weight = np.gcd.reduceat(governing.steps, starts)
    steps = governing.steps // np.repeat(weight, np.diff(np.append(starts, len(governing.steps))))
    seen: dict[tuple[bytes, bytes], int] = {}
    mix, columns, values = [], [], []
    for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True):
        setting, share = governing.setting[start:stop], steps[start:stop]
        key = (setting.tobytes(), share.tobytes())
        if key not in seen:
            seen[key] = len(seen)
            columns.append(setting)
            values.append(share)
        mix.append(seen[key])
    ends = np.cumsum([0, *map(len, columns)])
    parts = (np.concatenate(values).astype(np.float64), np.concatenate(columns), ends)
    return records, np.array(mix), weight, csr_array(parts, shape=(len(seen), n_settings))


def _steps_of_cells(
    mixes: csr_array, governing: GoverningRecords, codes: NormCodes
) -> tuple[Mechanisms, csr_array]:
    """Mechanisms, and the (n_cells, n_mechanisms) steps of one count of each cell."""
    relative, rate = codes.table(governing.max_grad_norm), governing.sample_rate
    mechanisms, locate = _placed(relative, governing.noise_multiplier, rate, codes.between_nodes)
    n_codes = codes.n_codes
    shape = (mixes.shape[0] * n_codes, len(mechanisms))
    total = csr_array(shape)
    mix = np.repeat(np.arange(mixes.shape[0]), np.diff(mixes.indptr))
    chunk = max(1, _AT_ONCE // n_codes)
    for start in range(0, mixes.nnz, chunk):
        part = slice(start, start + chunk)
        setting, steps = mixes.indices[part].astype(np.int64), mixes.data[part, None]
        cell = mix[part, None] * n_codes + np.arange(n_codes)
        for index, share in locate(setting):
            entries = np.broadcast_to(share * steps, cell.shape).ravel()
            total = total + csr_array((entries, (cell.ravel(), index.ravel())), shape=shape)
    total.eliminate_zeros()
    return mechanisms, total


def _placed(
    relative: FloatArray, noise: FloatArray, rate: FloatArray, between_nodes: str
) -> tuple[Mechanisms, Callable[[IntArray], Iterable[tuple[IntArray, FloatArray | float]]]]:
    """Mechanisms, and where the codes of settings lie among them: (index, share of a step).

    relative: (n_settings, n_codes). noise, rate: (n_settings,).
    """
    if relative.size <= _MOST_OWN[between_nodes]:
        settings = np.broadcast_to(np.stack([noise, rate], axis=1)[:, None], (*relative.shape, 2))
        met = np.concatenate([relative[:, :, None], settings], axis=2).reshape(-1, 3)
        distinct, index = np.unique(met, axis=0, return_inverse=True)
        places = index.reshape(relative.shape)
        return Mechanisms(*distinct.T), lambda setting: [(places[setting], 1.0)]
    shifts, most = relative / noise[:, None], _MOST_NODES[between_nodes]
    ratio = _RATIO[between_nodes]
    lattice = Lattice.covering(shifts, rate, between_nodes, ratio=ratio, most=most)
    return lattice.mechanisms, lambda setting: lattice.locate(shifts[setting], rate[setting])


def _add_codes(
    counts: FloatArray,
    codes: NDArray[np.integer],
    part: FloatArray | None,
    records: IntArray,
    weight: IntArray,
) -> None:
    """Add the weights of records, times shares, to counts (n_examples, n_codes) in place."""
    n_codes = counts.shape[1]
    equal = bool((weight == weight[0]).all()) and part is None
    everything = len(records) == len(codes)
    step = max(1, _TABLE_BYTES // (8 * n_codes))
    for start in range(0, len(counts), step):
        block = slice(start, start + step)
        chosen = codes[:, block] if everything else codes[records, block]
        flat = chosen + np.arange(chosen.shape[1]) * n_codes
        weights = None
        if not equal:
            share = weight[:, None] if part is None else part[records, block] * weight[:, None]
            weights = np.broadcast_to(share, chosen.shape).ravel()
        seen = np.bincount(flat.ravel(), weights=weights, minlength=chosen.shape[1] * n_codes)
        counts[block] += (weight[0] if equal else 1) * seen.reshape(-1, n_codes)
