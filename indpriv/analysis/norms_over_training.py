"""What drives individual epsilon: gradient norms over training, by class. Sensitive.

After the paper's Figure 3: an example's epsilon adds up its norms, and norms fall as the model
learns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv._columns import partition
from indpriv.analysis.statistics.histogram import BLOCK
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.levels import Codes
from indpriv.norm_log.norm_log import NormLog

_MOST_RECORDS = 60  # points of a line; of more records, evenly spaced ones are read
_MOST_CLASSES = 20  # more labels are not classes, or a figure cannot distinguish them
_MOST_CELLS = 1 << 21  # counted at once
_AT_EACH_END = 10  # number of examples named


@dataclass(frozen=True)
class Drivers:
    """Norms over training, and the examples at both ends.

    Where training clipped individually, the log holds clip levels, headroom included, not norms.

    Attributes:
        steps: (n_steps,) of the records shown.
        classes: names; empty where labels are unknown or too many to be classes.
        median_norm: (n_classes, n_steps) median gradient norm of each class over max_grad_norm,
            before clipping; clipped norms are known up to the log's scale. None without examples.
        clipped_share: (n_steps,) share of all examples whose norm is above max_grad_norm.
        clipped_share_by_class: (n_classes, n_steps).
        most_protected, least_protected: ids of the examples with the smallest and the largest
            epsilon.
        n_at_most, n_at_least: number of examples that share the largest and the smallest of these
            epsilons.
    """

    steps: tuple[int, ...]
    classes: tuple[str, ...]
    median_norm: tuple[tuple[float | None, ...], ...]
    clipped_share: tuple[float, ...]
    clipped_share_by_class: tuple[tuple[float | None, ...], ...]
    most_protected: tuple[Any, ...]
    least_protected: tuple[Any, ...]
    n_at_least: int
    n_at_most: int


def describe_drivers(log: NormLog, table: EpsilonTable, train: pd.DataFrame | None) -> Drivers:
    """Describe what made the epsilons of a table.

    `train` holds the training examples in the log's order; None where labels are unknown.
    """
    classes, codes = _classes(train, log.n_examples)
    shown = evenly_spaced_records(log, _MOST_RECORDS)
    medians: list[list[float | None]] = []
    clipped: list[tuple[float, list[float | None]]] = []
    for row in shown:
        record = read_one(log, row)
        own_medians, sizes = [], []
        for counts in _counts(record, codes, max(1, len(classes))):
            own_medians.append(_median(counts, record.norms))
            sizes.append((int(counts[record.above].sum()), int(counts.sum())))
        medians.append(own_medians)
        share = sum(above for above, _ in sizes) / sum(n for _, n in sizes)
        clipped.append((share, [above / n if n else None for above, n in sizes]))
    lowest_first, highest_first = (_first(table.epsilon, sign) for sign in (1, -1))
    lowest, highest = table.epsilon[lowest_first[0]], table.epsilon[highest_first[0]]
    return Drivers(
        steps=tuple(log.recorded_steps[shown].tolist()),
        classes=classes,
        median_norm=tuple(
            tuple(record[code] for record in medians) for code in range(len(classes))
        ),
        clipped_share=tuple(share for share, _ in clipped),
        clipped_share_by_class=tuple(
            tuple(shares[code] for _, shares in clipped) for code in range(len(classes))
        ),
        most_protected=tuple(table.example_ids[lowest_first].tolist()),
        least_protected=tuple(table.example_ids[highest_first].tolist()),
        n_at_least=int((table.epsilon == lowest).sum()),
        n_at_most=int((table.epsilon == highest).sum()),
    )


def _classes(train: pd.DataFrame | None, n: int) -> tuple[tuple[str, ...], IntArray]:
    if train is None:
        return (), np.zeros(n, dtype=np.int64)
    labels = partition(train, train.iloc[:0], "label", max_values=None)
    if len(labels.names) > _MOST_CLASSES:
        return (), np.zeros(n, dtype=np.int64)
    return labels.names, labels.train_codes


@dataclass(frozen=True)
class Record:
    """The norms of all examples at one step.

    Attributes:
        codes: (n_examples,) into norms.
        norms: over max_grad_norm, increasing.
        above: of each of these norms, whether it is above max_grad_norm.
    """

    codes: NDArray[np.integer]
    norms: FloatArray
    above: BoolArray

    @property
    def clipped(self) -> BoolArray:
        """(n_examples,) whether the norm is above max_grad_norm."""
        return np.asarray(self.above[self.codes])


def evenly_spaced_records(log: NormLog, most: int) -> list[int]:
    """Positions of at most this many readable records, with the first and the last of them."""
    rows = np.flatnonzero(~np.isin(log.recorded_steps, log.unreadable_steps))
    places = np.linspace(0, len(rows) - 1, most).round() if len(rows) else np.zeros(0)
    return [int(row) for row in rows[np.unique(places.astype(np.int64))]]


def read_one(log: NormLog, row: int) -> Record:
    """The record at one position."""
    found = log.records.read(log.rows[[row]], 0, log.n_examples)[0]
    if log.levels is not None:
        every_code: Codes = np.arange(log.levels.max_code + 1, dtype=np.uint16)
        return Record(found, log.levels.norms(every_code, 1.0), every_code > log.levels.top)
    clip = float(log.settings.max_grad_norm[log.recorded_steps[row]])
    norms, codes = np.unique(found.astype(np.float64) / clip, return_inverse=True)
    return Record(codes, norms, norms > 1)


def _counts(record: Record, classes: IntArray, n_classes: int) -> Iterator[IntArray]:
    """For each class, the number (n_norms,) of examples that have each norm."""
    n_norms = len(record.norms)
    together = max(1, _MOST_CELLS // n_norms)  # without rounding, norms are as many as examples
    for first in range(0, n_classes, together):
        size = min(together, n_classes - first)
        found = np.zeros((size + 1) * n_norms, np.int64)
        for start in range(0, len(classes), BLOCK):
            block = slice(start, start + BLOCK)
            own = classes[block] - first
            own = np.where((own >= 0) & (own < size), own, size)
            found += np.bincount(own * n_norms + record.codes[block], minlength=len(found))
        yield from found.reshape(size + 1, n_norms)[:size]


def _median(counts: IntArray, norms: FloatArray) -> float | None:
    """Median norm, from how many examples have each; None without any."""
    up_to = np.cumsum(counts)
    if not up_to[-1]:
        return None
    middle = [(int(up_to[-1]) - 1) // 2, int(up_to[-1]) // 2]
    return float(norms[np.searchsorted(up_to, middle, side="right")].mean())


def _first(epsilon: FloatArray, sign: int) -> IntArray:
    """Positions of the smallest epsilons (sign 1) or the largest; of equal ones, see below.

    Among the smallest the first in the table come first, among the largest the last.
    """
    if len(epsilon) > _AT_EACH_END:
        bound = sign * np.partition(sign * epsilon, _AT_EACH_END - 1)[_AT_EACH_END - 1]
        near = np.flatnonzero(sign * epsilon <= sign * bound)
    else:
        near = np.arange(len(epsilon))
    order = near[np.argsort(epsilon[near], kind="stable")]
    return order[::sign][:_AT_EACH_END]
