"""The figures that `membership_risk` reads off privacy curves. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld import curves
from indpriv.accountant.pld.closed_form import CLOSED_FORM_ERROR, gaussian_delta
from indpriv.accountant.pld.loss_sum import Bounds


@dataclass(frozen=True)
class Risk:
    """What the privacy curve of each of n examples says.

    Figures named `_lower` are never above the truth for the norms as counted, which are rounded up;
    the others are never below it.

    Attributes:
        advantage: (n,) largest true-positive minus false-positive rate of any attack: delta at
            epsilon 0.
        true_positive_rate: (n, n_rates) largest one of any attack at each false-positive rate.
        delta: (n, n_epsilons) at each epsilon, the larger neighbouring direction.
        mu: (n,) of a Gaussian mechanism like this run: the smallest whose delta is nowhere below
            the run's, at some epsilons from 0 to epsilon(delta). An approximation.
        mu_error: (n,) by how much its delta exceeds the run's there, at most.
    """

    advantage: FloatArray
    advantage_lower: FloatArray
    true_positive_rate: FloatArray
    true_positive_rate_lower: FloatArray
    delta: FloatArray
    delta_lower: FloatArray
    mu: FloatArray
    mu_error: FloatArray

    def take(self, examples: NDArray[np.intp]) -> Risk:
        """The risk of some examples, in this order."""
        return Risk(**{field.name: getattr(self, field.name)[examples] for field in fields(self)})

    @classmethod
    def concatenated(cls, parts: list[Risk]) -> Risk:
        """The risk of the examples of all parts."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Readings:
    """Which figures to read off a privacy curve (see `membership_risk`).

    largest_epsilon bounds the epsilon of every example.
    """

    false_positive_rate: FloatArray
    epsilon: FloatArray
    delta: float
    largest_epsilon: float

    @classmethod
    def of(
        cls,
        false_positive_rate: ArrayLike,
        epsilon: ArrayLike,
        *,
        delta: float,
        largest_epsilon: float = np.inf,
    ) -> Readings:
        """Check the arguments."""
        rates = _checks.check_row(
            "false_positive_rate",
            false_positive_rate,
            lambda x: (x > 0) & (x < 1),
            "numbers in (0, 1), e.g. 0.001",
        )
        epsilons = _checks.check_row(
            "epsilon",
            epsilon,
            lambda x: np.isfinite(x) & (x >= 0),
            "finite numbers of at least 0, e.g. 1.0",
        )
        return cls(rates, epsilons, delta, largest_epsilon)

    def off(self, up: Participations, down: Participations) -> Risk:
        """Read the curves of some examples.

        up, down: steps never better, and never worse, than theirs.
        """
        high = self._bounds(up)
        low = high if down is up else self._bounds(down)
        gaussian = curves.gaussian_approximation(
            up, down, delta=self.delta, limit=self.largest_epsilon
        )
        return Risk(
            advantage=high[0].upper,
            advantage_lower=low[0].lower,
            true_positive_rate=high[1].upper,
            true_positive_rate_lower=low[1].lower,
            delta=high[2].upper,
            delta_lower=low[2].lower,
            mu=gaussian.mu,
            mu_error=gaussian.error,
        )

    def off_gaussian(self, mu: FloatArray, least: FloatArray) -> Risk:
        """Read the curves of Gaussian mechanisms: mu (n,) from above and, at most as large, below.

        mu is a sensitivity over the noise's standard deviation.
        """
        more, less = 1 + CLOSED_FORM_ERROR, 1 - CLOSED_FORM_ERROR
        advantage, rates, delta = self._gaussian(mu)
        low = self._gaussian(least)
        # A figure that is too small for a float is not 0.
        smallest = np.where(mu > 0, np.finfo(np.float64).tiny, 0.0)
        advantage = np.clip(advantage * more, smallest, 1.0)
        return Risk(
            advantage=advantage,
            advantage_lower=np.maximum(low[0] * less, 0.0),
            true_positive_rate=np.minimum(rates * more, 1.0),
            true_positive_rate_lower=low[1] * less,
            delta=np.clip(delta * more, smallest[:, None], 1.0),
            delta_lower=np.maximum(low[2] * less, 0.0),
            mu=mu,
            mu_error=np.where(least < mu, advantage, 0.0),
        )

    def _gaussian(self, mu: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        advantage = gaussian_delta(np.zeros(len(mu)), mu)
        rates = ndtr(ndtri(self.false_positive_rate) + mu[:, None])
        return advantage, rates, gaussian_delta(self.epsilon, mu[:, None])

    def _bounds(self, participations: Participations) -> tuple[Bounds, Bounds, Bounds]:
        advantage = curves.membership_advantage(participations)
        return (
            advantage,
            curves.true_positive_rates(participations, self.false_positive_rate, advantage),
            curves.delta_curve(participations, self.epsilon),
        )
