"""Which norm of an example governs which step, and the bounds that norms count at. Sensitive.

Full records are rows of all examples; batch norms add entries of single examples between them. A
norm governs the steps until the next one ("last") or half-way to its neighbours ("closest"; of two
equally close ones the larger), which is the trapezoid rule for the divergence. Earlier boundaries
suit runs whose norms fall from the start, but are worse if norms are clipped at first
(benchmarks/fidelity.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import BatchNormEntries, BatchNorms, Levels

BETWEEN_RECORDS = ("last", "closest", "worst_case")
AT_CLIPPING_NORM = -1  # in place of a record: every example counts at max_grad_norm

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

    Attributes:
        levels: rounding of the log; None without.
        unit: the max_grad_norm that bounds are fractions of.
        bounds: (n_codes,) ascending from 0. The last one is a clipped norm of unknown size.
        exact: bounds are all the levels that there are; no norm lies between them.
        direct: codes are those of the log.
    """

    levels: Levels | None
    unit: float
    bounds: FloatArray
    exact: bool
    direct: bool

    @classmethod
    def of(cls, log: NormLog) -> NormCodes:
        """The codes of a log."""
        clips, steps = log.settings.max_grad_norm, log.recorded_steps
        if log.batch_norms is not None:
            steps = np.append(steps, log.batch_norms.steps)
        units = np.unique(clips[steps]) if len(steps) else clips[:1]
        unit, largest = float(units[0]), float(clips.max() / units[0])
        one = len(units) == 1
        if log.levels is not None and (one or len(units) * (log.levels.top + 1) <= _MOST_LEVELS):
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
            return np.asarray(np.minimum(values, np.asarray(self.n_codes - 1, values.dtype)))
        scale = (unit / self.unit).reshape(-1, *(1,) * (values.ndim - 1))
        if self.levels is None:
            return np.asarray(np.minimum(values / self.unit, self.bounds[-1]))
        relative = self.levels.relative(values) * scale
        return np.asarray(np.where(values > self.levels.top, self.bounds[-1], relative))

    @property
    def clipped(self) -> float:
        """The value of a clipped norm of unknown size."""
        return self.n_codes - 1 if self.direct else float(self.bounds[-1])

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

    @property
    def n_codes(self) -> int:
        """Number of codes."""
        return len(self.bounds)


