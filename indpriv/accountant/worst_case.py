"""The worst case of a run: an example clipped in every step. Only settings matter."""

from __future__ import annotations

import numpy as np

from indpriv._arrays import FloatArray
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.lattice import condensed
from indpriv.accountant.histogram.mechanisms import Mechanisms, Participations
from indpriv.accountant.method import Method
from indpriv.accountant.rdp_orders import RdpAccountant, RdpEpsilons
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

# Distinct settings up to which the worst case is exact. More are shared among the nodes of a fine
# lattice, which overstates the Rényi bound by about 1e-6, or rounded up or down to one of fewer
# nodes for loss distributions.
_MOST_SETTINGS = 5000
_SHARED = {"ratio": 1.5e-3, "most": 1 << 16}
_WHOLE = {"ratio": 2.5e-3, "most": 1 << 13}


def clipped_steps(log: NormLog) -> tuple[Mechanisms, FloatArray]:
    """Mechanisms of an example that is clipped in every step, and its (n,) steps under each."""
    setting, settings = log.settings.distinct()
    pairs = np.stack([settings.noise_multiplier, settings.sample_rate], axis=1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    if setting is None:
        steps = np.array([log.total_steps])
    else:
        steps = np.bincount(inverse.ravel()[setting])
    return Mechanisms(np.ones(len(distinct)), *distinct.T), steps.astype(np.float64)


def worst_case_steps(log: NormLog, between_nodes: str = "share") -> tuple[Mechanisms, FloatArray]:
    """The same; very many settings are summarised.

    between_nodes: how they are, as in `Histogram.of`.
    """
    exact, steps = clipped_steps(log)
    if len(exact) <= _MOST_SETTINGS:
        return exact, steps
    limits = _SHARED if between_nodes == "share" else _WHOLE
    return condensed(exact, steps, between_nodes, ratio=limits["ratio"], most=int(limits["most"]))


def worst_case_participations(log: NormLog) -> tuple[Participations, Participations]:
    """The histogram of that example, with whole numbers of steps: rounded up, and down."""
    found = (worst_case_steps(log, between_nodes) for between_nodes in ("up", "down"))
    up, down = (mechanisms.participations(steps[None]) for mechanisms, steps in found)
    return up, down


def worst_case_rdp(log: NormLog, method: Method) -> RdpEpsilons:
    """The Rényi bound of the worst case, of one example; InputError if it is infinite."""
    mechanisms, steps = worst_case_steps(log)
    found = RdpAccountant(mechanisms, method).epsilons(DenseCounts(steps[None]))
    if not np.isfinite(found.epsilon[0]):
        raise InputError(
            f"noise_multiplier={mechanisms.noise_multiplier.min():g} leaves no finite epsilon: "
            "with almost no noise there is no privacy to account for; check the optimizer's noise "
            "multiplier"
        )
    return found
