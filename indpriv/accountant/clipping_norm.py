"""A run whose clipping norm C is a private release, and what that costs. Sensitive.

C is drawn from the data before the first step by a mechanism that is (c, 0)-private when one row is
added or removed. Each epsilon then grows by c for each row, or by 2 c if rows are replaced [9.5];
what that does to odds is [9.6] of docs/explanation/proofs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, ndtri

from indpriv._arrays import FloatArray
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, EpsilonTable
from indpriv.norm_log.norm_log import NormLog

Rows = TypeVar("Rows", float, FloatArray)


def clipping_norm_cost(log: NormLog, neighbouring: str, rows: Rows) -> Rows:
    """What the release of the clipping norm costs units with these numbers of rows."""
    return rows * (log.clipping_norm_epsilon * (2 if neighbouring == "replace_one" else 1))


def with_clipping_norm(table: EpsilonTable, log: NormLog) -> EpsilonTable:
    """The account of a run, from that of its steps: every epsilon grows by what C costs.

    Lower ends stay: they bound the steps alone, and the whole costs no less.
    """
    if not log.clipping_norm_epsilon:
        return table
    relation, most = table.account.neighbouring, table.account.rows_per_unit or 1
    rows = table.details.get("n_rows", np.ones(len(table), np.int64)).astype(np.float64)
    cost = clipping_norm_cost(log, relation, rows)
    worst = clipping_norm_cost(log, relation, float(most))
    details = details_with_release(table.details, cost)
    if "unit_worst_case" in details:
        details["unit_worst_case"] = details["unit_worst_case"] + cost
    return replace(
        table,
        epsilon=table.epsilon + cost,
        epsilon_upper=table.epsilon_upper + cost,
        worst_case_epsilon=table.worst_case_epsilon + worst,
        account=replace(table.account, clipping_norm_epsilon=worst),
        details=details,
    )


def details_with_release(
    details: Mapping[str, NDArray[np.generic]], cost: FloatArray
) -> dict[str, Any]:
    """Further columns of the steps of n examples, as those of the whole; cost is (n,)."""
    found: dict[str, Any] = dict(details)
    for name in ("rdp_epsilon", "epsilon_if_replaced_alike"):
        if name in found:
            found[name] = found[name] + cost
    if "mu" in found:
        found["mu"] = mu_with_release(found["mu"], cost)
    if "true_positive_limit" in found:
        # Of the steps at this rate; a concave curve rises to a larger one in proportion at most.
        rate = rate_after_release(FALSE_POSITIVE_RATE, cost)
        limit = found["true_positive_limit"] * rate / FALSE_POSITIVE_RATE
        found["true_positive_limit"] = np.minimum(limit, 1.0)
    return found


def rate_after_release(false_positive_rate: ArrayLike, cost: ArrayLike) -> FloatArray:
    """Largest true-positive rate of a test of C alone, which costs (cost, 0).

    >>> rate_after_release(0.01, [0.0, 0.1]).round(4)
    array([0.01  , 0.0111])
    """
    rate, cost = np.asarray(false_positive_rate, np.float64), np.asarray(cost, np.float64)
    found = np.minimum(np.exp(np.minimum(cost, 700.0)) * rate, 1 - np.exp(-cost) * (1 - rate))
    return np.asarray(np.where(cost > 0, found, rate))


def advantage_with_release(advantage: FloatArray, cost: ArrayLike) -> FloatArray:
    """Membership advantage of a run with C, from that of its steps [9.6]."""
    return np.asarray(1 - (1 - advantage) * (1 - np.tanh(np.asarray(cost, np.float64) / 2)))


def mu_with_release(mu: FloatArray, cost: ArrayLike) -> FloatArray:
    """Mu of a Gaussian mechanism together with C, which is post-processing of another one [9.6]."""
    own = -2 * ndtri(expit(-np.asarray(cost, np.float64)))
    return np.asarray(np.hypot(mu, own))
