"""The worst case of a run: an example clipped in every step. Only settings matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.governing_records import GoverningRecords
from indpriv.accountant.histogram.lattice import condensed
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.rdp_orders import RdpAccountant, RdpEpsilons
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

if TYPE_CHECKING:
    from indpriv.accountant.method import Method

# Distinct settings up to which the worst case is exact. More are shared among the nodes of a fine
# lattice, which overstates the Rényi bound by about 1e-6, or rounded up or down to one of fewer
# nodes for loss distributions.
_MOST_SETTINGS = 5000
_SHARED = {"ratio": 1.5e-3, "most": 1 << 16}
_WHOLE = {"ratio": 2.5e-3, "most": 1 << 13}


def worst_case_steps(log: NormLog, between_nodes: str = "share") -> Participations:
    """The histogram of one example that is clipped in every step.

    between_nodes: how very many settings are summarised, as in `Histogram.of`.
    """
    exact = GoverningRecords.of(log, "last").always_clipped()
    if len(exact.sample_rate) <= _MOST_SETTINGS:
        return exact
    limits = _SHARED if between_nodes == "share" else _WHOLE
    return condensed(exact, between_nodes, ratio=limits["ratio"], most=int(limits["most"]))


def worst_case_rdp(log: NormLog, method: Method) -> RdpEpsilons:
    """The Rényi bound of the worst case, of one example; InputError if it is infinite."""
    steps = worst_case_steps(log)
    accountant = RdpAccountant(
        steps.mechanisms,
        delta=method.delta,
        conversion=method.conversion,
        orders=method.rdp_orders,
    )
    found = accountant.epsilons(DenseCounts(steps.counts))
    if not np.isfinite(found.epsilon[0]):
        raise InputError(
            f"noise_multiplier={steps.noise_multiplier.min():g} leaves no finite epsilon: with "
            "next to no noise there is no privacy to account for; check the optimizer's noise "
            "multiplier"
        )
    return found
