"""In how many steps each example met which kind of step: laws x whole counts. Sensitive.

A kind of step is a shift u, the example's clipped norm over the noise's standard deviation, and a
sample rate q. Kinds dominate each other in both u and q, and so do their compositions: where a log
has too many, for it is not rounded or its settings change in every step, each is *snapped up* to
one of fewer, which costs at least as much (or *down*, for lower bounds).

Steps are counted by *cell*: a code of a record, with all the steps that the record governs. Records
of one *mix* govern the same numbers of steps under the same settings, up to a factor. A cell is
(mix, code), the code running fastest: however many settings the steps of a record have, an example
meets one cell per record. [7.4] is a line of docs/explanation/proofs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np
from scipy.sparse import block_diag, coo_array, csr_array, eye_array

from indpriv._types import FloatArray, IntArray
from indpriv.accountant.blocks import block_size, n_cores
from indpriv.accountant.method import Method
from indpriv.accountant.norms import GoverningNorms, nodes_from_zero, places, snapped_rates
from indpriv.accountant.rdp import MOST_DENSE, RdpAccountant, divergences_of_pairs
from indpriv.norm_log.norm_log import NormLog

# Relative distances of shifts, and of rates, that are snapped. Of rates an example meets many, so
# that half of it is what they move by.
_APART, _CLIPPED_APART = (5e-4, 2e-3), (1e-4, 1e-4)  # in general, and of one clipped example
_CHORDS_APART = (2e-3, 1.6e-2)  # of nodes between which divergences are interpolated
_FEW_SHIFTS, _FEW_RATES = 512, 32  # at most this many distinct values are kept as they are
_MOST_EXACT = 1 << 14  # (setting, code) pairs that are laws of their own
_MOST_LAWS, _MOST_CLIPPED = 1 << 18, 1 << 14  # in general, and of one clipped example
_MOST_OWN, _MOST_NODES = 1 << 11, 1 << 14  # divergences that are not interpolated, and nodes
_MOST_ENTRIES = 1 << 24  # of Steps.steps; beyond, settings are snapped, at least this far apart:
_SETTINGS_APART = 5e-4
_FOUND_BYTES = 1 << 13  # that the search for the best order takes for one example
_WORTH_THREADS = 20_000  # divergences that take longer than starting a thread

Law = Callable[[FloatArray], FloatArray]  # (n_orders,) orders to (n_orders, n) divergences


@dataclass(frozen=True)
class StepKinds:
    """Kinds of steps; arrays have shape (n,)."""

    shift: FloatArray  # clipped norm over the noise's standard deviation
    rate: FloatArray  # Poisson sampling rate
    # equal rows of one unit, each with this shift; or (1,) for all, by default 1
    rows: IntArray = field(default_factory=lambda: np.ones(1, np.int64))
    # (n_cells, n) whole steps of one count of each cell; by default kinds are cells
    cells: csr_array | None = None

    def __len__(self) -> int:
        return len(self.rate)

    @classmethod
    def concatenated(cls, parts: Sequence[StepKinds]) -> StepKinds:
        """The kinds of all parts."""
        each = [(one.shift, one.rate, np.broadcast_to(one.rows, len(one))) for one in parts]
        shift, rate, rows = (np.concatenate(column) for column in zip(*each, strict=True))
        return cls(shift, rate, rows, csr_array(block_diag([one.steps for one in parts])))

    @property
    def steps(self) -> csr_array:
        """(n_cells, n) steps of one count of each cell."""
        return csr_array(eye_array(len(self))) if self.cells is None else self.cells

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self) if self.cells is None else int(self.cells.shape[0])

    def accountant(self, method: Method, law: Law | None = None) -> RdpAccountant:
        """Of counts of these cells; law: of steps, by default of adding or removing an example."""
        if np.any(self.rows > 1):
            return RdpAccountant(self.divergences_at, method, slow=True)
        return RdpAccountant(partial(self.per_count, law or self.divergences), method)

    def per_count(self, law: Law, orders: FloatArray) -> FloatArray:
        """(n_orders, n_cells) divergences of one count of each cell; law: of one step."""
        found = np.ascontiguousarray(law(orders).T)
        return np.ascontiguousarray((found if self.cells is None else self.cells @ found).T)

    def divergences_at(self, kinds: IntArray, orders: FloatArray) -> FloatArray:
        """(n,) Rényi divergence of one step of kinds[i] at orders[i]."""
        values = np.zeros(len(kinds))
        rows = np.broadcast_to(self.rows, len(self))[kinds]
        n_threads = n_cores() if len(kinds) > _WORTH_THREADS else 1

        def fill(part: tuple[int, IntArray]) -> None:
            k, chosen = part
            values[chosen] = divergences_of_pairs(
                self.shift, self.rate, kinds[chosen], orders[chosen], k
            )

        parts = [
            (k, chosen)
            for k in np.unique(rows)[::-1].tolist()  # the longest first
            for chosen in np.array_split(np.flatnonzero(rows == k), n_threads)
        ]
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(fill, parts))
        return values

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n) divergences of steps of single rows; of very many slightly above them."""
        pairs = np.stack([self.shift, self.rate], axis=1)
        distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
        found = StepKinds(*distinct.T)
        values = found._between_nodes(orders) if len(found) > _MOST_OWN else found._on_curve(orders)
        return values[:, inverse.ravel()]

    def _on_curve(self, orders: FloatArray) -> FloatArray:
        kinds = np.repeat(np.arange(len(self)), len(orders))
        values = self.divergences_at(kinds, np.tile(orders, len(self)))
        return values.reshape(len(self), -1).T

    def _between_nodes(self, orders: FloatArray) -> FloatArray:
        """The same on chords in u^2 and log q, above the curve [7.4]."""
        for shifts, rates in _axes(self.shift, self.rate, _CHORDS_APART):
            n_nodes = len(shifts) * len(rates)
            if n_nodes <= _MOST_NODES or len(self) <= _MOST_NODES:
                break
        if n_nodes >= len(self):
            return self._on_curve(orders)
        nodes = StepKinds(np.tile(shifts, len(rates)), np.repeat(rates, len(shifts)))
        table, total = np.ascontiguousarray(nodes._on_curve(orders).T), 0.0
        left, right, up = neighbours(shifts, self.shift, np.square)
        below, above, more = neighbours(rates, self.rate, np.log)
        for column, part in ((left, 1 - up), (right, up)):
            for row, other in ((below, 1 - more), (above, more)):
                total = total + (part * other)[:, None] * table[column + row * len(shifts)]
        return np.asarray(total).T


