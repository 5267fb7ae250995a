"""What drives individual epsilon: gradient norms over training, by class. Sensitive.

After the paper's Figure 3: an example's epsilon adds up its norms, and norms fall as the model
learns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv._columns import Grouping, Rows, as_rows, label_grouping
from indpriv._files import ROW_GROUP_SIZE
from indpriv.analysis.statistics import histogram
from indpriv.analysis.statistics.histogram import Histogram, merged
from indpriv.epsilon_table import Epsilons, EpsilonTable
from indpriv.norm_log.levels import Codes, Levels
from indpriv.norm_log.norm_log import NormLog

_MOST_RECORDS = 60  # points of a line; of more records, evenly spaced ones are read
_MOST_CLASSES = 20  # more labels are not classes, or a figure cannot distinguish them
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


def describe_drivers(
    log: NormLog, epsilons: Epsilons, train: pd.DataFrame | Rows | None
) -> Drivers:
    """Describe what made epsilons.

    `train` holds the training examples in the log's order; None where labels are unknown.
    """
    rows = None if train is None else as_rows(train)
    labels = _classes(rows)
    shown = evenly_spaced_records(log, _MOST_RECORDS)
    classes = () if labels is None else labels.names
    examples = _Examples(log, rows, labels)
    counted = examples.rounded(shown, log.levels) if log.levels else map(examples.unrounded, shown)
    described = [_described(norms, max(1, len(classes))) for norms in counted]
    lowest, highest = _End(1), _End(-1)
    for table in epsilons.tables():
        lowest.look_at(table)
        highest.look_at(table)
    return Drivers(
        steps=tuple(log.recorded_steps[shown].tolist()),
        classes=classes,
        median_norm=tuple(
            tuple(medians[code] for medians, _, _ in described) for code in range(len(classes))
        ),
        clipped_share=tuple(share for _, share, _ in described),
        clipped_share_by_class=tuple(
            tuple(shares[code] for _, _, shares in described) for code in range(len(classes))
        ),
        most_protected=lowest.named(),
        least_protected=highest.named(),
        n_at_least=lowest.n_equal,
        n_at_most=highest.n_equal,
    )


def _classes(rows: Rows | None) -> Grouping | None:
    """Labels as classes; None where they are unknown or too many."""
    if rows is None:
        return None
    labels = label_grouping(rows, rows.read(0, 0))
    return None if labels is None or len(labels.names) > _MOST_CLASSES else labels


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


@dataclass(frozen=True)
class _Norms:
    """Norms of all examples at one step.

    Attributes:
        norms: (n,) over max_grad_norm.
        above: (n,) whether they are above max_grad_norm.
        classes: (n,) codes of classes.
        counts: (n,) the number of examples of this class with this norm.
    """

    norms: FloatArray
    above: BoolArray
    classes: IntArray
    counts: IntArray


@dataclass(frozen=True)
class _Examples:
    """Records by class, read a range of examples at a time."""

    log: NormLog
    rows: Rows | None
    labels: Grouping | None

    def rounded(self, shown: Sequence[int], levels: Levels) -> Iterator[_Norms]:
        """Yield the norms at records whose norms are rounded."""
        n_classes = len(self.labels.names) if self.labels else 1
        every_code: Codes = np.arange(levels.max_code + 1, dtype=np.uint16)
        counts = np.zeros((len(shown), n_classes * len(every_code)), np.int64)
        for start, stop, classes in self._ranges():
            found = self.log.records.read(self.log.rows[list(shown)], start, stop)
            for record, codes in zip(counts, found, strict=True):
                record += np.bincount(classes * len(every_code) + codes, minlength=len(record))
        norms = np.tile(levels.norms(every_code, 1.0), n_classes)
        above = np.tile(every_code > levels.top, n_classes)
        of_class = np.repeat(np.arange(n_classes), len(every_code))
        return (_Norms(norms, above, of_class, record) for record in counts)

    def unrounded(self, row: int) -> _Norms:
        """The norms at one record; of more than a million examples, counted in bins of 0.1 %."""
        clip = float(self.log.settings.max_grad_norm[self.log.recorded_steps[row]])
        parts: list[tuple[FloatArray, IntArray]] = []
        bins: list[Histogram] = []
        for start, stop, classes in self._ranges():
            read = self.log.records.read(self.log.rows[[row]], start, stop)[0]
            norms = read.astype(np.float64) / clip
            if self.log.n_examples <= histogram.MOST_EXACT:
                parts.append((norms, classes))
            else:
                finite = np.minimum(norms, np.finfo(np.float64).max)
                bins = [merged([*bins, Histogram.of([finite], classes * 2 + (norms > 1))])]
        if bins:
            of_class, above = np.divmod(bins[0].cells(), 2)
            return _Norms(bins[0].means(), above == 1, of_class, bins[0].counts)
        norms, classes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return _Norms(norms, norms > 1, classes, np.ones(len(norms), np.int64))

    def _ranges(self) -> Iterator[tuple[int, int, IntArray]]:
        """Yield (start, stop, codes of classes) of consecutive examples."""
        for start in range(0, self.log.n_examples, ROW_GROUP_SIZE):
            stop = min(start + ROW_GROUP_SIZE, self.log.n_examples)
            classes = np.zeros(stop - start, np.int64)
            if self.labels is not None and self.rows is not None:
                classes = self.labels.codes(self.rows.read(start, stop, ["label"]))
            yield start, stop, classes


def _described(
    found: _Norms, n_classes: int
) -> tuple[list[float | None], float, list[float | None]]:
    """Medians by class, the share above max_grad_norm, and this share by class."""
    medians, sizes = [], []
    for code in range(n_classes):
        mine = found.classes == code
        norms, counts = found.norms[mine], found.counts[mine]
        order = np.argsort(norms, kind="stable")
        medians.append(_median(counts[order], norms[order]))
        sizes.append((int(counts[found.above[mine]].sum()), int(counts.sum())))
    share = sum(above for above, _ in sizes) / sum(n for _, n in sizes)
    return medians, share, [above / n if n else None for above, n in sizes]


def _median(counts: IntArray, norms: FloatArray) -> float | None:
    """Median norm, from how many examples have each; None without any."""
    up_to = np.cumsum(counts)
    if not counts.any():
        return None
    middle = [(int(up_to[-1]) - 1) // 2, int(up_to[-1]) // 2]
    return float(norms[np.searchsorted(up_to, middle, side="right")].mean())


class _End:
    """The examples with the smallest epsilons (sign 1) or the largest (-1), of parts in order.

    n_equal: number of examples that share the smallest, or the largest.
    """

    def __init__(self, sign: int) -> None:
        self._sign, self.n_equal = sign, 0
        self._epsilon, self._ids = np.zeros(0), np.zeros(0, object)

    def look_at(self, table: EpsilonTable) -> None:
        """Look at the next examples."""
        near = np.sort(_first(table.epsilon, self._sign))
        epsilon = np.concatenate([self._epsilon, table.epsilon[near]])
        outer = self._sign * (self._sign * epsilon).min()
        before = self.n_equal if (self._epsilon == outer).any() else 0
        self.n_equal = before + int((table.epsilon == outer).sum())
        ids = np.concatenate([self._ids, np.array(table.example_ids[near].tolist(), object)])
        kept = np.sort(_first(epsilon, self._sign))
        self._epsilon, self._ids = epsilon[kept], ids[kept]

    def named(self) -> tuple[Any, ...]:
        """Their ids, the outermost first."""
        return tuple(self._ids[_first(self._epsilon, self._sign)].tolist())


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
