"""The histogram of a log: in how many steps each example met each one-step mechanism.

Steps are counted by *cell*: a code of a record, with all the steps that the record governs. Records
of one *mix* govern the same numbers of steps under the same settings, up to a factor. A cell is
(mix, code): however many settings the steps of a record have, an example meets one cell per record.
If cells are few, mixes are single settings, and mechanisms are counted in place of cells.
Sensitive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.counts import DenseCounts, SparseCounts
from indpriv.accountant.histogram.governing_norms import AT_CLIPPING_NORM, GoverningNorms
from indpriv.accountant.histogram.lattice import Lattice
from indpriv.accountant.histogram.mechanisms import Mechanisms, Participations
from indpriv.accountant.histogram.norm_codes import NormCodes
from indpriv.norm_log.norm_log import NormLog

# The number of (setting, code) mechanisms up to which each is a node of its own, and of nodes of a
# lattice beyond. Accountants of loss distributions need far longer for each.
_MOST_OWN = {"share": 1 << 14, "chord": 0, "up": 1 << 13, "down": 1 << 13}
_RATIO = {"share": 4e-3, "up": 1.5e-3, "down": 1.5e-3}  # of neighbouring nodes, if these suffice
_MOST_NODES = {"share": 1 << 14, "up": 1 << 14, "down": 1 << 14}
_MOST_DENSE = 2048  # (setting, code) cells that are counted in a dense array
_TABLE_BYTES = 1 << 18  # of the counts in the making: they stay in cache
_AT_ONCE = 1 << 20  # (setting, code) pairs that are located together


@dataclass(frozen=True)
class Histogram:
    """How the norms of a log are counted: cells (mix, code), the code running fastest.

    Attributes:
        norms: which norm of an example counts in which step.
        mechanisms: (n_mechanisms,) that the steps of cells are taken with.
        lattice: of chords, whose nodes the mechanisms are; None without.
        steps: (n_cells, n_mechanisms) steps of one count of each cell.
        record: (n_entries,) records that examples are counted at.
        first: (n_entries,) cell of code 0 of the record's mix. weight: (n_entries,) counts.
        certain: (n_cells,) counts of every example, for steps at max_grad_norm.
        dense: counts are of mechanisms, not of cells.
        exact: nothing is counted at the nodes of a lattice.
    """

    norms: GoverningNorms
    mechanisms: Mechanisms
    lattice: Lattice | None
    steps: csr_array
    record: IntArray
    first: IntArray
    weight: IntArray
    certain: FloatArray
    dense: bool
    exact: bool

    @classmethod
    def of(cls, log: NormLog, between_records: str, between_nodes: str = "share") -> Histogram:
        """Lay out the steps of a log.

        Norms without rounding and very many settings are counted at the nodes of a lattice.

        Args:
            log: the log.
            between_records: what governs steps between records; see `indpriv.account`.
            between_nodes: "share" a step between neighbouring nodes, which is for RDP alone, or
                count it at one of them, "up" or "down"; or "chord" (see pld/chords.py).
        """
        norms = GoverningNorms.of(log, between_records, between_nodes)
        n_codes, n_settings = norms.codes.n_codes, len(norms.settings)
        dense = n_settings * n_codes <= _MOST_DENSE
        if dense:
            record, mix, weight = norms.record, norms.setting, norms.steps
            mixes = csr_array(np.eye(n_settings))
        else:
            record, mix, weight, mixes = _mixes(norms)
        known = record != AT_CLIPPING_NORM
        certain = np.zeros(mixes.shape[0] * n_codes)
        np.add.at(certain, (mix[~known] + 1) * n_codes - 1, weight[~known])
        mechanisms, lattice, steps = _steps_of_cells(mixes, norms)
        return cls(
            norms=norms,
            mechanisms=mechanisms,
            lattice=lattice,
            steps=steps,
            record=record[known],
            first=mix[known] * n_codes,
            weight=weight[known],
            certain=certain,
            dense=dense,
            exact=norms.codes.exact and n_settings * n_codes <= _MOST_OWN[between_nodes],
        )

    @property
    def bytes_per_example(self) -> int:
        """Memory that the counts of one example take, and what they are made from."""
        n_cells = len(self.certain) + len(self.mechanisms)
        counts = 8 * n_cells if self.dense else 64 * len(self.record)
        return self.norms.bytes_per_example + counts

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n) Rényi divergences of one count of each column of the counts."""
        return self.per_count(self.mechanisms.divergences(orders))

    def per_count(self, values: FloatArray) -> FloatArray:
        """(n_rows, n) of one count of each column of the counts; values: (n_rows, n_mechanisms)."""
        return values if self.dense else np.ascontiguousarray((self.steps @ values.T).T)

    def counts(self, block: NormLog) -> DenseCounts | SparseCounts:
        """Counts of a block of examples."""
        if not self.dense:
            return self._by_cell(block)
        by_cell = self._by_span if self.norms.log.batch_norms is not None else self._by_record
        return DenseCounts(np.ascontiguousarray(by_cell(block) @ self.steps))

    def participations(self, block: NormLog) -> Participations:
        """The histogram of a block over all mechanisms.

        Numbers of steps are whole unless nodes share steps.
        """
        counts = self.counts(block)
        if isinstance(counts, DenseCounts):
            found = counts.value
        else:
            found = (counts.matrix() @ self.steps).toarray() + counts.certain @ self.steps
        return self.mechanisms.participations(found)

    def _by_record(self, block: NormLog) -> FloatArray:
        """(n_examples, n_cells) counts of dense cells."""
        located = self.norms.codes.located(self.norms.read(block))
        counts = np.tile(self.certain, (block.n_examples, 1))
        for first in np.unique(self.first):
            chosen = self.first == first
            target = counts[:, first : first + self.norms.codes.n_codes]
            for codes, part in located:
                _add_codes(target, codes, part, self.record[chosen], self.weight[chosen])
        return counts

    def _by_span(self, block: NormLog) -> FloatArray:
        """The same with batch norms, where each example has spans of its own."""
        norms, n_codes = self.norms, self.norms.codes.n_codes
        spans = norms.known(block).spans(norms.between_records, norms.log.total_steps)
        counts = np.zeros((spans.n_examples, len(self.certain)))
        tied = np.flatnonzero(spans.tie)
        end = spans.begin + spans.length
        parts = [
            (spans.example, spans.norm, spans.begin, end),
            (spans.example[tied], spans.tie_norm[tied], end[tied], end[tied] + 1),
        ]
        for example, values, begin, stop in parts:
            start = example.astype(np.int64) * n_codes
            for code, share in norms.codes.located(values):
                for setting, before in enumerate(self._steps_before):
                    steps = before[stop] - before[begin]
                    weights = steps if share is None else steps * share
                    seen = np.bincount(start + code, weights, minlength=spans.n_examples * n_codes)
                    first = setting * n_codes
                    counts[:, first : first + n_codes] += seen.reshape(-1, n_codes)
        return counts

    @property
    def _steps_before(self) -> IntArray:
        """(n_settings, total_steps + 1) steps under each setting before each step."""
        setting = np.empty(len(self.norms.record), np.int64)
        setting[self.norms.record] = self.norms.setting
        under = setting == np.arange(len(self.norms.settings))[:, None]
        return np.cumsum(np.pad(under, ((0, 0), (1, 0))), axis=1)

    def _by_cell(self, block: NormLog) -> SparseCounts:
        cells, weights = [], []
        for codes, part in self.norms.codes.located(self.norms.read(block)):
            chosen = codes[self.record]
            cells.append((chosen + self.first[:, None]).T.astype(np.int32))
            share = 1 if part is None else part[self.record]
            weights.append(np.broadcast_to(share * self.weight[:, None], chosen.shape).T)
        return SparseCounts(
            np.concatenate(cells, axis=1),
            np.concatenate(weights, axis=1, dtype=np.float64),
            self.certain,
        )


