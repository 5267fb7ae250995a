"""Individual epsilon and the loss of the final model. Sensitive.

After Yu, Kamath, Kulkarni, Liu, Yin and Zhang, "Individual Privacy Accounting for Differentially
Private Stochastic Gradient Descent" (arXiv 2206.02617v7), who correlate epsilon with the log of the
final training loss.
"""

from dataclasses import dataclass, field

import numpy as np

from indpriv._arrays import FloatArray
from indpriv._columns import Rows, to_floats
from indpriv._plain import AtLeastZero, Count
from indpriv.analysis.distribution import top_of_range
from indpriv.analysis.loss.pairs import LossPairs
from indpriv.analysis.statistics.bootstrap import Interval
from indpriv.analysis.statistics.correlation import (
    RelationIntervals,
    is_constant,
    line,
    pearson,
    relation_intervals,
    spearman,
)
from indpriv.analysis.statistics.histogram import quantiles_by_cell
from indpriv.epsilon_table import Epsilons, beside

# Smaller losses, in nats, are raised to this one, so that one denormal does not dominate ln(loss).
_SMALLEST_LOSS = 1e-12
STATED_FLOOR = 1e-3  # nats; whether a loss is 1e-6 or 1e-9 says nothing of an example's privacy
_LOSS_BINS = 28
_EPSILON_BINS = 20


@dataclass(frozen=True)
class LossBins:
    """Counts and quartiles of epsilon per bin of loss, for a figure that holds no single example.

    loss_edges: (n_loss + 1,) nats, geometric; epsilon_edges: (n_epsilon + 1,); counts: (n_loss,
    n_epsilon); p25, median, p75: (n_loss,) of epsilon, None in an empty bin.
    """

    loss_edges: tuple[float, ...]
    epsilon_edges: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]
    p25: tuple[float | None, ...]
    median: tuple[float | None, ...]
    p75: tuple[float | None, ...]


@dataclass(frozen=True)
class LossCorrelation:
    """Correlation of epsilon and loss over some examples; None where undefined.

    Attributes:
        n: number of examples.
        pearson: Pearson's r of epsilon and ln(loss).
        spearman: rank correlation of epsilon and loss.
        pearson_interval, spearman_interval: see
            `indpriv.analysis.statistics.correlation.relation_intervals`.
    """

    n: Count
    pearson: float | None
    spearman: float | None
    pearson_interval: Interval | None
    spearman_interval: Interval | None


@dataclass(frozen=True)
class LossLine:
    """Least squares of epsilon on intercept + slope * ln(loss), in nats; None where undefined."""

    intercept: float | None = None
    slope: float | None = None
    intercept_interval: Interval | None = None
    slope_interval: Interval | None = None


_BELOW = {
    "n": "n_below_worst_case",
    "pearson": "pearson_below_worst_case",
    "spearman": "spearman_below_worst_case",
    "pearson_interval": "pearson_below_interval",
    "spearman_interval": "spearman_below_interval",
}


@dataclass(frozen=True)
class LossRelation:
    """How epsilon depends on the loss of the final model on the training examples.

    Attributes:
        every: over all examples with a usable loss.
        below: over the examples below the worst case; the epsilon of the others can grow no
            further.
        median_loss_at_worst_case, median_loss_below_worst_case: of the two kinds of examples; None
            without any.
        floored: number of losses of (nearly) zero that were raised to floor, because ln(0) is minus
            infinity.
        floor: nats.
        left_out: number of examples whose loss is infinite, negative or missing.
        pearson_with_floor: Pearson's r of epsilon and ln(loss) over all examples, with every loss
            below 1e-3 nats raised to it; None where undefined.
        pearson_with_floor_interval: as pearson_interval.
        pearson_error, spearman_error: the most by which the correlations over all examples can be
            off because examples were counted in bins; 0 where none were, None where undefined.
        undefined_reason: why there is no correlation.
        bins: for the figure; None where undefined.
    """

    every: LossCorrelation = field(metadata={"flatten": {"pearson": "pearson_log_loss"}})
    below: LossCorrelation = field(metadata={"flatten": _BELOW})
    line: LossLine = field(metadata={"flatten": True})
    median_loss_at_worst_case: float | None
    median_loss_below_worst_case: float | None
    floored: Count
    floor: float
    left_out: Count
    undefined_reason: str
    bins: LossBins | None
    pearson_with_floor: float | None = None
    pearson_with_floor_interval: Interval | None = None
    pearson_error: AtLeastZero | None = 0.0
    spearman_error: AtLeastZero | None = 0.0


