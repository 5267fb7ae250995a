"""The privacy loss of an example as a sum of independent one-step losses. Sensitive.

Along the direction of an example's gradient, one step of DP-SGD outputs z with law Q = N(0, 1)
without the example and P = (1 - q) N(0, 1) + q N(shift, 1) with it, where
shift = relative_norm / noise_multiplier and q is the Poisson sampling rate. Their density ratio is
f(z) = 1 - q + q exp(z shift - shift^2 / 2). The two neighbouring directions are "remove" (loss
log f, z from P) and "add" (loss -log f, z from Q).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, ndtri

from indpriv._arrays import FloatArray
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld.shared_laws import SharedLaws, shared_laws

ComplexArray = NDArray[np.complex128]
UNIT_ROUNDOFF = 2.0**-53
Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")


@dataclass(frozen=True)
class LossSum:
    """The number of one-step losses of each law that add up for each example; free steps left out.

    Attributes:
        laws: of one step.
        counts: (n_examples, n_laws) number of steps under each law, float64.
        gaussian: (n_examples,) sum of shift^2 over the unsampled steps (sample_rate 1), which
            compose to one Gaussian.
    """

    laws: SharedLaws
    counts: FloatArray
    gaussian: FloatArray

    @classmethod
    def from_participations(cls, participations: Participations) -> LossSum:
        """Leave out free steps and compose unsampled ones: their squared shifts add exactly."""
        shift = participations.relative_norms / participations.noise_multiplier
        counts = np.asarray(participations.counts, dtype=np.float64)
        whole = participations.sample_rate >= 1.0
        gaussian = counts[:, whole] @ shift[whole] ** 2
        kept = ~whole & (shift > 0)
        laws = shared_laws(shift[kept], participations.sample_rate[kept])
        return cls(laws, counts if kept.all() else counts[:, kept], gaussian)

    def __len__(self) -> int:
        return len(self.gaussian)

    @property
    def shift(self) -> FloatArray:
        """(n_laws,) of the laws."""
        return self.laws.shift

    @property
    def sample_rate(self) -> FloatArray:
        """(n_laws,) of the laws."""
        return self.laws.sample_rate

    @property
    def used(self) -> NDArray[np.bool_]:
        """(n_laws,) laws that some example has a step under."""
        return np.asarray((self.counts > 0).any(axis=0))

    @property
    def steps(self) -> FloatArray:
        """(n_examples,) number of sampled steps that are not free."""
        return np.asarray(self.counts.sum(axis=1))

    def select(self, examples: NDArray[np.intp]) -> LossSum:
        """The sums of some examples, without the laws that none of them has a step under."""
        part = self.rows(examples)
        kept = part.used
        if kept.all():
            return part
        laws = SharedLaws(self.shift[kept], self.sample_rate[kept])
        return LossSum(laws, part.counts[:, kept], part.gaussian)

    def rows(self, examples: NDArray[np.intp]) -> LossSum:
        """The sums of some examples, with all laws."""
        return replace(self, counts=self.counts[examples], gaussian=self.gaussian[examples])

    def total_variation_bound(self) -> FloatArray:
        """(n_examples,) sum of the steps' total variations: never below delta at epsilon 0."""
        one_step = self.sample_rate * erf(self.shift / np.sqrt(8.0))
        return np.asarray(self.counts @ one_step + erf(np.sqrt(self.gaussian / 8.0)))


@dataclass(frozen=True)
class Bounds:
    """Proven bounds of a quantity of each example, (n_examples,) or (n_examples, k)."""

    lower: FloatArray
    upper: FloatArray

    def select(self, examples: NDArray[np.intp]) -> Bounds:
        """The bounds of some examples."""
        return Bounds(self.lower[examples], self.upper[examples])


@dataclass(frozen=True)
class StepLaws:
    """Laws of the loss of one step.

    Attributes:
        shift: (n_laws,) above 0.
        sample_rate: (n_laws,) in (0, 1).
        cut: (n_laws,) the law is cut off where z is above cut (remove) or below -cut (add); None
            for whole laws.
    """

    shift: FloatArray
    sample_rate: FloatArray
    cut: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.shift)

    def select(self, laws: NDArray[np.bool_] | NDArray[np.intp]) -> StepLaws:
        """Some of the laws."""
        cut = None if self.cut is None else self.cut[laws]
        return StepLaws(self.shift[laws], self.sample_rate[laws], cut)

    def cut_at(self, probability: float, direction: Direction) -> StepLaws:
        """The same laws, cut so that a step goes beyond with at most this probability.

        In the remove direction z has law P, which lies below N(shift, 1) in its upper tail; in the
        add direction it has law Q.
        """
        if direction == "add":
            return replace(self, cut=np.full_like(self.shift, -ndtri(probability)))
        by_mixture = -ndtri(probability / 2)
        sampled = self.shift - ndtri(np.minimum(probability / 2 / self.sample_rate, 0.5))
        by_component = np.where(probability < self.sample_rate, sampled, self.shift)
        return replace(self, cut=np.maximum(by_mixture, by_component))


def exponent_of(tilt: float, direction: Direction) -> float:
    """The power a with E[exp(tilt loss)] = E[f(z)^a] for z from N(0, 1)."""
    return tilt + 1.0 if direction == "remove" else -tilt


def log_density_ratio(
    z: FloatArray, shift: FloatArray | float, sample_rate: FloatArray | float
) -> FloatArray:
    """Log f(z) to full relative precision, also where f is nearly 1 or overflows.

    Arguments broadcast.
    """
    exponent = z * shift - np.square(shift) / 2
    q = np.minimum(sample_rate, 1 - 1e-16)
    near: FloatArray = np.log1p(q * np.expm1(np.minimum(exponent, 30.0)))
    if np.max(exponent, initial=0.0) <= 30.0 and np.max(sample_rate) < 1.0:
        return near
    large = np.maximum(exponent, 30.0)
    far = np.log(q) + large + np.log1p((1 - q) / q * np.exp(-large))
    sampled = np.where(exponent <= 30.0, near, far)
    return np.where(np.asarray(sample_rate) < 1.0, sampled, exponent)