def neighbours(
    nodes: FloatArray, values: FloatArray, curve: Callable[[FloatArray], FloatArray]
) -> tuple[IntArray, IntArray, FloatArray]:
    """Indices of the nodes below and above each value, and the share of the upper one.

    nodes: ascending; values beyond the ends count at the end nodes. curve: the share is linear in
    curve(value).
    """
    above = np.minimum(np.searchsorted(nodes, values), len(nodes) - 1)
    below = np.maximum(above - 1, 0)
    heights = curve(nodes)
    low, width = heights[below], heights[above] - heights[below]
    share = np.divide(curve(values) - low, width, out=np.ones(above.shape), where=width > 0)
    return below, above, np.clip(share, 0.0, 1.0)


def collected(
    entries: Iterable[tuple[IntArray, FloatArray | IntArray]], n: int, n_cells: int
) -> csr_array:
    """Counts of n examples, from parts of their (k, n) cells and steps that broadcast to them."""
    every = list(entries)
    column = np.concatenate([cell for cell, _ in every], dtype=np.int32, casting="same_kind")
    value = np.concatenate([np.broadcast_to(steps, cell.shape) for cell, steps in every])
    starts = np.arange(n + 1) * len(column)
    parts = (value.T.ravel().astype(np.float64), column.T.ravel(), starts)
    return csr_array(parts, shape=(n, n_cells))


def size_of_blocks(norms: GoverningNorms, laws: StepKinds, n_entries: int) -> int:
    """Number of examples at a time; n_entries: cells that one may meet."""
    dense = laws.n_cells if laws.n_cells <= MOST_DENSE else 0
    return block_size(norms.bytes_per_example + 32 * n_entries + 24 * dense + _FOUND_BYTES)


