"""Examples by group and label: their epsilons, and sums of all else. Sensitive.

Up to a million examples are kept one by one. More are counted in fine bins of epsilon, and what was
counted in parts of the data adds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce

import numpy as np
import pandas as pd

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv._columns import Grouping, Rows, frames_of, known_columns, to_floats
from indpriv.analysis.statistics import histogram
from indpriv.analysis.statistics.histogram import Histogram, blocks_of, merged
from indpriv.epsilon_table import Epsilons, beside


@dataclass(frozen=True)
class Sums:
    """Numbers and sums of each cell, (n_groups, n_labels) or (n_groups,); they add up over parts.

    Attributes:
        n, at_worst_case: number of training examples, and of those at the worst case.
        largest: epsilon; 0 without examples.
        n_losses, loss: number and sum of the finite losses of training examples.
        n_known, correct: number of training examples whose correctness is known, and of correct
            ones (of units, the sum of their shares).
        n_test, n_test_known, test_correct: the same of test examples.
    """

    n: IntArray
    at_worst_case: IntArray
    largest: FloatArray
    n_losses: IntArray
    loss: FloatArray
    n_known: IntArray
    correct: FloatArray
    n_test: IntArray
    n_test_known: IntArray
    test_correct: FloatArray

    def over_labels(self) -> Sums:
        """The sums (n_groups,) over all labels."""
        return Sums(
            **{
                name: values.max(axis=1) if name == "largest" else values.sum(axis=1)
                for name, values in vars(self).items()
            }
        )

    def of_label(self, code: int) -> Sums:
        """Those of one label."""
        return Sums(**{name: values[:, [code]] for name, values in vars(self).items()})

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            **{
                field.name: (np.maximum if field.name == "largest" else np.add)(
                    getattr(self, field.name), getattr(other, field.name)
                )
                for field in fields(self)
            }
        )


@dataclass(frozen=True)
class Values:
    """What is described of training examples, (n_examples,) each; NaN where unknown.

    groups, labels: codes.
    """

    epsilon: FloatArray
    at_worst_case: BoolArray
    loss: FloatArray
    correct: FloatArray
    groups: IntArray
    labels: IntArray

    def block(self, block: slice) -> Values:
        """Those of a range of them."""
        return Values(**{name: values[block] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Cells:
    """Training examples by group and label.

    Attributes:
        epsilon: (n_values,) epsilons, of single examples or means of bins.
        weights: (n_values,) number of examples that have each.
        groups, labels: (n_values,) codes.
        sums: (n_groups, n_labels) of all else.
    """

    epsilon: FloatArray
    weights: IntArray
    groups: IntArray
    labels: IntArray
    sums: Sums

    @classmethod
    def of(cls, parts: Iterable[Values], n: int, test: Sums) -> Cells:
        """The cells of all n training examples; one part where each is kept.

        test: sums (n_groups, n_labels) of the test examples.
        """
        shape = test.n.shape
        if n <= histogram.MOST_EXACT:
            (values,) = parts
            sums = test + _sums(values, shape)
            return cls(values.epsilon, np.ones(n, np.int64), values.groups, values.labels, sums)
        blocks = (
            CellCounts.of(values.block(block), shape)
            for values in parts
            for block in blocks_of(len(values.epsilon))
        )
        return reduce(CellCounts.__add__, blocks).cells(test)

    def of_label(self, code: int) -> Cells:
        """The cells of one label."""
        mine = self.labels == code
        return Cells(
            self.epsilon[mine],
            self.weights[mine],
            self.groups[mine],
            np.zeros(int(mine.sum()), np.int64),
            self.sums.of_label(code),
        )


@dataclass(frozen=True)
class CellCounts:
    """Training examples counted by group, label and bin of epsilon; parts of the data add up.

    Attributes:
        epsilon: histogram, whose cells are group * n_labels + label.
        sums: (n_groups, n_labels) of all else.
    """

    epsilon: Histogram
    sums: Sums

    @classmethod
    def of(cls, values: Values, shape: tuple[int, ...]) -> CellCounts:
        """Count the training examples of one part; shape: number of groups and of labels."""
        cells = values.groups * shape[1] + values.labels
        return cls(Histogram.of([values.epsilon], cells), _sums(values, shape))

    def __add__(self, other: CellCounts) -> CellCounts:
        return CellCounts(merged([self.epsilon, other.epsilon]), self.sums + other.sums)

    def cells(self, test: Sums | None = None) -> Cells:
        """The cells of all that was counted; test: sums of test examples."""
        sums = self.sums if test is None else self.sums + test
        groups, labels = np.divmod(self.epsilon.cells(), sums.n.shape[1])
        return Cells(self.epsilon.means(), self.epsilon.counts, groups, labels, sums)


def cells_of(
    epsilons: Epsilons, rows: Rows, test: Rows, groups: Grouping, labels: Grouping | None
) -> Cells:
    """The cells of all examples, read part by part; labels: None for one that all share."""

    def values() -> Iterator[Values]:
        read = known_columns(rows, [*groups.columns, "label", "loss", "correct"])
        for table, frame in beside(epsilons, rows, read):
            loss, correct = to_floats(frame["loss"]), to_floats(frame["correct"])
            codes = _codes(frame, groups, labels)
            yield Values(table.epsilon, table.at_worst_case, loss, correct, *codes)

    return Cells.of(values(), len(epsilons), sums_of_test(test, groups, labels))


def sums_of_test(test: Rows, groups: Grouping, labels: Grouping | None) -> Sums:
    """Sums (n_groups, n_labels) of test examples, read part by part; the others are 0."""
    shape = len(groups.names), 1 if labels is None else len(labels.names)
    sums = _sums_of_test(np.zeros(0), np.zeros(0, np.int64), shape)
    for frame in frames_of(test, known_columns(test, [*groups.columns, "label", "correct"])):
        of_group, of_label = _codes(frame, groups, labels)
        correct = to_floats(frame["correct"])
        sums += _sums_of_test(correct, of_group * shape[1] + of_label, shape)
    return sums


def _codes(
    frame: pd.DataFrame, groups: Grouping, labels: Grouping | None
) -> tuple[IntArray, IntArray]:
    own = groups.codes(frame)
    return own, np.zeros_like(own) if labels is None else labels.codes(frame)


def _sums(values: Values, shape: tuple[int, ...]) -> Sums:
    """Of training examples."""
    cells = values.groups * shape[1] + values.labels
    losses, known = np.isfinite(values.loss), np.isfinite(values.correct)
    largest = np.zeros(shape[0] * shape[1])
    np.maximum.at(largest, cells, values.epsilon)
    return replace(
        _sums_of_test(np.zeros(0), cells[:0], shape),
        n=_count(cells, shape),
        at_worst_case=_count(cells[values.at_worst_case], shape),
        largest=largest.reshape(shape),
        n_losses=_count(cells[losses], shape),
        loss=_total(cells[losses], values.loss[losses], shape),
        n_known=_count(cells[known], shape),
        correct=_total(cells[known], values.correct[known], shape),
    )


def _sums_of_test(correct: FloatArray, cells: IntArray, shape: tuple[int, ...]) -> Sums:
    """Sums (n_groups, n_labels) of test examples; those of training examples are 0.

    Args:
        correct: (n_test_examples,) NaN where unknown.
        cells: (n_test_examples,) group * n_labels + label.
        shape: number of groups and of labels.
    """
    known = np.isfinite(correct)
    none, nothing = np.zeros(shape, np.int64), np.zeros(shape)
    return Sums(
        n=none,
        at_worst_case=none,
        largest=nothing,
        n_losses=none,
        loss=nothing,
        n_known=none,
        correct=nothing,
        n_test=_count(cells, shape),
        n_test_known=_count(cells[known], shape),
        test_correct=_total(cells[known], correct[known], shape),
    )


def _count(cells: IntArray, shape: tuple[int, ...]) -> IntArray:
    return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def _total(cells: IntArray, values: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    found = np.bincount(cells, values, minlength=shape[0] * shape[1]).astype(np.float64)
    return found.reshape(shape)
