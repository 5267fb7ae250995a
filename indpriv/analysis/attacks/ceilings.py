"""What any attack on a run can reach at most, beside what attacks did reach. Sensitive."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from indpriv._arrays import FloatArray
from indpriv._plain import Share
from indpriv.accountant.pld.curves import gaussian_mu
from indpriv.accountant.relations.clipping_norm import advantage_with_release, rate_after_release
from indpriv.accountant.risk import has_risk_curve, worst_case_risk
from indpriv.analysis.attacks.roc import FALSE_POSITIVE_RATES
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.norm_log import NormLog


@dataclass(frozen=True)
class Ceilings:
    """Largest true-positive rates that any attack can reach at low false-positive rates.

    Attributes:
        worst_case: of the guarantee, for every example, by false-positive rate.
        individual: mean over the training examples of the rate that a Gaussian mechanism of the
            example's epsilon allows. It limits attacks on this run's trajectory on average, not in
            every run, and is an approximation: a sampled run is not quite Gaussian.
        advantage: largest difference of true-positive and false-positive rate that the guarantee
            allows any attack.
    """

    worst_case: Mapping[str, Share]
    individual: Mapping[str, Share]
    advantage: Share = 1.0


def ceilings_of(log: NormLog, table: EpsilonTable) -> Ceilings | None:
    """The worst case's limits and the mean of the individual ones; None for units of several rows.

    It is also None if neighbours differ by a replaced example, or batches were truncated.

    Args:
        log: the norm log.
        table: its epsilons.
    """
    if log.unit_ids is not None or not has_risk_curve(table.account):
        return None
    account, mu = table.account, mu_of(table)
    if account.participation == "known":
        cost = account.clipping_norm_epsilon
        worst_case = np.array([table.worst_case_epsilon - cost]), np.array([account.delta])
        largest = gaussian_mu(*worst_case)
        rates = rate_after_release(FALSE_POSITIVE_RATES, cost).tolist()
        limits = np.concatenate([true_positive_rate(largest, one) for one in rates])
        advantage = float(advantage_with_release(2 * ndtr(largest / 2) - 1, cost)[0])
    else:
        risk = worst_case_risk(log, delta=account.delta, false_positive_rate=FALSE_POSITIVE_RATES)
        limits, advantage = risk.true_positive_rate[0], float(risk.advantage[0])
    worst, individual = {}, {}
    for column, rate in enumerate(FALSE_POSITIVE_RATES):
        limit = float(limits[column])
        worst[f"{rate:g}"] = limit
        of_each = np.minimum(true_positive_rate(mu, rate), limit)
        individual[f"{rate:g}"] = float(of_each.mean())
    return Ceilings(worst, individual, advantage)


def mu_of(table: EpsilonTable) -> FloatArray:
    """(n_examples,) mu of a Gaussian mechanism with the epsilon of each example at delta.

    Such a mechanism allows about what the run allows, and rather more: a sampled run with the same
    epsilon at a small delta has a smaller mu in its body (see `indpriv.membership_risk`).
    """
    distinct, codes = np.unique(table.epsilon, return_inverse=True)
    return gaussian_mu(distinct, np.full(len(distinct), table.account.delta))[codes]


def true_positive_rate(mu: FloatArray, false_positive_rate: float) -> FloatArray:
    """Of the best test at this false-positive rate: Dong, Roth and Su 2022, equation 6.

    >>> true_positive_rate(np.array([0.0, 0.66]), 0.01).round(3)
    array([0.01 , 0.048])
    """
    return np.asarray(ndtr(ndtri(false_positive_rate) + mu))
