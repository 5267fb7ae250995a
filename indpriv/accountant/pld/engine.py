"""The accountant "pld": tight epsilons with a bracket, from loss distributions. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from indpriv._arrays import FloatArray
from indpriv.accountant.engine import Epsilons
from indpriv.accountant.histogram.histogram import Histogram, whole_histograms
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld.brackets import pld_epsilon
from indpriv.accountant.rdp_engine import RdpEngine
from indpriv.accountant.worst_case import worst_case_participations
from indpriv.norm_log.norm_log import NormLog

if TYPE_CHECKING:
    from indpriv.accountant.method import Method


@dataclass(frozen=True)
class PldEngine:
    """See Engine.

    Attributes:
        delta: of the bound.
        rdp: gives upper bounds, which the tight ones never exceed.
        upper, histogram: norms and settings rounded up, and down; one and the same if nothing is.
        worst_case: of the run.
    """

    takes_units: ClassVar[bool] = False
    numerical_noise: ClassVar[str] = "1e-9"

    delta: float
    rdp: RdpEngine
    upper: Histogram
    histogram: Histogram
    worst_case: Epsilons

    @classmethod
    def prepare(cls, log: NormLog, method: Method) -> PldEngine:
        """See Engine."""
        rdp = RdpEngine.prepare(log, method)
        up, down = whole_histograms(log, method.between_records)
        worst = _bracket(*worst_case_participations(log), method.delta, rdp.worst_case.epsilon)
        return cls(method.delta, rdp, up, down, worst)

    @property
    def bytes_per_example(self) -> int:
        """See Engine."""
        return self.rdp.bytes_per_example + 16 * len(self.upper.mechanisms)

    def block(self, block: NormLog) -> Epsilons:
        """See Engine."""
        upper = self.upper.participations(block)
        lower = upper if self.histogram is self.upper else self.histogram.participations(block)
        found = _bracket(upper, lower, self.delta, self.rdp.block(block).epsilon)
        epsilon = np.minimum(found.epsilon, self.worst_case.epsilon)
        return Epsilons(epsilon, np.minimum(found.epsilon_lower, epsilon), found.details)


def _bracket(
    upper: Participations, lower: Participations, delta: float, rdp: FloatArray
) -> Epsilons:
    """The upper end from steps rounded up, the lower end from steps rounded down."""
    high = pld_epsilon(upper, delta=delta, rdp_upper=rdp)
    low = high if lower is upper else pld_epsilon(lower, delta=delta, rdp_upper=rdp)
    details = {"bracket": high.bracket, "rdp_epsilon": rdp}
    return Epsilons(high.epsilon, low.epsilon_lower, details)
