"""The figures that `membership_risk` reads off privacy curves. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv.accountant.clipping_norm import (
    advantage_with_release,
    mu_with_release,
    rate_after_release,
)
from indpriv.accountant.gaussian import GAUSSIAN_ERROR, gaussian_delta
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld import curves
from indpriv.accountant.pld.loss_sum import Bounds

_LARGEST_RATE = 1 - 1e-9  # of false positives, at which curves are read


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

    Attributes:
        largest_epsilon: bounds the epsilon of every example's steps.
        clipping_norm_cost: of a private clipping norm, with which each curve is composed.
    """

    false_positive_rate: FloatArray
    epsilon: FloatArray
    delta: float
    largest_epsilon: float
    clipping_norm_cost: float

    @classmethod
    def of(
        cls,
        false_positive_rate: ArrayLike,
        epsilon: ArrayLike,
        *,
        delta: float,
        largest_epsilon: float = np.inf,
        clipping_norm_cost: float = 0.0,
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
        return cls(rates, epsilons, delta, largest_epsilon, clipping_norm_cost)

    @property
    def _of_steps(self) -> tuple[FloatArray, FloatArray]:
        """The false-positive rates and epsilons at which to read the curves of steps."""
        rates = rate_after_release(self.false_positive_rate, self.clipping_norm_cost)
        epsilons = np.maximum(self.epsilon - self.clipping_norm_cost, 0.0)
        return np.minimum(rates, _LARGEST_RATE), epsilons

    def _composed(self, steps: Risk) -> Risk:
        """The risk of steps and a private clipping norm, from what was read of the steps."""
        cost = self.clipping_norm_cost
        if not cost:
            return steps
        advantage = advantage_with_release(steps.advantage, cost)
        mu = mu_with_release(steps.mu, cost)
        # Delta falls from the advantage, at epsilon 0; below the cost there is no other bound.
        delta = np.where(self.epsilon < cost, 1.0, steps.delta)
        beyond = rate_after_release(self.false_positive_rate, cost) > _LARGEST_RATE
        return Risk(
            advantage=advantage,
            advantage_lower=steps.advantage_lower,
            true_positive_rate=np.where(beyond, 1.0, steps.true_positive_rate),
            true_positive_rate_lower=np.broadcast_to(
                self.false_positive_rate, steps.true_positive_rate.shape
            ),
            delta=np.minimum(delta, advantage[:, None]),
            delta_lower=np.zeros_like(steps.delta),
            mu=mu,
            mu_error=gaussian_delta(np.zeros(len(mu)), mu),
        )

    def off(self, up: Participations, down: Participations) -> Risk:
        """Read the curves of some examples.

        up, down: steps never better, and never worse, than theirs.
        """
        high = self._bounds(up)
        low = high if down is up else self._bounds(down)
        gaussian = curves.gaussian_approximation(
            up, down, delta=self.delta, limit=self.largest_epsilon
        )
        return self._composed(
            Risk(
                advantage=high[0].upper,
                advantage_lower=low[0].lower,
                true_positive_rate=high[1].upper,
                true_positive_rate_lower=low[1].lower,
                delta=high[2].upper,
                delta_lower=low[2].lower,
                mu=gaussian.mu,
                mu_error=gaussian.error,
            )
        )

    def off_gaussian(self, mu: FloatArray, least: FloatArray) -> Risk:
        """Read the curves of Gaussian mechanisms: mu (n,) from above and, at most as large, below.

        mu is a sensitivity over the noise's standard deviation.
        """
        more, less = 1 + GAUSSIAN_ERROR, 1 - GAUSSIAN_ERROR
        advantage, rates, delta = self._gaussian(mu)
        low = self._gaussian(least)
        # A figure that is too small for a float is not 0.
        smallest = np.where(mu > 0, np.finfo(np.float64).tiny, 0.0)
        advantage = np.clip(advantage * more, smallest, 1.0)
        return self._composed(
            Risk(
                advantage=advantage,
                advantage_lower=np.maximum(low[0] * less, 0.0),
                true_positive_rate=np.minimum(rates * more, 1.0),
                true_positive_rate_lower=low[1] * less,
                delta=np.clip(delta * more, smallest[:, None], 1.0),
                delta_lower=np.maximum(low[2] * less, 0.0),
                mu=mu,
                mu_error=np.where(least < mu, advantage, 0.0),
            )
        )

    def _gaussian(self, mu: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        advantage = gaussian_delta(np.zeros(len(mu)), mu)
        rate, epsilon = self._of_steps
        rates = ndtr(ndtri(rate) + mu[:, None])
        return advantage, rates, gaussian_delta(epsilon, mu[:, None])

    def _bounds(self, participations: Participations) -> tuple[Bounds, Bounds, Bounds]:
        advantage, (rate, epsilon) = curves.membership_advantage(participations), self._of_steps
        return (
            advantage,
            curves.true_positive_rates(participations, rate, advantage),
            curves.delta_curve(participations, epsilon),
        )
