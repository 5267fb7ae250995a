"""Counts of non-negative numbers in fine bins, which add up over parts in any order. Sensitive.

A bin holds the floats that agree in their exponent and in the first bits of their significand: with
ten bits it is at most 2^-10 (0.1 %) of its values wide. What a bin counts and adds up are whole
numbers, so that merging parts gives the same bits whatever their order, and the mean of a bin is
that of its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray, IntArray

MOST_EXACT = 1_000_000  # more examples than this are analysed from histograms
BITS = 10  # of the significand that say in which bin a number is
PAIR_BITS = 8  # where two numbers of each example are binned together
BLOCK = 1 << 20  # examples that are sorted at once
_SIGNIFICAND, _EXPONENT, _HALF = 52, 11, 21


def bin_width(bits: int = BITS) -> float:
    """Largest width of a bin, relative to any of its values."""
    return float(2.0**-bits)


def blocks_of(n: int) -> list[slice]:
    """Consecutive slices of BLOCK examples each, of n; one where there are none."""
    return [slice(start, start + BLOCK) for start in range(0, max(n, 1), BLOCK)]


@dataclass(frozen=True)
class Histogram:
    """Numbers of examples by cell (a group, say) and by the bins of one or more columns.

    Attributes:
        keys: (n_bins,) increasing: the cell, then the bin of each column, as one whole number.
        counts: (n_bins,) number of examples in each bin, at least 1.
        least, largest: (n_columns, n_bins) smallest and largest value in each bin.
        rests: (n_columns, 2, n_bins) sums of how far values lie above the edge of their bin, in
            their last places: of the upper and of the lower half of that number.
        bits: of the significand that say in which bin a number is.
    """

    keys: IntArray
    counts: IntArray
    least: FloatArray
    largest: FloatArray
    rests: IntArray
    bits: int

    @classmethod
    def of(
        cls, columns: Sequence[FloatArray], cells: IntArray | None = None, *, bits: int = BITS
    ) -> Histogram:
        """Count the examples of one part.

        Args:
            columns: one or two arrays (n,) of finite numbers of at least 0.
            cells: (n,) whole numbers below 2^20 for two columns; None for a single cell.
            bits: of the significand that say in which bin a number is.
        """
        parts = []
        for block in blocks_of(len(columns[0])):
            own = None if cells is None else cells[block]
            parts.append(_counted([column[block] for column in columns], own, bits))
        return merged(parts)

    @property
    def n(self) -> int:
        """Number of examples."""
        return int(self.counts.sum())

    def cells(self) -> IntArray:
        """(n_bins,) the cell of each bin."""
        return self.keys >> (len(self.least) * self._code_bits)

    def means(self, column: int = 0) -> FloatArray:
        """(n_bins,) mean of a column in each bin."""
        edge = self.edges(column)
        last_place = np.spacing(edge)
        upper, lower = self.rests[column] / self.counts
        found: FloatArray = edge + (upper * 2.0**_HALF + lower) * last_place
        return found

    def edges(self, column: int = 0) -> FloatArray:
        """(n_bins,) lower edge of each bin of a column."""
        after = (len(self.least) - 1 - column) * self._code_bits
        codes = (self.keys >> after) & ((1 << self._code_bits) - 1)
        return (codes << (_SIGNIFICAND - self.bits)).view(np.float64)

    @property
    def _code_bits(self) -> int:
        return _EXPONENT + self.bits


def merged(parts: Sequence[Histogram]) -> Histogram:
    """The histogram of all examples of several parts, the same bits in any order."""
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = _starts(keys)
    if not len(starts):
        return parts[0]
    return Histogram(
        keys=keys[starts],
        counts=np.add.reduceat(np.concatenate([part.counts for part in parts])[order], starts),
        least=np.minimum.reduceat(_joined([part.least for part in parts], order), starts, axis=-1),
        largest=np.maximum.reduceat(
            _joined([part.largest for part in parts], order), starts, axis=-1
        ),
        rests=np.add.reduceat(_joined([part.rests for part in parts], order), starts, axis=-1),
        bits=parts[0].bits,
    )


def _counted(columns: Sequence[FloatArray], cells: IntArray | None, bits: int) -> Histogram:
    shift = _SIGNIFICAND - bits
    whole = [
        np.ascontiguousarray(column, dtype=np.float64).view(np.int64) & np.int64((1 << 63) - 1)
        for column in columns  # without the sign of -0.0
    ]
    keys = np.zeros(len(columns[0]), np.int64) if cells is None else cells.astype(np.int64)
    for number in whole:
        keys = (keys << (_EXPONENT + bits)) | (number >> shift)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = _starts(keys)
    values = np.stack([number[order].view(np.float64) for number in whole])
    rest = np.stack([number[order] & ((1 << shift) - 1) for number in whole])
    halves = np.stack([rest >> _HALF, rest & ((1 << _HALF) - 1)], axis=1)
    some = len(starts) > 0
    return Histogram(
        keys=keys[starts],
        counts=np.diff(starts, append=len(keys)),
        least=np.minimum.reduceat(values, starts, axis=-1) if some else values,
        largest=np.maximum.reduceat(values, starts, axis=-1) if some else values,
        rests=np.add.reduceat(halves, starts, axis=-1) if some else halves,
        bits=bits,
    )


def _starts(keys: IntArray) -> IntArray:
    """Positions at which another key begins."""
    return np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))


def _joined(parts: Sequence[np.ndarray], order: IntArray) -> np.ndarray:
    return np.concatenate(parts, axis=-1)[..., order]


def quantiles_by_cell(
    values: FloatArray,
    weights: IntArray,
    cells: IntArray,
    size: int,
    probabilities: Sequence[float],
) -> FloatArray:
    """Quantiles (size, n_probabilities) of each cell, linearly interpolated; NaN without examples.

    Args:
        values: (n,) finite.
        weights: (n,) number of examples that have each value.
        cells: (n,) codes below size.
        size: number of cells.
        probabilities: from 0 to 1.
    """
    order = np.lexsort((values, cells))
    ordered, up_to = values[order], np.cumsum(weights[order])
    totals = np.bincount(cells, weights, minlength=size).astype(np.int64)
    begins = np.cumsum(totals) - totals
    known = totals > 0
    found = np.full((size, len(probabilities)), np.nan)
    for number, probability in enumerate(probabilities):
        place = probability * (totals - 1)[known]
        before = np.floor(place).astype(np.int64)
        after = np.minimum(before + 1, totals[known] - 1)
        low, high = (
            ordered[np.searchsorted(up_to, begins[known] + rank, side="right")]
            for rank in (before, after)
        )
        found[known, number] = low + (high - low) * (place - before)
    return found
