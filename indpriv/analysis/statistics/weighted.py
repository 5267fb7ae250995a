"""Statistics of examples that are given one by one, or as means of bins with numbers of examples.

Of up to MOST_EXACT examples each is a row of its own, of weight one. Of more, examples are counted
in fine bins part by part, and what was counted adds up to the same bits in any order. Each
statistic is written once, for values and weights. Sensitive.

A bin holds the floats that agree in their exponent and in the first bits of their significand: with
ten bits it is at most 2^-10 (0.1 %) of its values wide. What a bin counts and adds up are whole
numbers: how far its values lie above its edge, in their last places. The mean of a bin is that of
its values.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from indpriv._types import FloatArray, IntArray, NDArray

MOST_EXACT = 1_000_000  # more examples than this are analysed in bins
BITS = 10  # of the significand that say in which bin a number is
PAIR_BITS = 8  # where two numbers of each example are binned together
BLOCK = 1 << 20  # examples that are sorted at once
_SIGNIFICAND, _EXPONENT, _HALF = 52, 11, 21
_ENDS = ("least", "largest", "edge")
_MIN_PAIRS = 3  # two points always lie on a line
_FLOAT_NOISE = 1e-12  # a spread this small relative to the values is rounding error


def bin_width(bits: int = BITS) -> float:
    """Largest width of a bin, relative to any of its values."""
    return float(2.0**-bits)


def blocks_of(n: int) -> list[slice]:
    """Consecutive slices of BLOCK examples each, of n; one where there are none."""
    return [slice(start, start + BLOCK) for start in range(0, max(n, 1), BLOCK)]


class Condensed:
    """Examples that come in parts, as one frame with a weight in each row."""

    def __init__(self, *names: str, n: int, bits: int = BITS) -> None:
        """Begin without examples; each of the n to come has one or two columns of numbers."""
        self._names, self._in_bins = names, n > MOST_EXACT
        self._shift, self._code_bits = _SIGNIFICAND - bits, _EXPONENT + bits
        self._parts: list[dict[str, NDArray[Any]]] = []

    def add(self, cell: IntArray, *columns: FloatArray) -> None:
        """Add the next (n,) examples, with columns in the order of the names.

        Cells are whole numbers, of groups, say; below 2^20 where there are two columns. In bins,
        columns are finite and at least 0.
        """
        if not self._in_bins:
            self._parts.append(dict(zip(self._names, columns, strict=True)) | {"cell": cell})
            return
        for block in blocks_of(len(cell)):
            part = _merged(self._keyed(cell[block], [column[block] for column in columns]))
            self._parts = [_merged(*self._parts, part)]

    def _keyed(self, cell: IntArray, columns: Sequence[FloatArray]) -> dict[str, NDArray[Any]]:
        """Examples one by one, as they are counted; key: the cell, then the bin of each column."""
        key = cell.astype(np.int64)
        numbers = [np.abs(column, dtype=np.float64) for column in columns]  # -0.0 is 0.0
        for values in numbers:
            key = (key << self._code_bits) | (values.view(np.int64) >> self._shift)
        order = np.argsort(key, kind="stable")  # in order, all that follows is twice as fast
        rows = {"key": key[order], "weight": np.ones(len(key), np.int64)}
        for name, values in zip(self._names, (values[order] for values in numbers), strict=True):
            rest = values.view(np.int64) & ((1 << self._shift) - 1)
            rows |= {f"least_{name}": values, f"largest_{name}": values}
            rows |= {f"upper_{name}": rest >> _HALF, f"lower_{name}": rest & ((1 << _HALF) - 1)}
        return rows

    def frame(self) -> pd.DataFrame:
        """One row for each example, or for each bin of a cell.

        Columns are cell, weight (the number of examples), and for each name the mean under the
        name itself, and under least_, largest_ and edge_ before it the smallest and the largest of
        these examples and the lower edge of their bin.
        """
        if not self._in_bins:
            found = pd.concat(map(pd.DataFrame, self._parts), ignore_index=True)
            same = {f"{what}_{name}": found[name] for what in _ENDS for name in self._names}
            return found.assign(weight=np.ones(len(found), np.int64), **same)
        (rows,) = self._parts
        key, weight = rows["key"], rows["weight"]
        for name in reversed(self._names):
            code, key = key & ((1 << self._code_bits) - 1), key >> self._code_bits
            edge = (code << self._shift).view(np.float64)
            upper, lower = rows[f"upper_{name}"] / weight, rows[f"lower_{name}"] / weight
            mean = edge + (upper * 2.0**_HALF + lower) * np.spacing(edge)
            rows = rows | {name: mean, f"edge_{name}": edge}
        return pd.DataFrame(rows | {"cell": key})


def _merged(*parts: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The rows of all parts, those of one key added up, in the order of the keys."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(rows["key"], kind="stable")
    keys = rows["key"][order]
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    how = {"key": np.minimum, "least": np.minimum, "largest": np.maximum}
    return {
        name: how.get(name.partition("_")[0], np.add).reduceat(column[order], starts)
        for name, column in rows.items()
    }


def quantiles_by_cell(
    values: FloatArray,
    weights: IntArray,
    cells: IntArray,
    size: int,
    probabilities: Sequence[float],
) -> FloatArray:
    """Quantiles (size, n_probabilities) of each cell, linearly interpolated; NaN without examples.

    Values (n,) are finite, weights are numbers of examples that have each, cells are codes < size.
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
        above = place - before  # as numpy interpolates: never beyond the upper value
        found[known, number] = np.where(
            above < 0.5, low + (high - low) * above, high - (high - low) * (1 - above)
        )
    return found


