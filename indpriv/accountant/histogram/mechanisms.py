"""One-step mechanisms of a run, and in how many steps each example met each of them. Sensitive."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.cluster import n_cores
from indpriv.accountant.rdp import renyi_divergences

_WORTH_THREADS = 20_000  # divergences that take longer than starting a thread


@dataclass(frozen=True)
class Mechanisms:
    """One-step mechanisms; each array has shape (n,).

    relative_norms: contribution as a fraction of max_grad_norm, in [0, 1].
    noise_multiplier, sample_rate: settings of the step.
    """

    relative_norms: FloatArray
    noise_multiplier: FloatArray
    sample_rate: FloatArray

    def __len__(self) -> int:
        return len(self.sample_rate)

    @classmethod
    def concatenated(cls, parts: Sequence[Mechanisms]) -> Mechanisms:
        """The mechanisms of all parts."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def take(self, index: IntArray) -> Mechanisms:
        """Some of the mechanisms."""
        return Mechanisms(
            self.relative_norms[index], self.noise_multiplier[index], self.sample_rate[index]
        )

    @property
    def shifts(self) -> FloatArray:
        """(n,) contribution in standard deviations of the noise."""
        return self.relative_norms / self.noise_multiplier

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n) Rényi divergences of one step; equal mechanisms are computed once."""
        pairs = np.stack([self.shifts, self.sample_rate], axis=1)
        distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
        values = np.empty((len(distinct), len(orders)))

        def fill(part: slice) -> None:
            values[part] = renyi_divergences(distinct[part, 0], distinct[part, 1], orders)

        n_threads = n_cores() if values.size > _WORTH_THREADS else 1
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(fill, (slice(start, None, n_threads) for start in range(n_threads))))
        return values.T[:, inverse.ravel()]

    def participations(self, counts: FloatArray) -> Participations:
        """The histogram of examples that met these mechanisms in `counts` (n_examples, n) steps."""
        return Participations(self.relative_norms, self.noise_multiplier, self.sample_rate, counts)


@dataclass(frozen=True)
class Participations:
    """The histogram of one block of examples over mechanisms.

    Attributes:
        relative_norms: (n_mechanisms,) contribution as a fraction of max_grad_norm, in [0, 1].
        noise_multiplier: (n_mechanisms,).
        sample_rate: (n_mechanisms,) in (0, 1].
        counts: (n_examples, n_mechanisms) number of steps of each example under each mechanism;
            rows sum to total_steps.
    """

    relative_norms: FloatArray
    noise_multiplier: FloatArray
    sample_rate: FloatArray
    counts: FloatArray

    def select(self, examples: NDArray[np.intp]) -> Participations:
        """The histogram of some examples only."""
        return replace(self, counts=self.counts[examples])