def whole_histograms(log: NormLog, between_records: str) -> tuple[Histogram, Histogram]:
    """Histograms with whole numbers of steps, as loss distributions need: rounded up, and down."""
    up = Histogram.of(log, between_records, "up")
    return up, up if up.exact else Histogram.of(log, between_records, "down")


def _mixes(governing: GoverningNorms) -> tuple[IntArray, IntArray, IntArray, csr_array]:
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
    return (
        records,
        np.array(mix),
        weight,
        csr_array(parts, shape=(len(seen), len(governing.settings))),
    )


def _steps_of_cells(
    mixes: csr_array, norms: GoverningNorms
) -> tuple[Mechanisms, Lattice | None, csr_array]:
    """Mechanisms, their lattice of chords, and (n_cells, n_mechanisms) steps of one count."""
    codes, settings = norms.codes, norms.settings
    mechanisms, lattice, locate = _placed(
        codes.table(settings.max_grad_norm),
        settings.noise_multiplier,
        settings.sample_rate,
        codes,
    )
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
    return mechanisms, lattice, total


def _placed(
    relative: FloatArray, noise: FloatArray, rate: FloatArray, codes: NormCodes
) -> tuple[
    Mechanisms,
    Lattice | None,
    Callable[[IntArray], Iterable[tuple[IntArray, FloatArray | float]]],
]:
    """Mechanisms, their lattice, and where the codes of settings lie: (index, share of a step).

    relative: (n_settings, n_codes). noise, rate: (n_settings,).
    """
    between_nodes = codes.between_nodes
    if relative.size <= _MOST_OWN[between_nodes]:
        settings = np.broadcast_to(np.stack([noise, rate], axis=1)[:, None], (*relative.shape, 2))
        met = np.concatenate([relative[:, :, None], settings], axis=2).reshape(-1, 3)
        distinct, index = np.unique(met, axis=0, return_inverse=True)
        places = index.reshape(relative.shape)
        return Mechanisms(*distinct.T), None, lambda setting: [(places[setting], 1.0)]
    shifts = relative / noise[:, None]
    if between_nodes == "chord":
        lattice = Lattice.of_chords(shifts, rate, codes.apart)
    else:
        ratio, most = _RATIO[between_nodes], _MOST_NODES[between_nodes]
        lattice = Lattice.covering(shifts, rate, between_nodes, ratio=ratio, most=most)
    return (
        lattice.mechanisms,
        lattice if between_nodes == "chord" else None,
        lambda setting: lattice.locate(shifts[setting], rate[setting]),
    )


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
