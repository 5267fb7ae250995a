"""What the rows of a log say about each step: codes or norms, tied pairs, and a max_grad_norm that moves. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.governing_records import AT_CLIPPING_NORM, Segments
from indpriv.norm_log.batch_norms import NO_ENTRIES, BatchNormEntries
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import NormLog

Rows = NDArray[Any]  # (n_rows, n_examples): codes of one or two bytes, or float64 norms


@dataclass(frozen=True)
class Block:
    """What a log says of consecutive examples: rows (n_records, n_examples) of full records, and free entries."""

    rows: Rows
    batch_norms: BatchNormEntries = NO_ENTRIES

    @classmethod
    def of(cls, log: NormLog, start: int, stop: int) -> Block:
        """Read the examples at positions start to stop."""
        return cls(
            log.read(start, stop),
            NO_ENTRIES if log.batch_norms is None else log.batch_norms.read(start, stop),
        )

    def part(self, start: int, stop: int) -> Block:
        """The examples at positions start to stop of the block."""
        return Block(self.rows[:, start:stop], self.batch_norms.block(start, stop))

    def take(self, examples: IntArray) -> Block:
        """Some of the examples."""
        return Block(self.rows[:, examples], self.batch_norms.take(examples, self.rows.shape[1]))


@dataclass(frozen=True)
class CodeTable:
    """What a code of each row stands for: value * unit bounds the norm.

    Infinity is a clipped code: its norm is unknown, so it counts as 1 whatever max_grad_norm became later.

    Attributes:
        clipped: the code that stands for all clipped ones in the rows of records.
        value: (n_rows, n_codes) ascending. unit: (n_rows,).
        translate: per tied pair, the lookup tables of the two records' codes; empty where all units agree.
    """

    clipped: int
    value: FloatArray
    unit: FloatArray
    translate: tuple[tuple[IntArray, IntArray], ...]

    @classmethod
    def of(cls, levels: Levels, unit: FloatArray, pairs: IntArray) -> CodeTable:
        """The table of records with these max_grad_norms and tied pairs."""
        fractions = np.append(levels.fractions, np.inf)
        first, second = unit[pairs], unit[pairs + 1]
        if np.array_equal(first, second):
            value = np.broadcast_to(fractions, (len(unit) + len(pairs), len(fractions)))
            return cls(levels.top + 1, value, np.append(unit, first), ())
        width = 2 * len(fractions) - 1
        value = np.full((len(unit) + len(pairs), width), np.inf)
        value[: len(unit), : len(fractions)] = fractions
        translate = []
        for pair, (one, other) in enumerate(zip(first, second, strict=True)):
            joint = np.unique(np.concatenate([fractions * one, fractions * other]))
            value[len(unit) + pair, : len(joint)] = joint
            translate.append(
                (np.searchsorted(joint, fractions * one), np.searchsorted(joint, fractions * other))
            )
        return cls(levels.top + 1, value, np.append(unit, np.ones(len(pairs))), tuple(translate))

    @property
    def n_codes(self) -> int:
        """Number of codes of a row."""
        return int(self.value.shape[1])

    def relative_norms(self, rows: IntArray, max_grad_norm: FloatArray) -> FloatArray:
        """(len(rows), n_codes) contributions as fractions of the max_grad_norm of a step."""
        return np.minimum(self.value[rows] * (self.unit[rows] / max_grad_norm)[:, None], 1.0)


@dataclass(frozen=True)
class GoverningRows:
    """The rows that govern the steps of a log: its records, then one row for each tied pair of records.

    Attributes:
        segments: which row governs which steps.
        codes: what codes stand for; None where norms are kept in full.
        n_records: number of rows that are records.
    """

    segments: Segments
    codes: CodeTable | None
    n_records: int

    @classmethod
    def of(cls, log: NormLog, segments: Segments) -> GoverningRows:
        """The governing rows of a log."""
        codes = None
        if log.levels is not None:
            codes = CodeTable.of(
                log.levels, log.settings.max_grad_norm[log.recorded_steps], segments.pairs
            )
        return cls(segments, codes, log.n_records)

    @property
    def known(self) -> IntArray:
        """Segments that a row governs (the others count at max_grad_norm)."""
        return np.flatnonzero(self.segments.row != AT_CLIPPING_NORM)

    @property
    def bytes_per_example(self) -> int:
        """Memory that reading one example takes."""
        return len(self.segments.pairs) + self.n_records

    def read(self, block: Block) -> Rows:
        """The governing rows of a block; one code for all clipped ones."""
        rows, pairs = block.rows, self.segments.pairs
        if self.codes is None:
            return (
                np.concatenate([rows, np.maximum(rows[pairs], rows[pairs + 1])])
                if len(pairs)
                else rows
            )
        codes = np.minimum(rows, np.asarray(self.codes.clipped, rows.dtype))
        if not self.codes.translate:
            return (
                np.concatenate([codes, np.maximum(codes[pairs], codes[pairs + 1])])
                if len(pairs)
                else codes
            )
        tied = [
            np.maximum(first[codes[pair]], second[codes[pair + 1]])
            for pair, (first, second) in zip(pairs, self.codes.translate, strict=True)
        ]
        return np.concatenate([codes, np.stack(tied)])

    def always_clipped(self, block: Block) -> NDArray[np.bool_]:
        """(n_examples,) whether an example counts at max_grad_norm in every step of the run."""
        rows, segments = self.read(block), self.segments
        largest = np.zeros(len(rows))  # max_grad_norm that a row meets
        np.maximum.at(
            largest, segments.row[self.known], segments.max_grad_norm[segments.setting[self.known]]
        )
        if self.codes is None:
            return np.asarray((rows >= largest[:, None]).all(axis=0))
        everywhere = (
            self.codes.relative_norms(np.arange(len(rows)), np.maximum(largest, 1e-300)) >= 1.0
        )
        first = np.where(largest > 0, np.argmax(everywhere, axis=1), 0)
        return np.asarray((rows >= first[:, None]).all(axis=0))
