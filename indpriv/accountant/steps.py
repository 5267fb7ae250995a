"""In how many steps each example met which kind of step: laws x whole counts. Sensitive.

A kind of step is a shift u, the example's clipped norm over the noise's standard deviation, and a
sample rate q. Kinds dominate each other in both u and q, and so do their compositions: where a log
has too many, each is *snapped up* to one of fewer, which costs at least as much (or *down*, for
lower bounds).

Steps are counted by *cell*: a code of a record, with all the steps that the record governs. Records
of one *mix* govern the same numbers of steps under the same settings, up to a factor. A cell is
(mix, code), the code running fastest: an example meets one cell per record, whatever its settings.

Full records are rows of norms of all examples; batch norms add entries of single examples between
them. A norm governs the steps until the next one ("last") or half-way to its neighbours ("closest";
of two equally close ones the larger), which is the trapezoid rule for the divergence; other
boundaries are worse if norms are clipped at first (benchmarks/fidelity.py). [7.4] is a line of
docs/explanation/proofs.md.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
from scipy.sparse import block_diag, coo_array, csr_array, eye_array

from indpriv import _checks
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.accountant.blocks import block_size, in_order, n_cores
from indpriv.accountant.method import Method
from indpriv.accountant.rdp import MOST_DENSE, RdpAccountant, divergences_of_pairs
from indpriv.norm_log.fields import ACCOUNT_WORDS, StepSettings
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import BatchNorms, Levels

# Relative distances of shifts, and of rates, that are snapped. Of rates an example meets many, so
# that half of it is what they move by.
_APART, _CLIPPED_APART = (5e-4, 2e-3), (1e-4, 1e-4)  # in general, and of one clipped example
_CHORDS_APART = (2e-3, 1.6e-2)  # of nodes between which divergences are interpolated
_FEW_SHIFTS, _FEW_RATES = 512, 32  # at most this many distinct values are kept as they are
_MOST_EXACT = 1 << 14  # (setting, code) pairs that are laws of their own
_MOST_LAWS, _MOST_CLIPPED = 1 << 18, 1 << 14  # in general, and of one clipped example
_MOST_OWN, _MOST_NODES = 1 << 11, 1 << 14  # divergences that are not interpolated, and nodes
_MOST_SETTINGS = 512  # of laws that are told apart by a clipped gradient's shift
_MOST_ENTRIES = 1 << 24  # of Steps.steps; beyond, settings are snapped, at least this far apart:
_SETTINGS_APART = 5e-4
_NORMS_APART = 5e-4  # relative distance of codes at the smallest max_grad_norm, if not of levels
_MOST_LEVELS, _MOST_CODES = 4096, 16_384  # of all max_grad_norms together
_NORM_BYTES = 64  # that the spans of one norm take while they are made
_FOUND_BYTES = 1 << 13  # that the search for the best order takes for one example
_SMALL = 2.0  # order that units of several rows try first
_WORTH_THREADS = 20_000  # divergences that take longer than starting a thread

Law = Callable[[IntArray, FloatArray], FloatArray]  # (n,) kinds and an order each to divergences
Between = tuple[IntArray, IntArray, FloatArray]  # nodes below and above values, share of the upper
Values = NDArray[Any]  # codes of a rounded log, or float64 norms in units of NormCodes.unit


def nodes_from_zero(largest: float, apart: float) -> FloatArray:
    """Nodes from 0 to the largest one: at a share v of it, a relative `apart * v**(-1 / 4)` apart.

    What is small costs far less than what is large, and has no need of as many nodes.
    """
    n = int(np.ceil(4 / apart))
    return largest * (np.arange(n + 1) / n) ** 4


def places(nodes: FloatArray, values: Values, down: bool) -> IntArray:
    """The node at or above each value, which no value exceeds; or the one at or below it."""
    if down:
        return np.searchsorted(nodes, values, side="right") - 1
    return np.searchsorted(nodes, values)


def snapped(values: FloatArray, apart: float, *, down: bool) -> FloatArray:
    """Positive values, raised (or lowered) to nodes that differ by a relative `apart`."""
    low, high = float(values.min()), float(values.max())
    if low == high or apart == 0:
        return values
    nodes = np.geomspace(low, high, int(np.ceil(np.log(high / low) / apart)) + 1)
    return np.asarray(nodes[places(nodes, values, down)])


def snapped_rates(rates: FloatArray, apart: float, *, down: bool) -> FloatArray:
    """The same of sample rates: what is below 1 stays below it.

    A rate that was raised is none of the given ones, for `pairs.cases_of` knows more of these.
    """
    below = rates < 1
    if apart == 0 or not below.any():
        return rates
    found = rates.copy()
    found[below] = snapped(rates[below], apart, down=down)
    raised = found > rates
    found[raised] = np.minimum(found[raised] * (1 + 1e-12), np.nextafter(1.0, 0.0))
    return found


@dataclass(frozen=True)
class NormCodes:
    """Codes of norms, which are comparable between records: a larger code is a larger bound.

    They are the log's own if it is rounded under one max_grad_norm, else places among the bounds.
    """

    levels: Levels  # rounding of the log
    unit: float  # the max_grad_norm that bounds are fractions of
    # (n_codes,) ascending from 0. The last one is a clipped norm of unknown size.
    bounds: FloatArray
    exact: bool  # bounds are all the levels that there are; no norm lies between them
    direct: bool  # codes are those of the log

    @classmethod
    def of(cls, log: NormLog) -> "NormCodes":
        """The codes of a log."""
        clips, steps = log.settings.max_grad_norm, log.recorded_steps
        if log.batch_norms is not None:
            steps = np.append(steps, log.batch_norms.steps)
        units = np.unique(clips[steps]) if len(steps) else clips[:1]
        unit, largest = float(units[0]), float(clips.max() / units[0])
        one = len(units) == 1
        if log.levels.rounding and (one or len(units) * (log.levels.top + 1) <= _MOST_LEVELS):
            levels = np.unique(log.levels.fractions * (units[:, None] / unit))
            return cls(log.levels, unit, np.append(levels, 2 * largest), True, one)
        apart = _NORMS_APART * (float(clips.min()) / unit / largest) ** 0.25
        nodes = nodes_from_zero(largest, max(apart, 4 / _MOST_CODES))
        return cls(log.levels, unit, np.append(nodes, 2 * largest), False, False)

    def read(self, values: Values, unit: FloatArray) -> Values:
        """Comparable values of codes or norms (n, ...); unit: (n,) max_grad_norm of each."""
        if self.direct:
            return np.asarray(np.minimum(values, np.asarray(self.clipped, values.dtype)))
        if not self.levels.rounding:
            return np.asarray(np.minimum(values / self.unit, self.bounds[-1]))
        scale = (unit / self.unit).reshape(-1, *(1,) * (values.ndim - 1))
        relative = self.levels.relative(values) * scale
        return np.asarray(np.where(values > self.levels.top, self.bounds[-1], relative))

    @property
    def clipped(self) -> float:
        """The value of a clipped norm of unknown size."""
        return len(self.bounds) - 1 if self.direct else float(self.bounds[-1])

    def relative(self, values: Values, max_grad_norm: FloatArray) -> FloatArray:
        """Contributions of values, as fractions of a max_grad_norm of the same shape."""
        norms = self.bounds[values] if self.direct else values
        return np.asarray(np.minimum(norms * (self.unit / max_grad_norm), 1.0))

    def table(self, max_grad_norm: FloatArray) -> FloatArray:
        """(n, n_codes) contributions of all codes under each max_grad_norm (n,)."""
        return np.minimum(self.bounds * (self.unit / max_grad_norm)[:, None], 1.0)

    def codes(self, values: Values, *, down: bool) -> Values:
        """The codes that values count at: of the bound at or above each, or at or below it."""
        return values if self.direct else places(self.bounds, values, down)


@dataclass(frozen=True)
class GoverningNorms:
    """Which norm of an example counts in which step; its methods read blocks of examples.

    Norms lie in rows: those of each record, the larger ones of each two records that a step lies
    half-way between, and one at max_grad_norm for all, where such steps are. With batch norms, each
    step has a row.
    """

    log: NormLog
    between_records: str  # what governs steps between records
    codes: NormCodes  # the bounds at which norms are counted
    pairs: IntArray  # (n_pairs,) records r such that a step lies half-way between r and r + 1
    settings: StepSettings  # the distinct ones, (n_settings,) each; snapped if `apart`
    steps: csr_array  # (n_rows, n_settings) whole numbers of steps, by row and setting
    largest: FloatArray  # (n_rows,) the largest max_grad_norm of the steps that each row governs
    down: bool  # whether norms and settings between nodes cost too little, not too much

    @classmethod
    def of(
        cls, log: NormLog, between_records: str, *, apart: float = 0.0, down: bool = False
    ) -> "GoverningNorms":
        """Group the steps of a log; apart: relative distance of settings that are told apart."""
        _checks.check_choice("between_records", between_records, ACCOUNT_WORDS["between_records"])
        settings, clips = log.settings, log.settings.max_grad_norm
        if apart:
            settings = StepSettings(
                snapped(settings.noise_multiplier, apart, down=not down),
                snapped(clips, apart, down=not down),
                snapped_rates(settings.sample_rate, apart, down=down),
            )
        row, starts, pairs = _governing(log, between_records)
        lengths = np.diff(np.append(starts, log.total_steps))
        largest = np.zeros(row.max() + 1)
        np.maximum.at(largest, row, np.maximum.reduceat(clips, starts))
        setting, distinct = settings.distinct()
        if setting is None:
            setting = np.zeros(len(row), np.int64)
        else:
            row, lengths = np.repeat(row, lengths), np.ones(log.total_steps, np.int64)
        shape = (len(largest), len(distinct))
        steps = csr_array(coo_array((lengths, (row, setting)), shape=shape))
        codes = NormCodes.of(log)
        return cls(log, between_records, codes, pairs, distinct, steps, largest, down)

    @property
    def bytes_per_example(self) -> int:
        """Memory that reading one example takes."""
        values = (1 if self.codes.direct else 64) * self.steps.shape[0]
        if self.log.batch_norms is None:
            return values
        norms = self.log.n_records + 1 + int(self.log.settings.sample_rate.sum())
        return _NORM_BYTES * norms + values

    def read(self, block: NormLog) -> NDArray[Any]:
        """(n_rows, n_examples) values that govern."""
        if self.log.batch_norms is not None:
            _, norm, begin, stop = self.known(block).spans(self.between_records)
            return np.repeat(norm, stop - begin).reshape(-1, self.log.total_steps).T
        rows = [full := self.full(block)]
        if len(self.pairs):
            rows.append(np.maximum(full[self.pairs], full[self.pairs + 1]))
        if self.steps.shape[0] > len(full) + len(self.pairs):
            rows.append(np.full((1, block.n_examples), self.codes.clipped, full.dtype))
        return np.concatenate(rows) if len(rows) > 1 else full

    def full(self, block: NormLog) -> NDArray[Any]:
        """(n_records, n_examples) comparable values of full records."""
        units = self.log.settings.max_grad_norm[self.log.recorded_steps]
        return self.codes.read(block.read(), units)

    def always_clipped(self, block: NormLog) -> NDArray[np.bool_]:
        """(n_examples,) whether an example counts at max_grad_norm in every step of the run."""
        values = self.read(block)
        largest = np.broadcast_to(self.largest[:, None], values.shape)
        return np.asarray((self.codes.relative(values, largest) >= 1.0).all(axis=0))

    def known(self, block: NormLog) -> "KnownNorms":
        """The norms of full records and batch norms together, of a log with batch norms."""
        log, rows = self.log, self.full(block)
        recorded, n_examples = log.recorded_steps, block.n_examples
        entries = cast(BatchNorms, block.batch_norms).read(0, n_examples)
        steps, width = np.arange(log.total_steps), len(recorded) + 1
        entries = entries.select(~np.isin(steps, recorded)[entries.step])
        # The place of each entry: after the full record that it follows.
        records_until = np.searchsorted(recorded, steps, side="right")[entries.step]
        after = entries.position.astype(np.int64) * width + records_until
        following = np.bincount(after, minlength=n_examples * width)
        full_at = np.cumsum(following) - following + np.arange(len(following))
        entry_at = np.arange(len(entries)) + after + 1
        step = np.empty(len(full_at) + len(entry_at), np.int32)
        norm = np.empty(len(step), rows.dtype)
        step[full_at] = np.tile(np.append(0, recorded), n_examples)
        step[entry_at] = entries.step
        unknown = np.full((1, n_examples), self.codes.clipped, rows.dtype)
        norm[full_at] = np.concatenate([unknown, rows]).T.ravel()
        norm[entry_at] = self.codes.read(entries.norm, log.settings.max_grad_norm[entries.step])
        first = full_at[::width]
        each = np.diff(np.append(first, len(step)))
        example = np.repeat(np.arange(n_examples, dtype=np.int32), each)
        return KnownNorms(example, step, norm, first, entry_at, log.total_steps)


def _governing(log: NormLog, between_records: str) -> tuple[IntArray, IntArray, IntArray]:
    """The rows that govern stretches of steps, the first step of each stretch, and the pairs."""
    recorded, pairs = log.recorded_steps, np.zeros(0, np.int64)
    if log.batch_norms is not None:
        return np.arange(log.total_steps), np.arange(log.total_steps), pairs
    starts, clipped = recorded, np.zeros(1, np.int64)
    if between_records == "worst_case":
        clipped = np.append(0, recorded + 1)
    elif between_records == "closest":
        gaps = np.diff(recorded)
        pairs = np.flatnonzero(gaps % 2 == 0)
        closer_to_next, half_way = recorded[:-1] + gaps // 2 + 1, recorded[pairs] + gaps[pairs] // 2
        starts = np.concatenate([recorded[:1], closer_to_next, half_way])
    row = np.append(np.full(len(clipped), len(starts)), np.arange(len(starts)))
    starts = np.append(clipped, starts)
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    some = np.diff(np.append(starts, log.total_steps)) > 0
    return row[order][some], starts[some], pairs


@dataclass(frozen=True)
class KnownNorms:
    """All known norms of a block, ordered by example, then by step; arrays have shape (n,).

    Before its first known norm, each example has an entry with step 0 and a clipped norm.
    """

    example: NDArray[np.int32]  # position in the block
    step: NDArray[np.int32]  # at which the norm was taken
    norm: NDArray[Any]  # comparable value
    first: IntArray  # (n_examples,) index of each example's first
    batch_norms: IntArray  # (n_entries,) index of each batch norm at a step without a full record
    total_steps: int  # of the run

    def in_place_of_batch_norms(self, between_records: str) -> IntArray:
        """(n_entries,) index of the norm that would govern the step without each batch norm."""
        index = self.batch_norms
        before, after = index - 1, np.minimum(index + 1, len(self.step) - 1)
        if between_records == "last":
            return before
        earlier, later = self.step[index] - self.step[before], self.step[after] - self.step[index]
        larger_after = self.norm[after] > self.norm[before]
        prefer_after = (later < earlier) | ((later == earlier) & larger_after)
        same_example = (after > index) & (self.example[after] == self.example[index])
        known_before = before != self.first[self.example[index]]
        return np.where(prefer_after & same_example & known_before, after, before)

    def spans(
        self, between_records: str
    ) -> tuple[NDArray[np.int32], NDArray[Any], NDArray[np.int32], NDArray[np.int32]]:
        """Spans of steps that one norm governs: together all steps; some may be empty.

        (n_spans,) example; norm; first step; and the one after the last. A step half-way between
        two norms is a span of its own.
        """
        last = np.append(self.first[1:], len(self.step)) - 1
        ahead = np.append(self.step[1:], self.step[:1])  # step of the example's next norm
        ahead[last] = self.total_steps
        if between_records == "last":
            return self.example, self.norm, self.step, ahead
        gap, between = ahead - self.step, np.ones(len(ahead), bool)
        between[self.first] = between[last] = False
        begin, stop = self.step.copy(), np.where(between, self.step + (gap + 1) // 2, ahead)
        after = np.flatnonzero(between) + 1
        begin[after] = (self.step + gap // 2 + 1)[after - 1]
        tied = between & (gap % 2 == 0)
        each = np.repeat(np.arange(len(gap)), 1 + tied)
        tie = np.append(False, each[1:] == each[:-1])  # the second of two: one step
        larger = np.maximum(self.norm, np.append(self.norm[1:], self.norm[-1:]))
        return (
            self.example[each],
            np.where(tie, larger[each], self.norm[each]),
            np.where(tie, stop[each], begin[each]),
            stop[each] + tie,
        )


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
    def concatenated(cls, parts: "Sequence[StepKinds]") -> "StepKinds":
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
        if law is None and not np.any(self.rows > 1):
            return RdpAccountant(self.per_count, method)
        of_counts = partial(self._of_counts, law or self.divergences_at)
        return RdpAccountant(of_counts, method, slow=_SMALL if law is None else np.inf)

    def per_count(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n_cells) divergences of one count of each cell, of single rows."""
        of_kinds = np.ascontiguousarray(self.divergences(orders).T)
        return np.ascontiguousarray((self.steps @ of_kinds).T)

    def _of_counts(self, law: Law, cells: IntArray, orders: FloatArray) -> FloatArray:
        """(n,) divergences of one count of cells[i] at orders[i]; law: of one step."""
        if self.cells is None:
            return law(cells, orders)
        met = self.cells[cells].tocoo()
        distinct, place = np.unique(met.col + 1j * orders[met.row], return_inverse=True)
        values = law(distinct.real.astype(np.int64), distinct.imag)
        return np.asarray(np.bincount(met.row, met.data * values[place], len(cells)), np.float64)

    def divergences_at(self, kinds: IntArray, orders: FloatArray) -> FloatArray:
        """(n,) Rényi divergence of one step of kinds[i] at orders[i]."""
        values = np.zeros(len(kinds))
        rows = np.broadcast_to(self.rows, len(self))[kinds]
        n_threads = n_cores() if len(kinds) > _WORTH_THREADS else 1

        def fill(k: int, chosen: IntArray) -> None:
            values[chosen] = divergences_of_pairs(
                self.shift, self.rate, kinds[chosen], orders[chosen], k
            )

        parts = [
            (k, chosen)
            for k in np.unique(rows)[::-1].tolist()  # the longest first
            for chosen in np.array_split(np.flatnonzero(rows == k), n_threads)
        ]
        list(in_order(fill, parts, n_threads))
        return values

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n) divergences of steps of single rows; of very many slightly above them."""
        distinct, inverse = np.unique(self.shift + 1j * self.rate, return_inverse=True)
        found = StepKinds(distinct.real, distinct.imag)
        values = found._between_nodes(orders) if len(found) > _MOST_OWN else found._on_curve(orders)
        return values[:, inverse]

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
        table = np.ascontiguousarray(nodes._on_curve(orders).T)
        rows = neighbours(rates, self.rate, np.log)
        columns = neighbours(shifts, self.shift, np.square)
        return np.asarray((on_grid(rows, columns, len(rates), len(shifts)) @ table).T)


def neighbours(
    nodes: FloatArray, values: FloatArray, curve: Callable[[FloatArray], FloatArray]
) -> Between:
    """Indices of the nodes below and above each value; the upper one's share, linear in the curve.

    nodes: ascending; values beyond the ends count at the end nodes.
    """
    above = np.minimum(np.searchsorted(nodes, values), len(nodes) - 1)
    below = np.maximum(above - 1, 0)
    heights = curve(nodes)
    low, width = heights[below], heights[above] - heights[below]
    share = np.divide(curve(values) - low, width, out=np.ones(above.shape), where=width > 0)
    return below, above, np.clip(share, 0.0, 1.0)


def on_grid(first: Between, second: Between, n_first: int, n_second: int) -> csr_array:
    """(n, n_first * n_second) shares of pairs of nodes, of which the second runs fastest."""
    of_first, of_second = ([(one[0], 1 - one[2]), one[1:]] for one in (first, second))
    entries = [(i * n_second + j, p * w) for i, p in of_first for j, w in of_second]
    place, share = (np.stack(values, axis=1).ravel() for values in zip(*entries, strict=True))
    starts = np.arange(0, len(place) + 1, 4)
    return csr_array((share, place, starts), shape=(len(starts) - 1, n_first * n_second))


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
    def of(
        cls, log: NormLog, between_records: str, *, down: bool = False, clipped: bool = False
    ) -> "Steps":
        """Lay out the steps of a log.

        down: what is snapped is snapped to less loss. clipped: laws are told apart by `clipped`
        too, for pairs of which the other gradient is at max_grad_norm.
        """
        norms, apart = GoverningNorms.of(log, between_records, down=down), 0.0
        n_codes, mixes = len(norms.codes.bounds), _mixes(norms)
        most_settings = _MOST_SETTINGS if clipped else log.total_steps
        while apart < 1 and (
            mixes[-1].nnz * n_codes > _MOST_ENTRIES or len(norms.settings) > most_settings
        ):
            apart = max(2 * apart, _SETTINGS_APART)
            norms = GoverningNorms.of(log, between_records, apart=apart, down=down)
            mixes = _mixes(norms)
        # The laws, and the (n_settings, n_codes) law of each setting and code: each as it is, or
        # snapped where there are too many
        noise, rate = norms.settings.noise_multiplier, norms.settings.sample_rate[:, None]
        relative = norms.codes.table(norms.settings.max_grad_norm)
        if clipped and relative.size > _MOST_LAWS:  # fewer norms of each setting
            nodes = nodes_from_zero(1.0, 4 * len(relative) / _MOST_LAWS)
            relative = nodes[places(nodes, relative, down)]
        shift = relative / noise[:, None]
        one = np.broadcast_to(1 / noise[:, None], shift.shape)
        exact = len(norms.settings) * n_codes <= _MOST_EXACT
        if exact or clipped:
            columns = np.stack(np.broadcast_arrays(shift, rate, one), axis=-1).reshape(-1, 3)
            distinct, index = np.unique(columns, axis=0, return_inverse=True)
            laws, most = StepKinds(*distinct.T[:2]), distinct[:, 2]
            law = index.reshape(shift.shape)
        else:
            laws, law = _snapped(StepKinds(shift, rate), _APART, _MOST_LAWS, down)
            most = laws.shift.copy()
            np.maximum.at(most, law, one)
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
        return cls(norms, laws, most, cell, record, mix, weight, exact)

    def below(self) -> "Steps":
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
    """Record, mix and weight of each entry, and (n_mixes, n_settings) steps of mixes."""
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
    """Nodes for shifts and for rates, at first `apart`, then fewer; own values where few."""
    own_shifts, own_rates = np.unique(shift), np.unique(rate)
    for wider in 1.5 ** np.arange(40):
        shifts, rates = own_shifts, own_rates
        if len(shifts) > _FEW_SHIFTS:
            nodes = nodes_from_zero(float(shifts[-1]), wider * apart[0])
            above, met = places(nodes, shifts, False), np.zeros(len(nodes), bool)
            met[above] = met[np.maximum(above - 1, 0)] = True
            shifts = nodes[met]
        if len(rates) > _FEW_RATES:
            rates = np.unique(snapped_rates(rates, wider * apart[1], down=down))
        yield shifts, rates


def _snapped(
    kinds: StepKinds, apart: tuple[float, float], most: int, down: bool
) -> tuple[StepKinds, IntArray]:
    """At most `most` kinds that cost at least as much (or at most), and which one each is then."""
    for shifts, rates in _axes(kinds.shift, kinds.rate, apart, down):
        key = places(shifts, kinds.shift, down) + len(shifts) * places(rates, kinds.rate, down)
        met = np.zeros(len(shifts) * len(rates), bool)
        met[key] = True
        used = np.flatnonzero(met)
        if len(used) <= most:
            break
    row, column = np.divmod(used, len(shifts))
    return StepKinds(shifts[column], rates[row]), (np.cumsum(met) - 1)[key]


def condensed(
    kinds: StepKinds, steps: FloatArray, *, down: bool = False
) -> tuple[StepKinds, FloatArray]:
    """One example's (n,) steps of very many kinds, snapped to fewer that are at most 1e-4 apart."""
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
