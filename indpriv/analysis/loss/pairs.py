"""Epsilon and loss of training examples, one by one or in fine bins. Sensitive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv.analysis.statistics import histogram
from indpriv.analysis.statistics.correlation import ranks
from indpriv.analysis.statistics.histogram import (
    PAIR_BITS,
    Histogram,
    blocks_of,
    merged,
    quantiles_by_cell,
)

_TINY = 1e-12  # nats; smaller losses are raised to it


@dataclass(frozen=True)
class LossPairs:
    """Epsilon and loss of the examples with a usable loss, finite and at least 0.

    Attributes:
        epsilon, loss: (n_pairs,) of single examples, or means of bins of both.
        below: (n_pairs,) whether the epsilon is below the worst case.
        weights: (n_pairs,) number of examples that each pair stands for.
        epsilon_bin, loss_bin: (n_pairs,) the lower edges of these bins, or the values themselves.
        least, largest: (2, n_pairs) epsilon and loss of the examples of each pair.
        medians: median loss of the examples at the worst case, and of those below it; None without
            any.
        least_positive: smallest positive loss of any example; None without one.
        left_out: number of examples without a usable loss.
    """

    epsilon: FloatArray
    loss: FloatArray
    below: BoolArray
    weights: IntArray
    epsilon_bin: FloatArray
    loss_bin: FloatArray
    least: FloatArray
    largest: FloatArray
    medians: tuple[float | None, float | None]
    least_positive: float | None
    left_out: int

    @classmethod
    def of(cls, parts: Iterable[tuple[FloatArray, BoolArray, FloatArray]], n: int) -> LossPairs:
        """The pairs of all n examples; one part where each is kept.

        parts: of some examples each: epsilon, whether it is the worst case, and loss.
        """
        if n > histogram.MOST_EXACT:
            blocks = (
                LossCounts.of(epsilon[block], at_worst_case[block], loss[block])
                for epsilon, at_worst_case, loss in parts
                for block in blocks_of(len(loss))
            )
            return reduce(LossCounts.__add__, blocks).pairs()
        ((epsilon, at_worst_case, loss),) = parts
        usable = np.isfinite(loss) & (loss >= 0)
        kept, below = loss[usable], ~at_worst_case[usable]
        ones, both = np.ones(len(kept), np.int64), np.stack([epsilon[usable], kept])
        return cls(
            epsilon[usable],
            kept,
            below,
            ones,
            epsilon[usable],
            kept,
            both,
            both,
            _medians(kept, below, ones),
            _least_positive(kept),
            int((~usable).sum()),
        )

    def select(self, chosen: BoolArray) -> LossPairs:
        """The pairs that a mask chooses."""
        return replace(
            self,
            epsilon=self.epsilon[chosen],
            loss=self.loss[chosen],
            below=self.below[chosen],
            weights=self.weights[chosen],
            epsilon_bin=self.epsilon_bin[chosen],
            loss_bin=self.loss_bin[chosen],
            least=self.least[:, chosen],
            largest=self.largest[:, chosen],
        )

    def pearson_error(self) -> float:
        """The most by which Pearson's r of epsilon and ln(loss) can be off.

        A pair stands for the mean of its bin, up to the curvature of the logarithm. What varies
        within bins is missing from the variances and from the covariance alike, and has at most a
        quarter of the squared range as its variance (Popoviciu 1935).
        """
        logs = [np.log(np.maximum(part[1], _TINY)) for part in (self.least, self.largest)]
        log_loss = np.log(np.maximum(self.loss, _TINY))
        shares, spreads = [], []
        for values, width in (
            (self.epsilon, self.largest[0] - self.least[0]),
            (log_loss, logs[1] - logs[0]),
        ):
            spreads.append(_variance(values, self.weights))
            within = np.average(width**2, weights=self.weights) / 4
            shares.append(float(within / max(spreads[-1], 1e-300)))
        curvature = float((logs[1] - logs[0]).max()) ** 2 / 8
        off = 2 * curvature / max(spreads[1], 1e-300) ** 0.5
        return float(min(2.0, np.sqrt(shares[0] * shares[1]) + sum(shares) + off))

    def spearman_error(self) -> float:
        """The most by which Spearman's rank correlation can be off.

        Examples of a bin share their mean rank. The ranks within a bin that holds a share p of the
        examples have at most the variance p^2 / 12, over the squared number of examples; by Cauchy
        and Schwarz that is what the correlation can lose.
        """
        n, lost = int(self.weights.sum()), []
        for number, edges in enumerate((self.epsilon_bin, self.loss_bin)):
            order = np.argsort(edges, kind="stable")
            starts = np.flatnonzero(np.diff(edges[order], prepend=-1.0))
            shares = np.add.reduceat(self.weights[order], starts) / n
            low = np.minimum.reduceat(self.least[number][order], starts)
            mixed = np.maximum.reduceat(self.largest[number][order], starts) > low
            spread = _variance(ranks(edges, self.weights) / n, self.weights)
            lost.append(float((shares[mixed] ** 3).sum() / 12 / max(spread, 1e-300)))
        return float(min(2.0, sum(np.sqrt(lost)) + sum(lost)))


@dataclass(frozen=True)
class LossCounts:
    """Examples counted in bins of loss and epsilon; counts of parts of the data add up.

    Attributes:
        joint: by loss and epsilon, in bins of 0.4 %; the cell says whether epsilon is below the
            worst case.
        single: by loss alone, in finer bins, with the same cells.
        left_out: number of examples without a usable loss.
    """

    joint: Histogram
    single: Histogram
    left_out: int

    @classmethod
    def of(cls, epsilon: FloatArray, at_worst_case: BoolArray, loss: FloatArray) -> LossCounts:
        """Count the examples of one part."""
        usable = np.isfinite(loss) & (loss >= 0)
        columns, below = [loss[usable], epsilon[usable]], (~at_worst_case[usable]).astype(np.int64)
        return cls(
            Histogram.of(columns, below, bits=PAIR_BITS),
            Histogram.of(columns[:1], below),
            int((~usable).sum()),
        )

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts(
            merged([self.joint, other.joint]),
            merged([self.single, other.single]),
            self.left_out + other.left_out,
        )

    def pairs(self) -> LossPairs:
        """One pair for each bin: the means of its examples."""
        below = self.joint.cells() == 1
        of_single = (self.single.means(), self.single.cells() == 1, self.single.counts)
        return LossPairs(
            epsilon=self.joint.means(1),
            loss=self.joint.means(0),
            below=below,
            weights=self.joint.counts,
            # Many examples may share the worst case, and rank above the others of its bin.
            epsilon_bin=np.where(below, self.joint.edges(1), self.joint.least[1]),
            loss_bin=self.joint.edges(0),
            least=self.joint.least[::-1],
            largest=self.joint.largest[::-1],
            medians=_medians(*of_single),
            least_positive=_least_positive(self.single.least[0]),
            left_out=self.left_out,
        )


def _variance(values: FloatArray, weights: IntArray) -> float:
    deviations = values - np.average(values, weights=weights)
    return float(np.average(deviations**2, weights=weights))


def _least_positive(loss: FloatArray) -> float | None:
    positive = loss[loss > 0]
    return float(positive.min()) if len(positive) else None


def _medians(
    loss: FloatArray, below: BoolArray, weights: IntArray
) -> tuple[float | None, float | None]:
    found = quantiles_by_cell(loss, weights, below.astype(np.int64), 2, (0.5,))[:, 0].tolist()
    at_worst, others = (None if np.isnan(value) else value for value in found)
    return at_worst, others
