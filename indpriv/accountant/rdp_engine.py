"""The accountant "rdp": upper bounds of epsilon from Rényi divergences. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indpriv.accountant.blocks import Epsilons
from indpriv.accountant.histogram.histogram import Histogram
from indpriv.accountant.method import Method
from indpriv.accountant.rdp_orders import RdpAccountant, RdpEpsilons
from indpriv.accountant.worst_case import worst_case_rdp
from indpriv.norm_log.norm_log import NormLog

_SEARCH_BYTES = 4096  # that the search for the best order takes for one example


@dataclass(frozen=True)
class RdpEngine:
    """See Engine.

    Attributes:
        histogram: how norms are counted.
        accountant: turns counts into epsilons.
        worst_case: of the run.
    """

    histogram: Histogram
    accountant: RdpAccountant
    worst_case: Epsilons

    @classmethod
    def prepare(cls, log: NormLog, method: Method, *, finest: int = 1) -> RdpEngine:
        """See Engine; finest: distance of the orders that are tried, as in RdpAccountant."""
        histogram = Histogram.of(log, method.between_records)
        accountant = RdpAccountant(histogram, method, finest)
        return cls(histogram, accountant, rdp_bounds(worst_case_rdp(log, method)))

    @property
    def bytes_per_example(self) -> int:
        """See Engine."""
        return self.histogram.bytes_per_example + _SEARCH_BYTES

    def block(self, block: NormLog) -> Epsilons:
        """See Engine."""
        found = rdp_bounds(self.accountant.epsilons(self.histogram.counts(block)))
        # The divergence grows with the norm, so the worst case bounds each example; its search may
        # have found a better order than an example's own.
        epsilon = np.minimum(found.epsilon, self.worst_case.epsilon)
        return Epsilons(epsilon, found.epsilon_lower, found.details)


def rdp_bounds(found: RdpEpsilons) -> Epsilons:
    """Rényi bounds as an engine's."""
    names = ("best_order", "order_at_boundary", "true_positive_limit")
    details = {name: getattr(found, name) for name in names}
    return Epsilons(found.epsilon, np.zeros(len(found.epsilon)), details)
