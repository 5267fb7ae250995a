"""Worst-case epsilon of training that has not happened yet, and the noise that reaches one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.mechanisms import Mechanisms
from indpriv.accountant.method import Method
from indpriv.accountant.rdp_orders import RdpAccountant

_LEAST_NOISE, _MOST_NOISE = 0.05, 5000.0
_TINY = 1e-300
_TOLERANCE = 1e-4  # of the noise multiplier, relative; the result is rounded up by it


@dataclass(frozen=True)
class Plan:
    """Steps of equal settings.

    Attributes:
        noise_multiplier: noise standard deviation over max_grad_norm.
        sample_rate: Poisson sampling rate, in (0, 1].
        total_steps: number of steps.
        clipping_norm_epsilon: of a private clipping norm, which every epsilon includes.
    """

    noise_multiplier: float
    sample_rate: float
    total_steps: float
    clipping_norm_epsilon: float = 0.0

    @property
    def epochs(self) -> float:
        """Expected number of times that an example is drawn."""
        return self.sample_rate * self.total_steps

    def epsilon(self, delta: float) -> float:
        """Worst-case epsilon of one example under RDP, for adding or removing it."""
        mechanism = Mechanisms(*np.array([[1.0], [self.noise_multiplier], [self.sample_rate]]))
        counts = DenseCounts(np.array([[float(self.total_steps)]]))
        steps = RdpAccountant(mechanism, Method(delta=delta)).epsilons(counts).epsilon[0]
        return float(steps) + self.clipping_norm_epsilon

    def with_epsilon(self, epsilon: float, delta: float) -> Plan | None:
        """The same steps with the noise, rounded up, that gives epsilon.

        None if epsilon is 0 or infinite, or takes a noise multiplier outside 0.05 to 5,000.
        """

        def excess(log_noise: float) -> float:
            return float(np.log(max(self._at(log_noise).epsilon(delta), _TINY) / epsilon))

        ends = np.log(_LEAST_NOISE), np.log(_MOST_NOISE)
        if not 0 < epsilon < np.inf or excess(ends[0]) < 0 or excess(ends[1]) > 0:
            return None
        return self._at(float(brentq(excess, *ends, xtol=_TOLERANCE)) + 2 * _TOLERANCE)

    def _at(self, log_noise: float) -> Plan:
        return replace(self, noise_multiplier=float(np.exp(log_noise)))