@dataclass(frozen=True)
class Steps:
    """How the steps of a log are counted."""

    norms: GoverningNorms  # which norm of an example counts in which step
    laws: StepKinds  # (n_laws,) the kinds of steps, and the cells
    # (n_laws,) shift of a gradient at max_grad_norm in the steps of each, or a larger one where
    # laws were snapped
    clipped: FloatArray
    cell: IntArray  # (n_mixes, n_codes) of each mix and code
    record: IntArray  # (n_entries,) rows of norms that examples are counted at
    mix: IntArray  # (n_entries,) of each
    weight: IntArray  # (n_entries,) counts
    exact: bool  # nothing is snapped

    @classmethod
    def of(cls, log: NormLog, between_records: str, *, down: bool = False) -> Steps:
        """Lay out the steps of a log; down: what is snapped is snapped to less loss."""
        norms, apart = GoverningNorms.of(log, between_records, down=down), 0.0
        n_codes, mixes = len(norms.codes.bounds), _mixes(norms)
        while mixes[-1].nnz * n_codes > _MOST_ENTRIES and apart < 1:
            apart = max(2 * apart, _SETTINGS_APART)
            norms = GoverningNorms.of(log, between_records, apart=apart, down=down)
            mixes = _mixes(norms)
        # The laws, and the (n_settings, n_codes) law of each setting and code: each as it is, or
        # snapped where there are too many
        noise, rate = norms.settings.noise_multiplier, norms.settings.sample_rate[:, None]
        shift = norms.codes.table(norms.settings.max_grad_norm) / noise[:, None]
        one = np.broadcast_to(1 / noise[:, None], shift.shape)
        if exact := len(norms.settings) * n_codes <= _MOST_EXACT:
            columns = np.stack(np.broadcast_arrays(shift, rate, one), axis=-1).reshape(-1, 3)
            distinct, index = np.unique(columns, axis=0, return_inverse=True)
            laws, clipped = StepKinds(*distinct.T[:2]), distinct[:, 2]
            law = index.reshape(shift.shape)
        else:
            laws, law = _snapped(StepKinds(shift, rate), _APART, _MOST_LAWS, down)
            clipped = laws.shift.copy()
            np.maximum.at(clipped, law, one)
        record, mix, weight, shares = mixes
        entry = shares.tocoo()
        row, setting, share = entry.row, entry.col, entry.data
        if len(row) == shares.shape[0] and (share == 1).all():  # single settings: cells are laws
            cell = law[setting]
        else:
            cell = np.arange(shares.shape[0] * n_codes).reshape(-1, n_codes)
            met = np.repeat(share, n_codes), (cell[row].ravel(), law[setting].ravel())
            laws = replace(laws, cells=csr_array(coo_array(met, shape=(cell.size, len(laws)))))
        exact = exact and norms.codes.exact and apart == 0
        return cls(norms, laws, clipped, cell, record, mix, weight, exact)

    def below(self) -> Steps:
        """The same steps, none of which costs more than what was met: for lower bounds."""
        if self.exact:
            return self
        return Steps.of(self.norms.log, self.norms.between_records, down=True)

    @property
    def block_size(self) -> int:
        """Number of examples at a time."""
        return size_of_blocks(self.norms, self.laws, len(self.record))

    def counts(self, block: NormLog) -> csr_array:
        """Counts of a block of examples over the cells."""
        if self.norms.log.batch_norms is not None and self.laws.n_cells <= MOST_DENSE:
            return self._by_span(block)
        codes = self.norms.codes.codes(self.norms.read(block), down=self.norms.down)
        place = codes[self.record] + self.mix[:, None] * self.cell.shape[1]
        entries = [(self.cell.take(place), self.weight[:, None])]
        return collected(entries, block.n_examples, self.laws.n_cells)

    def _by_span(self, block: NormLog) -> csr_array:
        """Counts with batch norms, where each example has spans of its own."""
        norms, n_cells = self.norms, self.laws.n_cells
        example, norm, begin, stop = norms.known(block).spans(norms.between_records)
        codes = norms.codes.codes(norm, down=norms.down)
        counts, first = np.zeros(block.n_examples * n_cells), example.astype(np.int64) * n_cells
        for mix, cell in enumerate(self.cell):
            before = np.append(0, np.cumsum(self.weight * (self.mix == mix)))
            steps = before[stop] - before[begin]
            counts += np.bincount(first + cell[codes], steps, minlength=len(counts))
        return csr_array(counts.reshape(-1, n_cells))


