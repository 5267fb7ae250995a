"""Which norm of an example governs which step, and the bounds that norms count at. Sensitive.

Full records are rows of all examples; batch norms add entries of single examples between them. A
norm governs the steps until the next one ("last") or half-way to its neighbours ("closest"; of two
equally close ones the larger), which is the trapezoid rule for the divergence. Earlier boundaries
suit runs whose norms fall from the start, but are worse if norms are clipped at first
(benchmarks/fidelity.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from scipy.sparse import coo_array, csr_array

from indpriv import _checks
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import BatchNorms, Levels

BETWEEN_RECORDS = ("last", "closest", "worst_case")

Values = NDArray[Any]  # codes of a rounded log, or float64 norms in units of NormCodes.unit

_APART = 5e-4  # relative distance of nodes at the smallest max_grad_norm, for norms in between
_MOST_LEVELS, _MOST_NODES = 4096, 16_384  # of all max_grad_norms together
_NORM_BYTES = 64  # that the spans of one norm take while they are made


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

    Where the log is rounded under one max_grad_norm, its own codes are used as they are. Otherwise
    norms are read as floats, and located among the bounds.
    """

    levels: Levels  # rounding of the log
    unit: float  # the max_grad_norm that bounds are fractions of
    # (n_codes,) ascending from 0. The last one is a clipped norm of unknown size.
    bounds: FloatArray
    exact: bool  # bounds are all the levels that there are; no norm lies between them
    direct: bool  # codes are those of the log

    @classmethod
    def of(cls, log: NormLog) -> NormCodes:
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
        apart = _APART * (float(clips.min()) / unit / largest) ** 0.25
        nodes = nodes_from_zero(largest, max(apart, 4 / _MOST_NODES))
        return cls(log.levels, unit, np.append(nodes, 2 * largest), False, False)

    def read(self, values: Values, unit: FloatArray) -> Values:
        """Comparable values of recorded ones (n, ...).

        values: codes, or norms of a log without rounding. unit: (n,) max_grad_norm of each.
        """
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
    ) -> GoverningNorms:
        """Group the steps of a log.

        apart: relative distance of the settings that are told apart: each step then costs at least
        what its own settings do, or at most (down).
        """
        _checks.check_choice("between_records", between_records, BETWEEN_RECORDS)
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

    def known(self, block: NormLog) -> KnownNorms:
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
        """Spans of steps that one norm governs, by "last" or "closest"; together all steps.

        A step half-way between two norms is a span of its own.

        Returns:
            (n_spans,) example; norm; first step; and the one after the last. Spans may be empty.
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
