"""What any attack on a run can reach at most, beside what attacks did reach. Sensitive."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri

from indpriv._types import FloatArray, IntArray
from indpriv.accountant.account import with_norms_it_uses
from indpriv.accountant.blocks import block_size, in_blocks
from indpriv.accountant.gaussian import GAUSSIAN_ERROR, gaussian_delta, gaussian_mu
from indpriv.accountant.loss_pairs import Pairs
from indpriv.accountant.method import Method, mu_with_release, rate_after_release
from indpriv.accountant.risk import has_risk_curve
from indpriv.accountant.steps import Steps
from indpriv.accountant.tight import Met, deltas
from indpriv.analysis.attacks.rates import FALSE_POSITIVE_RATES
from indpriv.analysis.guarantee import worst_case_limits
from indpriv.analysis.recorded_run import AuditedRun, attacked_table
from indpriv.analysis.summary import Finding, record
from indpriv.epsilon_table import Account, EpsilonTable
from indpriv.norm_log.norm_log import NormLog

Ceilings: Any = record("ceilings")


def ceilings_of(log: NormLog, table: EpsilonTable) -> Ceilings | None:
    """The worst case's limits and those of all examples together.

    None for units of several rows, if neighbours differ by a replaced example, or if batches were
    truncated.
    """
    if log.unit_ids is not None or not has_risk_curve(table.account):
        return None
    limits, advantage, _ = worst_case_limits(log, table, FALSE_POSITIVE_RATES)
    worst, individual = {}, {}
    for limit, rate in zip(limits.tolist(), FALSE_POSITIVE_RATES, strict=True):
        worst[f"{rate:g}"] = limit
        individual[f"{rate:g}"] = min(individual_ceiling(log, table, rate), limit)
    return Ceilings(worst, individual, advantage)


def individual_ceiling(log: NormLog, table: EpsilonTable, rate: float) -> float:
    """Largest share of all examples that any attack accuses in runs that train on them.

    An attack has one threshold, so its false positives go where epsilon is large. A test of example
    i has rates y_i <= delta_i(t) + e^t x_i for every t, by its privacy curve delta_i. So the mean
    of y_i is at most that of delta_i(t) plus e^t times the mean of x_i, which is `rate`, however
    false positives are split: a bound for any t, and smallest where e^t is the likelihood ratio of
    the common threshold. Beyond its epsilon an example's delta_i is at most the account's delta.
    Before it, a tight account has a proven bound; otherwise delta_i is that of a Gaussian mechanism
    (exact with known participation, else an approximation from above: see `mu_of`).
    """
    account = table.account
    cost = account.clipping_norm_epsilon
    epsilon, rate = table.epsilon - cost, float(rate_after_release(rate, cost))
    if rate >= 1:
        return 1.0
    mu = _gaussian_mu(epsilon, account.delta)

    def bound(at: float, of_steps: Callable[[IntArray, float], FloatArray]) -> float:
        above = np.flatnonzero(epsilon > at)
        deltas = of_steps(above, at).sum() + (len(epsilon) - len(above)) * account.delta
        return float(min(1.0, deltas / len(epsilon) + np.exp(at) * rate))

    def gaussian(above: IntArray, at: float) -> FloatArray:
        found = gaussian_delta(np.full(len(above), at), mu[above])
        return np.asarray(found * (1 + GAUSSIAN_ERROR))

    # The best test at false-positive rate x has its threshold at most at the ratio 1 / x
    limits = (0.0, -np.log(rate))
    best = minimize_scalar(bound, args=(gaussian,), bounds=limits, method="bounded")
    if account.participation == "known" or account.accountant != "pld":
        return float(best.fun)
    return bound(float(best.x), partial(_tight_deltas, log, account))


def _tight_deltas(log: NormLog, account: Account, rows: IntArray, at: float) -> FloatArray:
    """(n_rows,) delta of the steps of some examples at one epsilon, from above."""
    between = account.between_records
    method = Method(delta=account.delta, accountant="pld", between_records=between)
    log = with_norms_it_uses(log, method)
    steps = Steps.of(log, between)
    pairs = Pairs.of(steps, account.delta)

    def of_block(block: NormLog) -> FloatArray:
        met = Met.of(steps.counts(block))
        return deltas(pairs.above[0], met, np.full(len(met), at))

    size = block_size(steps.bytes_per_example + 16 * len(steps.laws))
    return np.concatenate([np.zeros(0), *in_blocks(log.take(rows), of_block, size=size)])


def mu_of(table: EpsilonTable) -> FloatArray:
    """(n_examples,) mu of a Gaussian mechanism with the epsilon of each example at delta.

    Such a mechanism allows about what the run allows, and rather more: a sampled run with the same
    epsilon at a small delta has a smaller mu in its body (see `indpriv.membership_risk`). A private
    clipping norm has a curve of its own.
    """
    cost = table.account.clipping_norm_epsilon
    mu = _gaussian_mu(table.epsilon - cost, table.account.delta)
    return mu_with_release(mu, cost) if cost else mu


def _gaussian_mu(epsilon: FloatArray, delta: float) -> FloatArray:
    distinct, codes = np.unique(epsilon, return_inverse=True)
    return gaussian_mu(distinct, np.full(len(distinct), delta))[codes]


def true_positive_rate(mu: FloatArray, false_positive_rate: float) -> FloatArray:
    """Of the best test at this false-positive rate: Dong, Roth and Su 2022, equation 6.

    >>> true_positive_rate(np.array([0.0, 0.66]), 0.01).round(3)
    array([0.01 , 0.048])
    """
    return np.asarray(ndtr(ndtri(false_positive_rate) + mu))


def _find(run: AuditedRun) -> dict[str, Any]:
    if not (run.recorded.references or run.recorded.attributes):
        return {}
    return {"ceilings": ceilings_of(run.log, run.once(attacked_table))}


FINDING = Finding("ceilings", _find)