def _mixes(norms: GoverningNorms) -> tuple[IntArray, IntArray, IntArray, csr_array]:
    """Record, mix and weight of each entry (see `Steps`), and what one count of a mix is.

    That is (n_mixes, n_settings) steps. Mixes are single settings, if each record has one or cells
    are few.
    """
    steps, n_settings = norms.steps, norms.steps.shape[1]
    each = np.diff(steps.indptr)
    if each.max() == 1 or n_settings * len(norms.codes.bounds) <= MOST_DENSE:
        entries = steps.tocoo()
        record, setting = (index.astype(np.int64) for index in (entries.row, entries.col))
        return record, setting, entries.data, csr_array(eye_array(n_settings))
    weight = np.gcd.reduceat(steps.data, steps.indptr[:-1])
    share = (steps.data // np.repeat(weight, each)).astype(np.float64)
    parts = [slice(*ends) for ends in pairwise(steps.indptr)]
    keys = [(steps.indices[part].tobytes(), share[part].tobytes()) for part in parts]
    place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    mix = np.array([place[key] for key in keys])
    shares = csr_array((share, steps.indices, steps.indptr), shape=steps.shape)
    return np.arange(len(keys)), mix, weight, shares[np.unique(mix, return_index=True)[1]]


def _axes(
    shift: FloatArray, rate: FloatArray, apart: tuple[float, float], down: bool = False
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Nodes for shifts and for rates, fewer and fewer: their own values where these are few.

    Otherwise neighbours are at first a relative `apart`.
    """
    own_shifts, own_rates = np.unique(shift), np.unique(rate)
    for wider in 1.5 ** np.arange(40):
        shifts, rates = own_shifts, own_rates
        if len(shifts) > _FEW_SHIFTS:
            nodes = nodes_from_zero(float(shifts[-1]), wider * apart[0])
            above = np.unique(places(nodes, shifts, False))
            shifts = nodes[np.union1d(above, np.maximum(above - 1, 0))]
        if len(rates) > _FEW_RATES:
            rates = np.unique(snapped_rates(rates, wider * apart[1], down=down))
        yield shifts, rates


def _snapped(
    kinds: StepKinds, apart: tuple[float, float], most: int, down: bool
) -> tuple[StepKinds, IntArray]:
    """At most `most` kinds that cost at least as much (or at most), and which one each is then."""
    for shifts, rates in _axes(kinds.shift, kinds.rate, apart, down):
        key = places(shifts, kinds.shift, down) + len(shifts) * places(rates, kinds.rate, down)
        used, index = np.unique(key, return_inverse=True)
        if len(used) <= most:
            break
    row, column = np.divmod(used, len(shifts))
    return StepKinds(shifts[column], rates[row]), index.reshape(key.shape)


def condensed(
    kinds: StepKinds, steps: FloatArray, *, down: bool = False
) -> tuple[StepKinds, FloatArray]:
    """One example's (n,) steps of very many kinds, snapped to fewer.

    Where only noise or only rates change, they move by 1e-4 at most.
    """
    if len(kinds) <= _MOST_CLIPPED:
        return kinds, steps
    found, index = _snapped(kinds, _CLIPPED_APART, _MOST_CLIPPED, down)
    return found, np.asarray(np.bincount(index, steps))


def clipped_steps(log: NormLog) -> tuple[StepKinds, FloatArray]:
    """Kinds of steps of an example that is clipped in every one, and its (n,) steps of each."""
    setting, settings = log.settings.distinct()
    pairs = np.stack([settings.noise_multiplier, settings.sample_rate], axis=1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    every = [log.total_steps] if setting is None else np.bincount(inverse.ravel()[setting])
    return StepKinds(1 / distinct[:, 0], distinct[:, 1]), np.asarray(every, dtype=np.float64)
