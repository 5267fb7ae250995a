"""Examples by group and label: their epsilons, and sums of all else. Sensitive.

Up to a million examples are kept one by one. More are counted in fine bins of epsilon, and what was
counted in parts of the data adds up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce

import numpy as np

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv.analysis.statistics import histogram
from indpriv.analysis.statistics.histogram import BLOCK, Histogram, merged


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
    """What is described by group, (n_examples,) or (n_test_examples,); NaN where unknown."""

    epsilon: FloatArray
    at_worst_case: BoolArray
    loss: FloatArray
    correct: FloatArray
    test_correct: FloatArray

    def train_block(self, block: slice) -> Values:
        """Those of a range of training examples."""
        return Values(
            self.epsilon[block],
            self.at_worst_case[block],
            self.loss[block],
            self.correct[block],
            self.test_correct[:0],
        )


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
    def of(
        cls,
        values: Values,
        groups: tuple[IntArray, IntArray],
        labels: tuple[IntArray, IntArray],
        shape: tuple[int, int],
    ) -> Cells:
        """The cells of all examples.

        Args:
            values: of all examples.
            groups: codes of the training and of the test examples.
            labels: the same.
            shape: number of groups and of labels.
        """
        n, of_test = len(values.epsilon), groups[1] * shape[1] + labels[1]
        test = _sums_of_test(values.test_correct, of_test, shape)
        if n <= histogram.MOST_EXACT:
            sums = test + _sums(values, groups[0] * shape[1] + labels[0], shape)
            return cls(values.epsilon, np.ones(n, np.int64), groups[0], labels[0], sums)
        blocks = [slice(start, start + BLOCK) for start in range(0, n, BLOCK)]
        parts = (
            CellCounts.of(values.train_block(part), groups[0][part], labels[0][part], shape)
            for part in blocks
        )
        return reduce(CellCounts.__add__, parts).cells(test)

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
    def of(
        cls, values: Values, groups: IntArray, labels: IntArray, shape: tuple[int, int]
    ) -> CellCounts:
        """Count the training examples of one part, with their codes (n_examples,)."""
        cells = groups * shape[1] + labels
        return cls(Histogram.of([values.epsilon], cells), _sums(values, cells, shape))

    def __add__(self, other: CellCounts) -> CellCounts:
        return CellCounts(merged([self.epsilon, other.epsilon]), self.sums + other.sums)

    def cells(self, test: Sums | None = None) -> Cells:
        """The cells of all that was counted; test: sums of test examples."""
        sums = self.sums if test is None else self.sums + test
        groups, labels = np.divmod(self.epsilon.cells(), sums.n.shape[1])
        return Cells(self.epsilon.means(), self.epsilon.counts, groups, labels, sums)


def _sums(values: Values, cells: IntArray, shape: tuple[int, int]) -> Sums:
    """Of training examples."""
    losses, known = np.isfinite(values.loss), np.isfinite(values.correct)
    largest = np.zeros(shape[0] * shape[1])
    np.maximum.at(largest, cells, values.epsilon)
    return replace(
        _sums_of_test(values.test_correct[:0], cells[:0], shape),
        n=_count(cells, shape),
        at_worst_case=_count(cells[values.at_worst_case], shape),
        largest=largest.reshape(shape),
        n_losses=_count(cells[losses], shape),
        loss=_total(cells[losses], values.loss[losses], shape),
        n_known=_count(cells[known], shape),
        correct=_total(cells[known], values.correct[known], shape),
    )


def _sums_of_test(correct: FloatArray, cells: IntArray, shape: tuple[int, int]) -> Sums:
    """Of test examples; zeros of training examples."""
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


def _count(cells: IntArray, shape: tuple[int, int]) -> IntArray:
    return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def _total(cells: IntArray, values: FloatArray, shape: tuple[int, int]) -> FloatArray:
    found = np.bincount(cells, values, minlength=shape[0] * shape[1]).astype(np.float64)
    return found.reshape(shape)
