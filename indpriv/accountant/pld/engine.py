"""The accountant "pld": tight epsilons with a bracket, from loss distributions. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from indpriv._arrays import FloatArray
from indpriv._progress import Advance, unheard
from indpriv.accountant.engine import Epsilons
from indpriv.accountant.histogram.histogram import Histogram, whole_histograms
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld.brackets import pld_epsilon
from indpriv.accountant.rdp_engine import RdpEngine
from indpriv.accountant.worst_case import worst_case_participations
from indpriv.norm_log.norm_log import NormLog

if TYPE_CHECKING:
    from indpriv.accountant.method import Method

# Of Renyi bounds, which matter only where nothing better is found: about 10 % in the order, which
# costs 1e-3 of epsilon and is five times as fast
_ORDERS_APART = 1024
_FINE = 1e-6  # tolerance up to which the Renyi bound is the best there is


@dataclass(frozen=True)
class PldEngine:
    """See Engine.

    Attributes:
        method: delta and tolerance of the account.
        rdp: gives upper bounds, which the tight ones never exceed.
        upper, histogram: norms and settings rounded up, and down; one and the same if nothing is.
        worst_case: of the run.
        advance: called while a block takes long.
    """

    numerical_noise: ClassVar[str] = "1e-9"

    method: Method
    rdp: RdpEngine
    upper: Histogram
    histogram: Histogram
    worst_case: Epsilons
    advance: Advance = unheard

    @classmethod
    def prepare(cls, log: NormLog, method: Method) -> PldEngine:
        """See Engine."""
        finest = _ORDERS_APART if method.tolerance > _FINE else 1
        rdp = RdpEngine.prepare(log, method, finest=finest)
        up, down = whole_histograms(log, method.between_records)
        worst = bracketed(*worst_case_participations(log), method.delta, rdp.worst_case.epsilon)
        return cls(method, rdp, up, down, worst)

    @property
    def bytes_per_example(self) -> int:
        """See Engine."""
        # Half of it: in larger blocks more examples share a contour
        return self.rdp.bytes_per_example // 2 + 8 * len(self.upper.mechanisms)

    def watched(self, advance: Advance) -> PldEngine:
        """See Watched."""
        return replace(self, advance=advance)

    def block(self, block: NormLog) -> Epsilons:
        """See Engine."""
        upper = self.upper.participations(block)
        lower = upper if self.histogram is self.upper else self.histogram.participations(block)
        rdp, tolerance = self.rdp.block(block), self.method.tolerance
        found = bracketed(upper, lower, self.method.delta, rdp.epsilon, tolerance, self.advance)
        epsilon = np.minimum(found.epsilon, self.worst_case.epsilon)
        limit = {"true_positive_limit": rdp.details["true_positive_limit"]}
        lower_end = np.minimum(found.epsilon_lower, epsilon)
        return Epsilons(epsilon, lower_end, {**found.details, **limit})


def bracketed(
    upper: Participations,
    lower: Participations,
    delta: float,
    rdp: FloatArray,
    tolerance: float = 0.0,
    advance: Advance = unheard,
) -> Epsilons:
    """The upper end from steps rounded up, the lower end from steps rounded down.

    rdp: (n_examples,) upper bounds, which are never exceeded.
    """
    bracket = partial(pld_epsilon, delta=delta, rdp_upper=rdp, tolerance=tolerance)
    if lower is upper:
        high = low = bracket(upper, advance=advance)
    else:
        high, low = (bracket(end, advance=lambda more: advance(more / 2)) for end in (upper, lower))
    details = {"bracket": high.bracket, "rdp_epsilon": rdp}
    return Epsilons(high.epsilon, low.epsilon_lower, details)