@dataclass(frozen=True)
class GoverningNorms:
    """Which norm of an example counts in which step; its methods read blocks of examples.

    Steps are grouped by the record that governs them and by their settings. A step half-way between
    two records counts at the larger of both norms, example by example: the pair is one more record,
    whose number is n_records + its place in `pairs`. With batch norms, each step is a record.

    Attributes:
        log: the log.
        between_records: what governs steps between records.
        codes: the bounds at which norms are counted.
        pairs: (n_pairs,) records r such that a step lies half-way between r and r + 1.
        record: (n_groups,) number of a record or pair, ascending, or AT_CLIPPING_NORM.
        setting: (n_groups,) index into the distinct settings.
        steps: (n_groups,) number of steps.
        settings: the distinct ones, (n_settings,) each; snapped if `apart`.
        largest: (n_rows,) the largest max_grad_norm of the steps that each row of `read` governs.
        down: whether norms and settings between nodes cost too little, not too much.
    """

    log: NormLog
    between_records: str
    codes: NormCodes
    pairs: IntArray
    record: IntArray
    setting: IntArray
    steps: IntArray
    settings: StepSettings
    largest: FloatArray
    down: bool

    @classmethod
    def of(
        cls, log: NormLog, between_records: str, *, apart: float = 0.0, down: bool = False
    ) -> GoverningNorms:
        """Group the steps of a log.

        Args:
            log: the log.
            between_records: what governs steps between records; see `indpriv.account`.
            apart: relative distance of the settings that are told apart: each step then costs at
                least what its own settings do, or at most.
            down: at most, of settings and of norms between nodes.
        """
        _checks.check_choice("between_records", between_records, BETWEEN_RECORDS)
        settings = log.settings
        if apart:
            settings = replace(
                settings,
                noise_multiplier=snapped(settings.noise_multiplier, apart, down=not down),
                max_grad_norm=snapped(settings.max_grad_norm, apart, down=not down),
                sample_rate=snapped_rates(settings.sample_rate, apart, down=down),
            )
        recorded, rule = log.recorded_steps, between_records
        if log.batch_norms is not None:
            recorded, rule = np.arange(log.total_steps), "last"
        record, starts, pairs = _governing(recorded, log.total_steps, rule)
        lengths = np.diff(np.append(starts, log.total_steps))
        record, starts, lengths = record[lengths > 0], starts[lengths > 0], lengths[lengths > 0]
        largest, known = np.full(len(recorded) + len(pairs), 1e-300), record != AT_CLIPPING_NORM
        clips = np.maximum.reduceat(log.settings.max_grad_norm, starts)
        np.maximum.at(largest, record[known], clips[known])
        if not known.all():
            largest = np.append(largest, log.settings.max_grad_norm.max())
        setting, distinct = settings.distinct()
        if setting is None:
            setting = np.zeros(len(record), np.int64)
        else:
            record, lengths = np.repeat(record, lengths), np.ones(log.total_steps, np.int64)
        keys, inverse = np.unique((record + 1) * len(distinct) + setting, return_inverse=True)
        steps = np.bincount(inverse, weights=lengths, minlength=len(keys)).astype(np.int64)
        record, setting = keys // len(distinct) - 1, keys % len(distinct)
        return cls(
            log=log,
            between_records=between_records,
            codes=NormCodes.of(log),
            pairs=pairs,
            record=record,
            setting=setting,
            steps=steps,
            settings=distinct,
            largest=largest,
            down=down,
        )

    @property
    def bytes_per_example(self) -> int:
        """Memory that reading one example takes."""
        values = 1 if self.codes.direct else 64
        if self.log.batch_norms is None:
            return values * (self.log.n_records + len(self.pairs))
        norms = self.log.n_records + 1 + int(self.log.settings.sample_rate.sum())
        return _NORM_BYTES * norms + values * self.log.total_steps

    def read(self, block: NormLog) -> NDArray[Any]:
        """(n_rows, n_examples) values that govern: of each record, then of each tied pair.

        With batch norms: of each step. A last row is at AT_CLIPPING_NORM, where that governs any.
        """
        if self.log.batch_norms is not None:
            return (
                self.known(block)
                .spans(self.between_records, self.log.total_steps)
                .by_step(self.log.total_steps)
            )
        rows = [full := self.full(block)]
        if len(self.pairs):
            rows.append(np.maximum(full[self.pairs], full[self.pairs + 1]))
        if self.record[0] == AT_CLIPPING_NORM:
            rows.append(np.full((1, block.n_examples), self.codes.clipped, full.dtype))
        return np.concatenate(rows) if len(rows) > 1 else full

    def known(self, block: NormLog) -> KnownNorms:
        """The norms of full records and batch norms together, of a log with batch norms."""
        entries = cast(BatchNorms, block.batch_norms).read(0, block.n_examples)
        units = self.log.settings.max_grad_norm[entries.step]
        return KnownNorms.of(
            self.full(block),
            self.log.recorded_steps,
            replace(entries, norm=self.codes.read(entries.norm, units)),
            clipped=self.codes.clipped,
            total_steps=self.log.total_steps,
        )

    def always_clipped(self, block: NormLog) -> NDArray[np.bool_]:
        """(n_examples,) whether an example counts at max_grad_norm in every step of the run."""
        values = self.read(block)
        largest = np.broadcast_to(self.largest[:, None], values.shape)
        relative = self.codes.relative(values, largest)
        return np.asarray((relative >= 1.0).all(axis=0))

    def full(self, block: NormLog) -> NDArray[Any]:
        """(n_records, n_examples) comparable values of full records."""
        units = self.log.settings.max_grad_norm[self.log.recorded_steps]
        return self.codes.read(block.read(), units)


def _governing(
    recorded: IntArray, total_steps: int, between_records: str
) -> tuple[IntArray, IntArray, IntArray]:
    """Records that govern consecutive stretches of steps, the first step of each, and the pairs."""
    n_records, nothing = len(recorded), np.zeros(0, np.int64)
    records = np.arange(n_records)
    if n_records == 0:
        return np.array([AT_CLIPPING_NORM]), np.array([0]), nothing
    if between_records == "last":
        governing, starts, pairs = records, recorded, nothing
    elif between_records == "worst_case":
        clipped = np.full(n_records, AT_CLIPPING_NORM)
        governing = np.stack([records, clipped], axis=1).ravel()
        starts, pairs = np.stack([recorded, recorded + 1], axis=1).ravel(), nothing
    else:
        gaps = np.diff(recorded)
        pairs = np.flatnonzero(gaps % 2 == 0)
        closer_to_next = recorded[:-1] + gaps // 2 + 1
        half_way = recorded[pairs] + gaps[pairs] // 2
        starts = np.concatenate([recorded[:1], closer_to_next, half_way])
        governing = np.append(records, n_records + np.arange(len(pairs)))
        order = np.argsort(starts, kind="stable")
        governing, starts = governing[order], starts[order]
    if starts[0] > 0:
        governing, starts = np.append(AT_CLIPPING_NORM, governing), np.append(0, starts)
    return governing, starts, pairs