def pearson(x: FloatArray, y: FloatArray, weights: IntArray | None = None) -> float | None:
    """Pearson's r of two finite arrays (n,); None below three pairs or where one is constant.

    weights: (n,) number of examples that have each pair; default one each.

    >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    1.0
    >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([5.0, 5.0, 5.0])) is None
    True
    """
    weights = ones(x) if weights is None else weights
    if weights.sum() < _MIN_PAIRS:
        return None
    centred = [_centred(values, weights) for values in (x, y)]
    if centred[0] is None or centred[1] is None:
        return None
    return float(np.clip(np.dot(weights * centred[0], centred[1]), -1.0, 1.0))


def spearman(x: FloatArray, y: FloatArray, weights: IntArray | None = None) -> float | None:
    """Spearman's rank correlation; ties share their mean rank; None where undefined."""
    weights = ones(x) if weights is None else weights
    return pearson(ranks(x, weights), ranks(y, weights), weights)


def variance(values: FloatArray, weights: IntArray) -> float:
    """Mean squared deviation from the mean."""
    deviations = values - np.average(values, weights=weights)
    return float(np.average(deviations**2, weights=weights))


def ranks(values: FloatArray, weights: IntArray) -> FloatArray:
    """(n,) ranks from 1 on of values that some number of examples have; ties share their mean."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=np.nan) != 0)
    through = np.cumsum(np.add.reduceat(weights[order], starts)) if len(starts) else starts
    mean = (np.concatenate([[0], through[:-1]]) + through + 1) / 2
    found = np.empty(len(values))
    found[order] = np.repeat(mean, np.diff(starts, append=len(values)))
    return found


def line(x: FloatArray, y: FloatArray, weights: IntArray | None = None) -> tuple[float, float]:
    """Intercept and slope of the least-squares line of y on x; x must not be constant."""
    weights = ones(x) if weights is None else weights
    centre = np.average(x, weights=weights)
    deviations = x - centre
    weighted = weights * deviations
    slope = float(np.dot(weighted, y) / np.dot(weighted, deviations))
    return float(np.average(y, weights=weights) - slope * centre), slope


def ones(values: FloatArray) -> IntArray:
    """(n,) weights of single examples."""
    return np.ones(len(values), np.int64)


def is_constant(values: FloatArray) -> bool:
    """Whether a non-empty array has no spread beyond float noise."""
    return _centred(values, ones(values)) is None


def _centred(values: FloatArray, weights: IntArray) -> FloatArray | None:
    """Values minus their mean, at unit length; None where they are constant up to float noise."""
    largest = float(np.max(np.abs(values)))
    if largest == 0:
        return None
    scaled = values / largest  # squares of scaled values cannot overflow
    deviations = scaled - np.average(scaled, weights=weights)
    length = float(np.sqrt(np.dot(weights * deviations, deviations)))
    return None if length <= _FLOAT_NOISE * weights.sum() ** 0.5 else deviations / length
