"""The privacy loss of an example as a sum of independent one-step losses. Sensitive.

One step of DP-SGD, seen along the direction of an example's gradient, outputs z with law Q = N(0, 1) without the example
and P = (1 - q) N(0, 1) + q N(shift, 1) with it, where shift = relative_norm / noise_multiplier and q is the Poisson
sampling rate. Their density ratio is f(z) = 1 - q + q exp(z shift - shift^2 / 2). The two neighbouring directions are
"remove" (loss log f, z from P) and "add" (loss -log f, z from Q).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from indpriv._arrays import FloatArray
from indpriv.accountant.histogram.governing_records import Participations

Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")


@dataclass(frozen=True)
class LossSum:
    """Which one-step losses add up for each example; steps that cost nothing are left out.

    Attributes:
        shift: (n_kinds,) relative_norm / noise_multiplier, above 0.
        sample_rate: (n_kinds,) in (0, 1).
        counts: (n_examples, n_kinds) steps of each kind, float64.
        gaussian: (n_examples,) sum of shift^2 over the unsampled steps (sample_rate 1), which compose to one Gaussian.
    """

    shift: FloatArray
    sample_rate: FloatArray
    counts: FloatArray
    gaussian: FloatArray

    @classmethod
    def from_participations(cls, participations: Participations) -> LossSum:
        """Leave out free steps and compose unsampled steps: their squared shifts add (exact for Gaussians)."""
        shift = participations.relative_norms / participations.noise_multiplier
        counts = np.asarray(participations.counts, dtype=np.float64)
        whole = participations.sample_rate >= 1.0
        gaussian = counts[:, whole] @ shift[whole] ** 2
        kept = np.flatnonzero(~whole & (shift > 0))
        kept = kept[(counts[:, kept] > 0).any(axis=0)]
        return cls(shift[kept], participations.sample_rate[kept], counts[:, kept], gaussian)

    def __len__(self) -> int:
        return len(self.gaussian)

    @property
    def steps(self) -> FloatArray:
        """(n_examples,) number of sampled steps that cost something."""
        steps: FloatArray = self.counts.sum(axis=1)
        return steps

    def select(self, examples: NDArray[np.intp]) -> LossSum:
        """The sums of some examples only, without the kinds that none of them meets."""
        counts = self.counts[examples]
        kept = np.flatnonzero((counts > 0).any(axis=0))
        if len(kept) == len(self.shift):
            return LossSum(self.shift, self.sample_rate, counts, self.gaussian[examples])
        return LossSum(
            self.shift[kept], self.sample_rate[kept], counts[:, kept], self.gaussian[examples]
        )

    def rows(self, examples: NDArray[np.intp]) -> LossSum:
        """The sums of some examples only, with the kinds of all."""
        return LossSum(self.shift, self.sample_rate, self.counts[examples], self.gaussian[examples])

    def total_variation_bound(self) -> FloatArray:
        """(n_examples,) sum of the total variations of the steps: never below delta at epsilon 0."""
        one_step = self.sample_rate * erf(self.shift / np.sqrt(8.0))
        bound: FloatArray = self.counts @ one_step + erf(np.sqrt(self.gaussian / 8.0))
        return bound


def log_density_ratio(
    z: FloatArray, shift: FloatArray | float, sample_rate: FloatArray | float
) -> FloatArray:
    """Log f(z) to full relative precision, also where f is nearly 1 or overflows; arguments broadcast."""
    exponent = z * shift - np.square(shift) / 2
    q = np.minimum(sample_rate, 1 - 1e-16)
    near: FloatArray = np.log1p(q * np.expm1(np.minimum(exponent, 30.0)))
    if np.max(exponent, initial=0.0) <= 30.0 and np.max(sample_rate) < 1.0:
        return near
    large = np.maximum(exponent, 30.0)
    far = np.log(q) + large + np.log1p((1 - q) / q * np.exp(-large))
    sampled = np.where(exponent <= 30.0, near, far)
    result: FloatArray = np.where(np.asarray(sample_rate) < 1.0, sampled, exponent)
    return result
