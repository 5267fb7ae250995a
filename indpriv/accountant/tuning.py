"""The price of tuning: several runs are tried, and the best one is published.

The number of runs must be drawn from a law that is chosen beforehand; a fixed number can cost as
much as publishing all runs. The score that picks the best one must be a function of what a run
publishes, and of nothing else in these data: a score on training data would have to be counted as
part of the run. Papernot and Steinke 2022 (arXiv:2110.03620v2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv.accountant.rdp import epsilon_offsets
from indpriv.errors import InputError


@dataclass(frozen=True)
class Tuning:
    """The law from which the number of tried runs was drawn.

    Attributes:
        mean: expected number of runs, at least 1.
        shape: of the truncated negative binomial law: 1 is geometric, 0 logarithmic, and infinity
            the Poisson law (where no run may be published at all if the number is 0).

    Raises:
        InputError: mean is below 1, or shape is negative.

    >>> Tuning(mean=5.0).law
    'geometric'
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise InputError(f"mean={self.mean} runs; pass the expected number, at least 1")
        if not self.shape >= 0:
            raise InputError(f"shape={self.shape}; pass 0 (logarithmic), 1 (geometric), a number "
                             "between or above, or inf (Poisson)")  # fmt: skip

    @property
    def law(self) -> str:
        """The name of the law."""
        names = {0.0: "logarithmic", 1.0: "geometric", math.inf: "Poisson"}
        return names.get(self.shape, f"truncated negative binomial of shape {self.shape:g}")

    def rdp(self, orders: FloatArray, rdp: FloatArray) -> FloatArray:
        """The Rényi curve of publishing the best run.

        Theorem 2 of the paper, or Theorem 6 for the Poisson law.

        Args:
            orders: (n_orders,) above 1, ascending.
            rdp: (n_orders,) curve of one run, or an upper bound of the curves of all that could be
                tried.

        Returns:
            (n_orders,).
        """
        price = math.log(self.mean) / (orders - 1)
        if math.isinf(self.shape):
            return np.asarray(rdp + price + self.mean * _deltas(orders, rdp))
        gamma = self._gamma()
        least = np.min((1 - 1 / orders) * rdp - math.log(gamma) / orders)
        published = rdp + price + (1 + self.shape) * least
        return np.minimum.accumulate(published[::-1])[::-1]  # the divergence grows with the order

    def _gamma(self) -> float:
        """The parameter of the law with this mean, rounded down, which costs more."""
        mean, low = max(self.mean, 1 + 1e-9), -1.0
        while self._mean(low) < mean:
            low *= 2
        log_gamma = brentq(lambda x: self._mean(x) - mean, low, -1e-12, xtol=1e-14)
        return math.exp(float(log_gamma) * (1 + 1e-9) - 1e-12)

    def _mean(self, log_gamma: float) -> float:
        """Expected number of runs at this logarithm of gamma, which falls as gamma grows."""
        odds = math.expm1(-log_gamma)  # 1 / gamma - 1
        if self.shape == 0:
            return odds / -log_gamma
        return self.shape * odds / -math.expm1(self.shape * log_gamma)


def _deltas(orders: FloatArray, rdp: FloatArray) -> FloatArray:
    """(n_orders,) the delta of one run at epsilon log(1 + 1 / (order - 1)); see Theorem 6."""
    epsilon = np.log1p(1 / (orders - 1))
    log_delta = (orders - 1) * (rdp - epsilon[:, None]) + np.log1p(-1 / orders) * orders
    log_delta -= np.log(orders - 1)
    return np.asarray(np.exp(np.minimum(log_delta.min(axis=1), 0.0)))


def least_epsilon(orders: FloatArray, rdp: FloatArray, delta: float, conversion: str) -> float:
    """The smallest epsilon that a Rényi curve gives at delta."""
    _checks.check_delta(delta)
    return max(0.0, float(np.min(rdp + epsilon_offsets(orders, delta, conversion))))
