"""Accounting of full and batch norms together: histograms of spans where settings are few, else step by step. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.cells import Mechanisms
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.governing_records import Participations, Segments, segments_of
from indpriv.accountant.histogram.governing_rows import Block, GoverningRows, Rows
from indpriv.accountant.histogram.spans import Known, Spans
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import NormLog

_MAX_LEVEL_CELLS = (
    2048  # (level, setting) cells of a histogram; beyond, steps are counted one by one
)
_SPAN_BYTES = 64  # that the spans of one norm take while they are made
_UNROLLED_BYTES = 40  # that one step takes where max_grad_norm moves


@dataclass(frozen=True)
class CountedSpans:
    """Spans of a log with few settings, as histograms need them; in place of GoverningRows.

    Attributes:
        log: the log. between_records: "last" or "closest".
        levels: its rounding. segments: its distinct settings.
        steps_before: (n_settings, total_steps + 1) steps under each setting before each step.
    """

    log: NormLog
    between_records: str
    levels: Levels
    segments: Segments
    steps_before: IntArray

    @property
    def bytes_per_example(self) -> int:
        """See GoverningRows."""
        return _SPAN_BYTES * _norms_per_example(self.log)

    def read(self, block: Block) -> Spans:
        """See GoverningRows."""
        return _spans(self.log, self.between_records, block)

    def always_clipped(self, block: Block) -> NDArray[np.bool_]:
        """See GoverningRows."""
        spans, top = self.read(block), self.levels.top
        below = ((spans.norm < top) & (spans.length > 0)) | (spans.tie & (spans.tie_norm < top))
        return np.asarray(
            np.bincount(spans.example, weights=below, minlength=spans.n_examples) == 0
        )


@dataclass(frozen=True)
class UnrolledSpans:
    """Spans of a log step by step, as if each step had a full record; in place of GoverningRows.

    Attributes:
        log: the log. between_records: "last" or "closest".
        steps: what governs a log with every step recorded.
    """

    log: NormLog
    between_records: str
    steps: GoverningRows

    @property
    def bytes_per_example(self) -> int:
        """See GoverningRows."""
        return _SPAN_BYTES * _norms_per_example(self.log) + _UNROLLED_BYTES * self.log.total_steps

    def read(self, block: Block) -> Rows:
        """See GoverningRows."""
        return self.steps.read(self._every_step(block))

    def always_clipped(self, block: Block) -> NDArray[np.bool_]:
        """See GoverningRows."""
        return self.steps.always_clipped(self._every_step(block))

    def _every_step(self, block: Block) -> Block:
        """The block with a full record at each step; codes are rounded up anew where max_grad_norm moves."""
        spans, levels, max_grad_norm = (
            _spans(self.log, self.between_records, block),
            self.log.levels,
            self.log.settings.max_grad_norm,
        )
        if levels is None or max_grad_norm.min() == max_grad_norm.max():
            return replace(block, rows=spans.by_step(spans.norm, spans.tie_norm))
        relative = spans.by_step(
            relative_of(levels, spans.norm), relative_of(levels, spans.tie_norm)
        )
        taken_at = spans.by_step(max_grad_norm[spans.step], max_grad_norm[spans.tie_step])
        rows = replace(levels, rounding_mode="up").encode(
            relative * (taken_at / max_grad_norm[:, None]), 1.0
        )
        return replace(block, rows=rows)


def governing_spans(log: NormLog, between_records: str) -> CountedSpans | UnrolledSpans:
    """What governs the steps of a log with batch norms."""
    every = np.arange(log.total_steps)
    each = replace(log, recorded_steps=every, rows=every, batch_norms=None)
    segments = segments_of(each, "last")
    n_settings = len(segments.noise_multiplier)
    moves = segments.max_grad_norm.min() < segments.max_grad_norm.max()
    if log.levels is None or moves or n_settings * (log.levels.top + 1) > _MAX_LEVEL_CELLS:
        return UnrolledSpans(log, between_records, GoverningRows.of(each, segments))
    setting = np.empty(log.total_steps, np.int64)
    setting[segments.row] = segments.setting
    under = setting == np.arange(n_settings)[:, None]
    before = np.concatenate([np.zeros((n_settings, 1), np.int64), np.cumsum(under, axis=1)], axis=1)
    return CountedSpans(log, between_records, log.levels, segments, before)


def _norms_per_example(log: NormLog) -> int:
    return log.n_records + 1 + int(log.settings.sample_rate.sum())


def _spans(log: NormLog, between_records: str, block: Block) -> Spans:
    known, value = known_of(log, block)
    return known.spans(between_records, log.total_steps, value)


def known_of(log: NormLog, block: Block) -> tuple[Known, FloatArray | None]:
    """The norms known of a block, and by which values they compare where they do not compare as they are."""
    clipped = np.inf if log.levels is None else log.levels.top + 1
    rows = (
        block.rows
        if log.levels is None
        else np.minimum(block.rows, np.asarray(clipped, block.rows.dtype))
    )
    known = Known.of(
        rows, log.recorded_steps, block.batch_norms, clipped=clipped, total_steps=log.total_steps
    )
    max_grad_norm = log.settings.max_grad_norm
    if log.levels is None or max_grad_norm.min() == max_grad_norm.max():
        return known, None
    return known, relative_of(log.levels, known.norm) * max_grad_norm[known.step]


def relative_of(levels: Levels, codes: NDArray[Any]) -> FloatArray:
    """Relative norms that codes stand for; infinity where clipped, whose norm is unknown."""
    bounds: FloatArray = np.append(levels.fractions, np.inf)
    found: FloatArray = bounds[np.minimum(codes, levels.top + 1)]
    return found


@dataclass(frozen=True)
class SpanCells:
    """Cells that are levels under a setting, for spans; see Cells.

    Attributes:
        mechanisms: the cells, the level running fastest.
        governing: whose spans are counted. n_levels: of one setting.
    """

    mechanisms: Mechanisms
    governing: CountedSpans
    n_levels: int

    @classmethod
    def of(cls, governing: CountedSpans) -> SpanCells:
        """The cells of a log with batch norms and few settings."""
        segments, levels, n_levels = governing.segments, governing.levels, governing.levels.top + 1
        mechanisms = Mechanisms(
            np.tile(levels.fractions, len(segments.noise_multiplier)),
            np.repeat(segments.noise_multiplier, n_levels),
            np.repeat(segments.sample_rate, n_levels),
        )
        return cls(mechanisms, governing, n_levels)

    @property
    def bytes_per_example(self) -> int:
        """See Cells."""
        return 8 * len(self.mechanisms)

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Cells."""
        return self.mechanisms.divergences(orders)

    def counts(self, rows: Spans) -> DenseCounts:
        """See Cells."""
        counts = np.empty((rows.n_examples, len(self.governing.steps_before), self.n_levels))
        cell = rows.example.astype(np.int64) * self.n_levels
        level = cell + np.minimum(rows.norm, self.n_levels - 1)
        tied = np.flatnonzero(rows.tie)
        tied_level = cell[tied] + np.minimum(rows.tie_norm[tied], self.n_levels - 1)
        end = rows.begin + rows.length
        for setting, before in enumerate(self.governing.steps_before):
            weight = before[end] - before[rows.begin]
            tie_weight = before[end[tied] + 1] - before[end[tied]]
            seen = np.bincount(level, weights=weight, minlength=rows.n_examples * self.n_levels)
            seen += np.bincount(tied_level, weights=tie_weight, minlength=len(seen))
            counts[:, setting] = seen.reshape(rows.n_examples, self.n_levels)
        return DenseCounts(counts.reshape(rows.n_examples, -1))

    def participations(self, rows: Spans) -> Participations:
        """See Cells; counts are whole numbers."""
        return self.mechanisms.participations(self.counts(rows).value)
