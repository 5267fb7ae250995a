"""How individual epsilons are distributed, and among units by their number of rows. Sensitive.

Epsilons in several parts are read twice: for the top of the range, and for all else.
"""

from typing import Any

import numpy as np

from indpriv.accountant import Method, cap_rows
from indpriv.analysis.statistics import Condensed, quantiles_by_cell
from indpriv.analysis.summary import Finding, record
from indpriv.epsilon_table import Epsilons, EpsilonTable
from indpriv.norm_log.norm_log import NormLog

_BINS = 40
_QUANTILES = {"median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
# Caps on rows are public numbers, so that choosing one of them reveals nothing.
_CAPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_SMALLEST_RANGE = 1e-9  # smaller epsilons do not matter, and bins cannot separate them


Distribution: Any = record("distribution")


def top_of_range(epsilons: Epsilons) -> float:
    """Upper edge of bins of epsilon: the worst case, or 1 if every epsilon is almost 0.

    For units of several rows it is the largest epsilon: the worst case is that of the unit with the
    most rows, often far above all others.
    """
    largest = max(float(table.epsilon.max()) for table in epsilons.tables())
    several = (epsilons.account.rows_per_unit or 1) > 1
    top = max(0.0 if several else epsilons.worst_case_epsilon, largest)
    return top if top > _SMALLEST_RANGE else 1.0


def describe(epsilons: Epsilons) -> Distribution:
    """Quantiles (linear interpolation) and 40 equal bins of epsilons.

    Of more than a million epsilons in parts, quantiles are those of bins of 0.1 %, and the mean is
    that of the means of bins.
    """
    top, n, at_worst_case = top_of_range(epsilons), len(epsilons), 0
    counts, in_memory = np.zeros(_BINS, np.int64), isinstance(epsilons, EpsilonTable)
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


UnitSizes: Any = record("unit_sizes")


def unit_sizes(log: NormLog, epsilons: Epsilons) -> tuple[UnitSizes, ...]:
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
    for cap in cap_rows(log, method, most):
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


FINDINGS = (
    Finding("distribution", lambda run: {"individual": describe(run.epsilons)}),
    Finding("units", lambda run: {"unit_sizes": unit_sizes(run.log, run.epsilons)}),
)
