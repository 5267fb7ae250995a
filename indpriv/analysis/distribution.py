"""How individual epsilons are distributed, by number of rows too, and their relation to the loss.

Sensitive. Epsilons in several parts are read twice: for the top of the range, and for all else.
After Yu, Kamath, Kulkarni, Liu, Yin and Zhang, "Individual Privacy Accounting for Differentially
Private Stochastic Gradient Descent" (arXiv 2206.02617v7), who correlate epsilon with the log of the
final training loss.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from indpriv._columns import Rows, to_floats
from indpriv._types import FloatArray
from indpriv.accountant import Method, cap_rows
from indpriv.analysis import statistics
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.statistics import Condensed, quantiles_by_cell
from indpriv.analysis.summary import Finding, record
from indpriv.epsilon_table import EpsilonTable, beside
from indpriv.norm_log.norm_log import NormLog

Distribution: Any = record("distribution")
UnitSizes: Any = record("unit_sizes")
LossBins: Any = record("loss_bins")
LossRelation: Any = record("loss_relation")
_BINS = 40
_QUANTILES = {"median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
# Caps on rows are public numbers, so that choosing one of them reveals nothing.
_CAPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_SMALLEST_RANGE = 1e-9  # smaller epsilons do not matter, and bins cannot separate them


def top_of_range(epsilons: EpsilonTable) -> float:
    """Upper edge of bins of epsilon: the worst case, or 1 if every epsilon is almost 0.

    For units of several rows it is the largest epsilon: the worst case is that of the unit with the
    most rows, often far above all others.
    """
    largest = max(float(table.epsilon.max()) for table in epsilons.tables())
    several = (epsilons.account.rows_per_unit or 1) > 1
    top = max(0.0 if several else epsilons.worst_case_epsilon, largest)
    return top if top > _SMALLEST_RANGE else 1.0


def describe(epsilons: EpsilonTable) -> Distribution:
    """Quantiles (linear interpolation) and 40 equal bins of epsilons.

    Of more than a million epsilons in parts, quantiles are those of bins of 0.1 %, and the mean is
    that of the means of bins.
    """
    top, n, at_worst_case = top_of_range(epsilons), len(epsilons), 0
    counts, in_memory = np.zeros(_BINS, np.int64), epsilons.in_memory
    condensed = Condensed("epsilon", n=0 if in_memory else n)
    for table in epsilons.tables():
        own, edges = np.histogram(table.epsilon, bins=_BINS, range=(0.0, top))
        counts += own
        at_worst_case += int(table.at_worst_case.sum())
        condensed.add(np.zeros(len(table), np.int64), table.epsilon)
    found = condensed.frame()
    values, weights, cells = (found[name].to_numpy() for name in ("epsilon", "weight", "cell"))
    quantiles = quantiles_by_cell(values, weights, cells, 1, tuple(_QUANTILES.values()))[0]
    return Distribution(
        n=n,
        mean=float(np.average(values, weights=weights)),
        **dict(zip(_QUANTILES, quantiles.tolist(), strict=True)),
        max=float(found["largest_epsilon"].max()),
        share_at_worst_case=at_worst_case / n,
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )


def unit_sizes(log: NormLog, epsilons: EpsilonTable) -> tuple[UnitSizes, ...]:
    """The units of epsilons by their number of rows, fewest first; empty where each has one row.

    Empty too with known participation, where the worst case depends on who took part when.
    """
    account = epsilons.account
    largest = account.rows_per_unit
    if largest is None or largest == 1 or account.participation == "known":
        return ()
    table = epsilons.table()
    most = [*(cap for cap in _CAPS if cap < largest), largest]
    method = Method(delta=table.account.delta, conversion=table.account.conversion)
    n_rows, found, least = table.details["n_rows"].astype(np.int64), [], 1
    caps: Any = cap_rows(log, method, most).itertuples()
    for cap in caps:
        epsilon = table.epsilon[(n_rows >= least) & (n_rows <= cap.cap)]
        found.append(
            UnitSizes(
                least=least,
                most=cap.cap,
                n_units=len(epsilon),
                median=float(np.median(epsilon)) if len(epsilon) else None,
                max=float(epsilon.max()) if len(epsilon) else None,
                # A privacy filter may cap it.
                worst_case_epsilon=min(cap.worst_case_epsilon, table.worst_case_epsilon),
                rows_dropped=cap.rows_dropped,
                n_rows=log.n_examples,
            )
        )
        least = cap.cap + 1
    return tuple(found)


# --- epsilon and loss

# Smaller losses, in nats, are raised to this one, so that one denormal does not dominate ln(loss).
_SMALLEST_LOSS = 1e-12
STATED_FLOOR = 1e-3  # nats; whether a loss is 1e-6 or 1e-9 says nothing of an example's privacy
_LOSS_BINS = 28
_EPSILON_BINS = 20


def relate_to_loss(epsilons: EpsilonTable, train: Rows) -> LossRelation:
    """Relate epsilons to the losses of the final model.

    Zero losses are raised to the smallest positive loss of the data (at least 1e-12 nats),
    infinite, negative and missing ones are left out; both are counted. Above a million, examples
    are counted in bins of 0.4 %, and for the median losses in bins of 0.1 %.

    train: rows of the same examples in the same order, with a column loss.
    """
    n, left_out = len(epsilons), 0
    together = Condensed("loss", "epsilon", n=n, bits=statistics.PAIR_BITS)
    alone = Condensed("loss", n=n)
    for table, frame in beside(epsilons, train, ["loss"]):
        loss = to_floats(frame["loss"])
        usable = np.isfinite(loss) & (loss >= 0)
        below = (~table.at_worst_case[usable]).astype(np.int64)
        together.add(below, loss[usable], table.epsilon[usable])
        alone.add(below, loss[usable])
        left_out += int((~usable).sum())
    pairs, losses = together.frame(), alone.frame()
    # Many examples may share the worst case, and rank above the others of its bin.
    at_worst = (pairs["cell"] == 0).to_numpy()
    pairs.loc[at_worst, "edge_epsilon"] = pairs["least_epsilon"]
    positive = losses.loc[losses["least_loss"] > 0, "least_loss"]
    floor = float(max(positive.min(), _SMALLEST_LOSS)) if len(positive) else _SMALLEST_LOSS
    floored = pairs["loss"].clip(floor).to_numpy()
    # Near a loss of 1, ln(loss) makes a signal of float noise.
    every, fitted = _correlation(
        pairs, floored, len(floored) > 0 and statistics.is_constant(floored)
    )
    others, _ = _correlation(pairs[~at_worst], floored[~at_worst])
    raised, stated = np.maximum(floored, STATED_FLOOR), every
    if (floored < STATED_FLOOR).any():
        stated, _ = _correlation(pairs, raised, statistics.is_constant(raised))
    medians = _quantiles(losses["loss"], losses["weight"], losses["cell"], 2, (0.5,))[0]
    undefined = every["pearson"] is None
    return LossRelation(
        n=every["n"],
        pearson_log_loss=every["pearson"],
        spearman=every["spearman"],
        pearson_interval=every["pearson_interval"],
        spearman_interval=every["spearman_interval"],
        n_below_worst_case=others["n"],
        pearson_below_worst_case=others["pearson"],
        pearson_below_interval=others["pearson_interval"],
        median_loss_at_worst_case=medians[0],
        median_loss_below_worst_case=medians[1],
        floored=int(pairs.loc[pairs["loss"] < floor, "weight"].sum()),
        floor=floor,
        left_out=left_out,
        undefined_reason=_why_undefined(pairs, floored) if undefined else "",
        bins=None if undefined else _bins(pairs, floored, top_of_range(epsilons)),
        **fitted,
        pearson_with_floor=stated["pearson"],
        pearson_with_floor_interval=stated["pearson_interval"],
        pearson_error=None if undefined else _pearson_error(pairs),
        spearman_error=None if undefined else _spearman_error(pairs),
    )


def _correlation(
    pairs: pd.DataFrame, loss: FloatArray, constant_loss: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Correlation and least-squares line of epsilon and ln(loss), with intervals where defined.

    loss: (n_pairs,) above 0.
    """
    epsilon, weights = pairs["epsilon"].to_numpy(), pairs["weight"].to_numpy()
    log_loss = np.log(loss)
    r = None if constant_loss else statistics.pearson(epsilon, log_loss, weights)
    edges, losses = pairs["edge_epsilon"].to_numpy(), pairs["edge_loss"].to_numpy()
    rank = statistics.spearman(edges, losses, weights) if len(loss) else None
    ends = {} if r is None else statistics.relation_intervals(log_loss, epsilon, weights)
    found: dict[str, Any] = {"n": int(weights.sum()), "pearson": r, "spearman": rank}
    found |= {f"{name}_interval": ends.get(name) for name in ("pearson", "spearman")}
    if r is None:
        return found, {}
    names = ("intercept", "slope")
    fitted = dict(zip(names, statistics.line(log_loss, epsilon, weights), strict=True))
    return found, {**fitted, **{f"{name}_interval": ends.get(name) for name in names}}


