"""Individual epsilon and the loss of the final model. Sensitive.

After Yu, Kamath, Kulkarni, Liu, Yin and Zhang, "Individual Privacy Accounting for Differentially
Private Stochastic Gradient Descent" (arXiv 2206.02617v7), who correlate epsilon with the log of the
final training loss.
"""

from dataclasses import dataclass, field

import numpy as np

from indpriv._arrays import FloatArray
from indpriv._plain import Count
from indpriv.analysis.distribution import top_of_range
from indpriv.analysis.statistics.bootstrap import Interval
from indpriv.analysis.statistics.correlation import (
    RelationIntervals,
    is_constant,
    line,
    pearson,
    relation_intervals,
    spearman,
)
from indpriv.epsilon_table import EpsilonTable

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


def relate_to_loss(table: EpsilonTable, loss: FloatArray) -> LossRelation:
    """Relate the epsilons of a table to the losses (n_examples,) of the final model.

    Zero losses are raised to the smallest positive loss of the data (at least 1e-12 nats),
    infinite, negative and missing ones are left out; both are counted.
    """
    usable = np.isfinite(loss) & (loss >= 0)
    epsilon, kept = table.epsilon[usable], loss[usable]
    positive = kept[kept > 0]
    floor = max(float(positive.min()), _SMALLEST_LOSS) if len(positive) else _SMALLEST_LOSS
    floored = np.maximum(kept, floor)
    log_loss = np.log(floored)
    below = ~table.at_worst_case[usable]
    # Near a loss of 1, ln(loss) makes a signal of float noise.
    same_loss = len(kept) > 0 and is_constant(floored)
    every = _correlation(epsilon, kept, log_loss, constant_loss=same_loss)
    raised = np.maximum(floored, STATED_FLOOR)
    stated = every[0]
    if (floored < STATED_FLOOR).any():
        same = is_constant(raised)
        stated = _correlation(epsilon, kept, np.log(raised), constant_loss=same)[0]
    return LossRelation(
        every=every[0],
        below=_correlation(epsilon[below], kept[below], log_loss[below])[0],
        line=every[1],
        median_loss_at_worst_case=float(np.median(kept[~below])) if not below.all() else None,
        median_loss_below_worst_case=float(np.median(kept[below])) if below.any() else None,
        floored=int((kept < floor).sum()),
        floor=floor,
        left_out=int((~usable).sum()),
        undefined_reason=_why_undefined(epsilon, floored) if every[0].pearson is None else "",
        bins=None if every[0].pearson is None else _bins(epsilon, floored, top_of_range(table)),
        pearson_with_floor=stated.pearson,
        pearson_with_floor_interval=stated.pearson_interval,
    )


def _correlation(
    epsilon: FloatArray, loss: FloatArray, log_loss: FloatArray, *, constant_loss: bool = False
) -> tuple[LossCorrelation, LossLine]:
    r = None if constant_loss else pearson(epsilon, log_loss)
    found = RelationIntervals() if r is None else relation_intervals(log_loss, epsilon)
    rank = spearman(epsilon, loss) if len(loss) else None
    correlation = LossCorrelation(len(loss), r, rank, found.pearson, found.spearman)
    if r is None:
        return correlation, LossLine()
    return correlation, LossLine(*line(log_loss, epsilon), found.intercept, found.slope)


def _why_undefined(epsilon: FloatArray, loss: FloatArray) -> str:
    if len(epsilon) < 3:
        return f"only {len(epsilon)} examples have a usable loss; a correlation needs three"
    constant = [
        name for name, values in (("loss", loss), ("epsilon", epsilon)) if is_constant(values)
    ]
    return f"every example has the same {' and '.join(constant)}"


def _bins(epsilon: FloatArray, loss: FloatArray, top: float) -> LossBins:
    loss_edges = np.geomspace(loss.min(), loss.max(), _LOSS_BINS + 1)
    loss_edges[[0, -1]] = loss.min(), loss.max()  # geomspace may miss its ends by a rounding
    epsilon_edges = np.linspace(0.0, top, _EPSILON_BINS + 1)
    counts, _, _ = np.histogram2d(loss, epsilon, bins=(loss_edges, epsilon_edges))
    which = np.clip(np.searchsorted(loss_edges, loss, side="right") - 1, 0, _LOSS_BINS - 1)
    order = np.argsort(which, kind="stable")
    starts = np.searchsorted(which[order], np.arange(1, _LOSS_BINS))
    quartiles: list[tuple[float | None, ...]] = []
    for inside in np.split(epsilon[order], starts):
        quartiles.append(
            tuple(np.quantile(inside, (0.25, 0.5, 0.75)).tolist())
            if len(inside)
            else (None, None, None)
        )
    p25, median, p75 = zip(*quartiles, strict=True)
    return LossBins(
        loss_edges=tuple(loss_edges.tolist()),
        epsilon_edges=tuple(epsilon_edges.tolist()),
        counts=tuple(tuple(row) for row in counts.astype(int).tolist()),
        p25=p25,
        median=median,
        p75=p75,
    )
