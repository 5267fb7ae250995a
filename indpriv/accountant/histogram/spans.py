"""Full records and batch norms together: each norm of an example governs a span of steps.

Full records are rows of all examples; batch norms add entries of single examples between them. A
norm governs the steps until the next one ("last") or half-way to its neighbours ("closest"; of two
equally close ones the larger). Half-way is the trapezoid rule for the divergence. Earlier
boundaries (e.g. at the geometric mean of the steps) suit runs whose norms fall from the start, but
are worse if norms are clipped at first: with batch norms and a pass every other epoch over 10,000
images of MNIST they raise the mean error of epsilon from 2.3 to 4.1 % of the median. Frequent
passes at the start help in both cases (benchmarks/fidelity.py). Sensitive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import IntArray
from indpriv.norm_log.batch_norms import BatchNormEntries


@dataclass(frozen=True)
class Spans:
    """Spans of steps of single examples, ordered by example, then by step.

    Together they are all steps of a block. A span may be followed by a tie: one step at which the
    norms of two spans are equally close.

    Attributes:
        example: (n_spans,) position in the block.
        norm, tie_norm: (n_spans,) comparable values that govern the span and its tie.
        begin: (n_spans,) first step. length: (n_spans,) may be 0.
        tie: (n_spans,) whether a tie follows.
        n_examples: of the block. total_steps: of the run.
    """

    example: NDArray[np.int32]
    norm: NDArray[Any]
    begin: NDArray[np.int32]
    length: NDArray[np.int32]
    tie: NDArray[np.bool_]
    tie_norm: NDArray[Any]
    n_examples: int
    total_steps: int

    def by_step(self) -> NDArray[Any]:
        """(total_steps, n_examples) value that governs each step."""
        values = np.stack([self.norm, self.tie_norm], axis=1).ravel()
        lengths = np.stack([self.length, self.tie.astype(np.int32)], axis=1).ravel()
        return np.repeat(values, lengths).reshape(self.n_examples, self.total_steps).T


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
        """What governs each step, by "last" or "closest"."""
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
        return Spans(
            example=self.example,
            norm=self.norm,
            begin=begin,
            length=end - begin,
            tie=tie,
            tie_norm=np.maximum(self.norm, np.append(self.norm[1:], self.norm[-1:])),
            n_examples=len(self.first),
            total_steps=total_steps,
        )