def relate_to_loss(epsilons: Epsilons, train: Rows) -> LossRelation:
    """Relate epsilons to the losses of the final model.

    Zero losses are raised to the smallest positive loss of the data (at least 1e-12 nats),
    infinite, negative and missing ones are left out; both are counted.

    train: rows of the same examples in the same order, with a column loss.
    """
    parts = (
        (table.epsilon, table.at_worst_case, to_floats(frame["loss"]))
        for table, frame in beside(epsilons, train, ["loss"])
    )
    return relation_of(LossPairs.of(parts, len(epsilons)), top_of_range(epsilons))


def relation_of(pairs: LossPairs, top: float) -> LossRelation:
    """Relate epsilon and loss; top: upper edge of the figure's bins of epsilon."""
    floor = max(pairs.least_positive or 0.0, _SMALLEST_LOSS)
    floored, weights, below = np.maximum(pairs.loss, floor), pairs.weights, pairs.below
    # Near a loss of 1, ln(loss) makes a signal of float noise.
    same_loss = len(floored) > 0 and is_constant(floored)
    every = _correlation(pairs, floored, constant_loss=same_loss)
    raised = np.maximum(floored, STATED_FLOOR)
    stated = every[0]
    if (floored < STATED_FLOOR).any():
        stated = _correlation(pairs, raised, constant_loss=is_constant(raised))[0]
    undefined = every[0].pearson is None
    return LossRelation(
        every=every[0],
        below=_correlation(pairs.select(below), floored[below])[0],
        line=every[1],
        median_loss_at_worst_case=pairs.medians[0],
        median_loss_below_worst_case=pairs.medians[1],
        floored=int(weights[pairs.loss < floor].sum()),
        floor=floor,
        left_out=pairs.left_out,
        undefined_reason=_why_undefined(pairs, floored) if undefined else "",
        bins=None if undefined else _bins(pairs, floored, top),
        pearson_with_floor=stated.pearson,
        pearson_with_floor_interval=stated.pearson_interval,
        pearson_error=None if undefined else pairs.pearson_error(),
        spearman_error=None if undefined else pairs.spearman_error(),
    )


def _correlation(
    pairs: LossPairs, floored: FloatArray, *, constant_loss: bool = False
) -> tuple[LossCorrelation, LossLine]:
    epsilon, weights, log_loss = pairs.epsilon, pairs.weights, np.log(floored)
    r = None if constant_loss else pearson(epsilon, log_loss, weights)
    found = RelationIntervals() if r is None else relation_intervals(log_loss, epsilon, weights)
    rank = spearman(pairs.epsilon_bin, pairs.loss_bin, weights) if len(floored) else None
    n = int(weights.sum())
    correlation = LossCorrelation(n, r, rank, found.pearson, found.spearman)
    if r is None:
        return correlation, LossLine()
    return correlation, LossLine(*line(log_loss, epsilon, weights), found.intercept, found.slope)


def _why_undefined(pairs: LossPairs, loss: FloatArray) -> str:
    n = int(pairs.weights.sum())
    if n < 3:
        return f"only {n} examples have a usable loss; a correlation needs three"
    constant = [
        name for name, values in (("loss", loss), ("epsilon", pairs.epsilon)) if is_constant(values)
    ]
    return f"every example has the same {' and '.join(constant)}"


def _bins(pairs: LossPairs, loss: FloatArray, top: float) -> LossBins:
    loss_edges = np.geomspace(loss.min(), loss.max(), _LOSS_BINS + 1)
    loss_edges[[0, -1]] = loss.min(), loss.max()  # geomspace may miss its ends by a rounding
    epsilon_edges = np.linspace(0.0, top, _EPSILON_BINS + 1)
    edges = loss_edges, epsilon_edges
    counts, _, _ = np.histogram2d(loss, pairs.epsilon, bins=edges, weights=pairs.weights)
    which = np.clip(np.searchsorted(loss_edges, loss, side="right") - 1, 0, _LOSS_BINS - 1)
    quartiles = quantiles_by_cell(
        pairs.epsilon, pairs.weights, which, _LOSS_BINS, (0.25, 0.5, 0.75)
    )
    p25, median, p75 = (
        tuple(None if np.isnan(value) else value for value in column)
        for column in quartiles.T.tolist()
    )
    return LossBins(
        loss_edges=tuple(loss_edges.tolist()),
        epsilon_edges=tuple(epsilon_edges.tolist()),
        counts=tuple(tuple(row) for row in counts.astype(int).tolist()),
        p25=p25,
        median=median,
        p75=p75,
    )