def _why_undefined(pairs: pd.DataFrame, loss: FloatArray) -> str:
    n = int(pairs["weight"].sum())
    if n < 3:
        return f"only {n} examples have a usable loss; a correlation needs three"
    columns = (("loss", loss), ("epsilon", pairs["epsilon"].to_numpy()))
    constant = [name for name, values in columns if statistics.is_constant(values)]
    return f"every example has the same {' and '.join(constant)}"


def _bins(pairs: pd.DataFrame, loss: FloatArray, top: float) -> LossBins:
    loss_edges = np.geomspace(loss.min(), loss.max(), _LOSS_BINS + 1)
    loss_edges[[0, -1]] = loss.min(), loss.max()  # geomspace may miss its ends by a rounding
    epsilon_edges = np.linspace(0.0, top, _EPSILON_BINS + 1)
    edges, weights = (loss_edges, epsilon_edges), pairs["weight"]
    counts, _, _ = np.histogram2d(loss, pairs["epsilon"], bins=edges, weights=weights)
    which = np.clip(np.searchsorted(loss_edges, loss, side="right") - 1, 0, _LOSS_BINS - 1)
    quartiles = _quantiles(pairs["epsilon"], weights, which, _LOSS_BINS, (0.25, 0.5, 0.75))
    return LossBins(
        tuple(loss_edges.tolist()),
        tuple(epsilon_edges.tolist()),
        tuple(tuple(row) for row in counts.astype(int).tolist()),
        *quartiles,
    )