@dataclass(frozen=True)
class Spans:
    """Spans of steps of single examples, which together are all steps of a block.

    Arrays have shape (n_spans,), ordered by example, then by step.

    Attributes:
        example: position in the block.
        norm: comparable value that governs the span.
        begin, stop: first step, and the one after the last; a span may be empty.
    """

    example: NDArray[np.int32]
    norm: NDArray[Any]
    begin: NDArray[np.int32]
    stop: NDArray[np.int32]

    def by_step(self, total_steps: int) -> NDArray[Any]:
        """(total_steps, n_examples) value that governs each step."""
        return np.repeat(self.norm, self.stop - self.begin).reshape(-1, total_steps).T


@dataclass(frozen=True)
class KnownNorms:
    """All known norms of a block, ordered by example, then by step; arrays have shape (n,).

    Before its first known norm, each example has an entry with step 0 and a clipped norm.

    Attributes:
        example: position in the block. step: at which the norm was taken. norm: comparable value.
        first: (n_examples,) index of each example's first.
        batch_norms: (n_entries,) index of each batch norm.
    """

    example: NDArray[np.int32]
    step: NDArray[np.int32]
    norm: NDArray[Any]
    first: IntArray
    batch_norms: IntArray

    @classmethod
    def of(
        cls,
        rows: NDArray[Any],
        recorded_steps: IntArray,
        entries: BatchNormEntries,
        *,
        clipped: float,
        total_steps: int,
    ) -> KnownNorms:
        """Merge full records and batch norms.

        Args:
            rows: (n_records, n_examples) values of full records.
            recorded_steps: (n_records,).
            entries: batch norms of these examples; those at recorded steps are left out.
            clipped: the value that stands for a clipped norm.
            total_steps: of the run.
        """
        n_examples, width = rows.shape[1], len(recorded_steps) + 1
        steps = np.arange(total_steps)
        records_until = np.searchsorted(recorded_steps, steps, side="right").astype(np.int32)
        entries = entries.select(~np.isin(steps, recorded_steps)[entries.step])
        # The place of each entry: after the full record that it follows.
        after = entries.position.astype(np.int64) * width + records_until[entries.step]
        following = np.bincount(after, minlength=n_examples * width)
        full_at = np.cumsum(following) - following + np.arange(len(following))
        entry_at = np.arange(len(entries)) + after + 1
        step = np.empty(len(full_at) + len(entry_at), np.int32)
        norm = np.empty(len(step), rows.dtype)
        step[full_at] = np.tile(np.append(0, recorded_steps), n_examples)
        step[entry_at] = entries.step
        unknown = np.full((1, n_examples), clipped, rows.dtype)
        norm[full_at] = np.concatenate([unknown, rows]).T.ravel()
        norm[entry_at] = entries.norm
        first = full_at[::width]
        each = np.diff(np.append(first, len(step)))
        example = np.repeat(np.arange(n_examples, dtype=np.int32), each)
        return cls(example, step, norm, first, entry_at)

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

    def spans(self, between_records: str, total_steps: int) -> Spans:
        """What governs each step, by "last" or "closest".

        A step half-way between two norms is a span of its own.
        """
        last = np.append(self.first[1:], len(self.step)) - 1
        ahead = np.empty_like(self.step)  # the step of the next norm of the same example
        ahead[:-1] = self.step[1:]
        ahead[last] = total_steps
        if between_records == "last":
            return Spans(self.example, self.norm, self.step, ahead)
        gap, between = ahead - self.step, np.ones(len(ahead), bool)
        between[self.first] = between[last] = False
        begin, stop = self.step.copy(), np.where(between, self.step + (gap + 1) // 2, ahead)
        after = np.flatnonzero(between) + 1
        begin[after] = (self.step + gap // 2 + 1)[after - 1]
        tied = between & (gap % 2 == 0)
        each = np.repeat(np.arange(len(gap)), 1 + tied)
        tie = np.append(False, each[1:] == each[:-1])  # the second of two: one step
        larger = np.maximum(self.norm, np.append(self.norm[1:], self.norm[-1:]))
        return Spans(
            self.example[each],
            np.where(tie, larger[each], self.norm[each]),
            np.where(tie, stop[each], begin[each]),
            stop[each] + tie,
        )
