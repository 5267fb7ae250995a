"""Full and batch norms together: each example has norms at steps of its own, and each norm governs a span of steps.

Full records are rows of all examples; batch norms add entries of single examples between them. A norm governs the
steps until the next one ("last") or half-way to its neighbours ("closest"; of two equally close ones the larger).
Half-way stays: it is the trapezoid rule for the divergence. Earlier boundaries (at the geometric mean of the steps, say)
suit runs whose norms fall at once and hurt where they stay clipped at first: with batch norms and a pass every other epoch
over 10,000 images of MNIST they take the mean error of epsilon from 2.3 to 4.1 % of the median. Passes close together at
the start help in both (benchmarks/fidelity.py). Sensitive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.norm_log.batch_norms import BatchNormEntries


@dataclass(frozen=True)
class Spans:
    """Spans of steps of single examples, ordered by example and then by step; together they are every step of a block.

    Each span may be followed by a tie: one step at which the norms of two spans are equally close.

    Attributes:
        example: (n_spans,) position in the block.
        norm, tie_norm: (n_spans,) what governs the span and its tie: codes or float64 norms, as in the rows.
        step, tie_step: (n_spans,) at which those norms were taken.
        begin: (n_spans,) first step. length: (n_spans,) may be 0.
        tie: (n_spans,) whether a tie follows.
        n_examples: of the block. total_steps: of the run.
    """

    example: NDArray[np.int32]
    norm: NDArray[Any]
    step: NDArray[np.int32]
    begin: NDArray[np.int32]
    length: NDArray[np.int32]
    tie: NDArray[np.bool_]
    tie_norm: NDArray[Any]
    tie_step: NDArray[np.int32]
    n_examples: int
    total_steps: int

    def by_step(self, values: NDArray[Any], tie_values: NDArray[Any]) -> NDArray[Any]:
        """(total_steps, n_examples) array of a value of each span and its tie."""
        both = np.stack([values, tie_values], axis=1).ravel()
        lengths = np.stack([self.length, self.tie.astype(np.int32)], axis=1).ravel()
        return np.repeat(both, lengths).reshape(self.n_examples, self.total_steps).T


@dataclass(frozen=True)
class Known:
    """All norms that are known of a block of examples, ordered by example and then by step; arrays have shape (n,).

    The first of each example stands for nothing known yet: step 0 and a clipped norm.

    example: position in the block. step: at which the norm was taken. norm: code or float64 norm.
    first: (n_examples,) index of each example's first. batch_norms: (n_entries,) indices that batch norms have.
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
        free: BatchNormEntries,
        *,
        clipped: float,
        total_steps: int,
    ) -> Known:
        """Merge full and batch norms.

        Args:
            rows: (n_records, n_examples) of full records.
            recorded_steps: (n_records,).
            free: entries of these examples; those at recorded steps say nothing new and are left out.
            clipped: the code or norm that stands for a clipped one.
            total_steps: of the run.
        """
        n_examples, width = rows.shape[1], len(recorded_steps) + 1
        records_until = np.searchsorted(
            recorded_steps, np.arange(total_steps), side="right"
        ).astype(np.int32)
        new = np.ones(total_steps, bool)
        new[recorded_steps] = False
        free = free.select(new[free.step])
        gap = (
            free.position.astype(np.int64) * width + records_until[free.step]
        )  # the full record that each one follows
        in_gap = np.bincount(gap, minlength=n_examples * width)
        full_at = np.cumsum(in_gap) - in_gap + np.arange(len(in_gap))
        free_at = np.arange(len(free)) + gap + 1
        step = np.empty(len(full_at) + len(free_at), np.int32)
        norm = np.empty(len(step), rows.dtype)
        step[full_at] = np.tile(np.append(0, recorded_steps), n_examples)
        step[free_at] = free.step
        norm[full_at] = np.concatenate(
            [np.full((1, n_examples), clipped, rows.dtype), rows]
        ).T.ravel()
        norm[free_at] = np.minimum(free.norm, rows.dtype.type(clipped))
        first = full_at[::width]
        each = np.diff(np.append(first, len(step)))
        return cls(
            np.repeat(np.arange(n_examples, dtype=np.int32), each), step, norm, first, free_at
        )

    def in_place_of_batch_norms(
        self, between_records: str, value: FloatArray | None = None
    ) -> IntArray:
        """(n_entries,) index of the norm that would govern the step of each batch norm if that one were not known.

        value: as of `spans`.
        """
        before, after = self.batch_norms - 1, np.minimum(self.batch_norms + 1, len(self.step) - 1)
        if between_records == "last":
            return before
        compared = self.norm if value is None else value
        away_before, away_after = (
            self.step[self.batch_norms] - self.step[before],
            self.step[after] - self.step[self.batch_norms],
        )
        later = (away_after < away_before) | (
            (away_after == away_before) & (compared[after] > compared[before])
        )
        someone = (after > self.batch_norms) & (
            self.example[after] == self.example[self.batch_norms]
        )
        known_before = before != self.first[self.example[self.batch_norms]]
        return np.where(later & someone & known_before, after, before)

    def spans(
        self, between_records: str, total_steps: int, value: FloatArray | None = None
    ) -> Spans:
        """What governs each step, by "last" or "closest".

        value: (n,) by which norms taken at different steps compare, where they do not compare as they are.
        """
        last = np.append(self.first[1:], len(self.step)) - 1
        ahead = np.empty_like(self.step)  # the step of the next norm of the same example
        ahead[:-1] = self.step[1:]
        ahead[last] = total_steps
        gap = ahead - self.step
        begin, end, tie = self.step.copy(), ahead.copy(), np.zeros(len(gap), bool)
        if between_records == "closest":
            between = np.ones(len(gap), bool)
            between[self.first] = between[last] = False
            end[between] = (self.step + (gap + 1) // 2)[between]
            after = np.flatnonzero(between) + 1
            begin[after] = (self.step + gap // 2 + 1)[after - 1]
            tie = between & (gap % 2 == 0)
        compared = self.norm if value is None else value
        other = np.minimum(np.arange(len(gap)) + 1, len(gap) - 1)
        larger = np.where(compared[other] > compared, other, np.arange(len(gap)))
        return Spans(
            example=self.example,
            norm=self.norm,
            step=self.step,
            begin=begin,
            length=end - begin,
            tie=tie,
            tie_norm=self.norm[larger],
            tie_step=self.step[larger],
            n_examples=len(self.first),
            total_steps=total_steps,
        )