def _quantiles(
    values: Any, weights: Any, cells: Any, size: int, probabilities: Sequence[float]
) -> list[tuple[float | None, ...]]:
    """For each probability the quantile of each cell; None of an empty cell."""
    values, weights, cells = map(np.asarray, (values, weights, cells))
    found = statistics.quantiles_by_cell(values, weights, cells, size, probabilities)
    return [tuple(None if np.isnan(value) else value for value in row) for row in found.T.tolist()]


def _pearson_error(pairs: pd.DataFrame) -> float:
    """The most by which Pearson's r of epsilon and ln(loss) can be off.

    A pair stands for the mean of its bin, up to the curvature of the logarithm. What varies within
    bins is missing from the variances and from the covariance alike, and has at most a quarter of
    the squared range as its variance (Popoviciu 1935).
    """
    weights, shares, spreads = pairs["weight"].to_numpy(), list[float](), list[float]()
    mean, low, high = (
        np.log(np.maximum(pairs[name].to_numpy(), _SMALLEST_LOSS))
        for name in ("loss", "least_loss", "largest_loss")
    )
    width = (pairs["largest_epsilon"] - pairs["least_epsilon"]).to_numpy()
    for values, apart in ((pairs["epsilon"].to_numpy(), width), (mean, high - low)):
        spreads.append(statistics.variance(values, weights))
        within = np.average(apart**2, weights=weights) / 4
        shares.append(float(within / max(spreads[-1], 1e-300)))
    curvature = float((high - low).max()) ** 2 / 8
    off = 2 * curvature / max(spreads[1], 1e-300) ** 0.5
    return float(min(2.0, np.sqrt(shares[0] * shares[1]) + sum(shares) + off))


def _spearman_error(pairs: pd.DataFrame) -> float:
    """The most by which Spearman's rank correlation can be off.

    Examples of a bin share their mean rank. The ranks within a bin that holds a share p of the
    examples have at most the variance p^2 / 12, over the squared number of examples; by Cauchy and
    Schwarz that is what the correlation can lose.
    """
    weights, lost = pairs["weight"].to_numpy(), []
    for name in ("epsilon", "loss"):
        edge = f"edge_{name}"
        bins = pairs.groupby(edge).agg(
            {"weight": "sum", f"least_{name}": "min", f"largest_{name}": "max"}
        )
        shares = bins["weight"] / weights.sum()
        mixed = bins[f"largest_{name}"] > bins[f"least_{name}"]
        spread = statistics.variance(
            statistics.ranks(pairs[edge].to_numpy(), weights) / weights.sum(), weights
        )
        lost.append(float((shares[mixed] ** 3).sum() / 12 / max(spread, 1e-300)))
    return float(min(2.0, sum(np.sqrt(lost)) + sum(lost)))


def _loss(run: AuditedRun) -> dict[str, Any]:
    return {} if run.train is None else {"loss": relate_to_loss(run.epsilons, run.train)}


FINDINGS = (
    Finding("distribution", lambda run: {"individual": describe(run.epsilons)}),
    Finding("units", lambda run: {"unit_sizes": unit_sizes(run.log, run.epsilons)}),
    Finding("loss", _loss),
)
