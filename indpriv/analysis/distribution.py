"""How individual epsilons are distributed, by number of rows too, and their relation to the loss.

Sensitive. Epsilons in several parts are read twice: for the top of the range, and for all else.
After Yu, Kamath, Kulkarni, Liu, Yin and Zhang, "Individual Privacy Accounting for Differentially
Private Stochastic Gradient Descent" (arXiv 2206.02617v7), who correlate epsilon with the log of the
final training loss.
"""

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
    """Quantiles (see `quantiles_by_cell`) and 40 equal bins of epsilons.

    Of more than a million epsilons in parts, quantiles are the largest values of bins of 0.1 %, and
    the mean is that of the means of bins.
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
    names = ("largest_epsilon", "weight", "cell")
    largest, weights, cells = (found[name].to_numpy() for name in names)
    quantiles = quantiles_by_cell(largest, weights, cells, 1, tuple(_QUANTILES.values()))[0]
    return Distribution(
        n=n,
        mean=float(np.average(found["epsilon"], weights=weights)),
        **dict(zip(_QUANTILES, quantiles.tolist(), strict=True)),
        max=float(largest.max()),
        share_at_worst_case=at_worst_case / n,
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )


def unit_sizes(log: NormLog, epsilons: EpsilonTable) -> tuple[UnitSizes, ...]:
    """The units of epsilons by their number of rows, fewest first; empty where each has one row.

    Empty too with known participation, where the worst case depends on who took part when.
    """
    account, largest = epsilons.account, epsilons.account.rows_per_unit
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
_LINE = ("intercept", "slope", "intercept_interval", "slope_interval")
_INTERVALS = ("pearson_interval", "spearman_interval")


def relate_to_loss(epsilons: EpsilonTable, train: Rows) -> LossRelation:
    """Relate epsilons to the losses of the final model.

    Zero losses are raised to the smallest positive loss of the data (at least 1e-12 nats),
    infinite, negative and missing ones are left out; both are counted. Of more than a million
    examples, a random million are looked at.

    train: rows of the same examples in the same order, with a column loss.
    """
    most, start, parts = statistics.MOST_EXACT, 0, list[pd.DataFrame]()
    drawn = statistics.sample(len(epsilons), most, statistics.generator_of(0, "loss"))
    for table, frame in beside(epsilons, train, ["loss"]):
        own = pd.DataFrame({"epsilon": table.epsilon, "at_worst_case": table.at_worst_case})
        own["loss"], stop = to_floats(frame["loss"]), start + len(own)
        if drawn is not None:
            own = own.iloc[drawn[slice(*np.searchsorted(drawn, (start, stop)))] - start]
        parts, start = [*parts, own], stop
    every = pd.concat(parts)
    pairs = every[np.isfinite(every["loss"]) & (every["loss"] >= 0)]
    epsilon, loss, at_worst = (
        pairs[name].to_numpy() for name in ("epsilon", "loss", "at_worst_case")
    )
    floor = max(float(loss.min(where=loss > 0, initial=np.inf)), _SMALLEST_LOSS)
    floor = floor if np.isfinite(floor) else _SMALLEST_LOSS
    floored, below = np.maximum(loss, floor), ~at_worst
    found, others = _fitted(epsilon, floored), _fitted(epsilon[below], floored[below])
    undefined, stated = "pearson" not in found, found
    if (floored < STATED_FLOOR).any():
        stated = _fitted(epsilon, np.maximum(floored, STATED_FLOOR))
    return LossRelation(
        n=len(loss),
        pearson_log_loss=found.get("pearson"),
        spearman=statistics.spearman(epsilon, loss),
        n_below_worst_case=int(below.sum()),
        pearson_below_worst_case=others.get("pearson"),
        pearson_below_interval=others.get("pearson_interval"),
        median_loss_at_worst_case=float(np.median(loss[at_worst])) if at_worst.any() else None,
        median_loss_below_worst_case=float(np.median(loss[below])) if below.any() else None,
        floored=int((loss < floor).sum()),
        floor=floor,
        left_out=len(every) - len(loss),
        undefined_reason=_why_undefined(epsilon, floored) if undefined else "",
        bins=None if undefined else _bins(epsilon, floored, top_of_range(epsilons)),
        **{name: found.get(name) for name in (*_INTERVALS, *_LINE)},
        pearson_with_floor=stated.get("pearson"),
        pearson_with_floor_interval=stated.get("pearson_interval"),
    )


def _fitted(epsilon: FloatArray, loss: FloatArray) -> dict[str, Any]:
    """Correlation and line of epsilon and ln(loss), with intervals; what is undefined is absent."""
    log_loss = np.log(loss)
    # Near a loss of 1, ln(loss) makes a signal of float noise.
    if not len(loss) or statistics.is_constant(loss):
        return {}
    if (r := statistics.pearson(epsilon, log_loss)) is None:
        return {}
    ends = statistics.relation_intervals(log_loss, epsilon)
    found = {"pearson": r} | {f"{name}_interval": interval for name, interval in ends.items()}
    return found | dict(zip(_LINE, statistics.line(log_loss, epsilon), strict=False))


def _why_undefined(epsilon: FloatArray, loss: FloatArray) -> str:
    if len(loss) < 3:
        return f"only {len(loss)} examples have a usable loss; a correlation needs three"
    columns = {"loss": loss, "epsilon": epsilon}
    constant = [name for name, values in columns.items() if statistics.is_constant(values)]
    return f"every example has the same {' and '.join(constant)}"


def _bins(epsilon: FloatArray, loss: FloatArray, top: float) -> LossBins:
    loss_edges = np.geomspace(loss.min(), loss.max(), _LOSS_BINS + 1)
    loss_edges[[0, -1]] = loss.min(), loss.max()  # geomspace may miss its ends by a rounding
    epsilon_edges = np.linspace(0.0, top, _EPSILON_BINS + 1)
    counts, _, _ = np.histogram2d(loss, epsilon, bins=(loss_edges, epsilon_edges))
    which = np.clip(np.searchsorted(loss_edges, loss, side="right") - 1, 0, _LOSS_BINS - 1)
    quartiles = pd.Series(epsilon).groupby(which).quantile(np.array([0.25, 0.5, 0.75])).unstack()
    quartiles = quartiles.reindex(range(_LOSS_BINS)).astype(object)
    return LossBins(
        tuple(loss_edges.tolist()),
        tuple(epsilon_edges.tolist()),
        tuple(tuple(row) for row in counts.astype(int).tolist()),
        *(tuple(one.where(one.notna(), None)) for _, one in quartiles.items()),
    )


def _loss(run: AuditedRun) -> dict[str, Any]:
    return {} if run.train is None else {"loss": relate_to_loss(run.epsilons, run.train)}


FINDINGS = (
    Finding("distribution", lambda run: {"individual": describe(run.epsilons)}),
    Finding("units", lambda run: {"unit_sizes": unit_sizes(run.log, run.epsilons)}),
    Finding("loss", _loss),
)
