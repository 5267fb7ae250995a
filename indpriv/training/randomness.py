"""Where a run's randomness comes from. A seed makes a run repeatable, and void as a private one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from indpriv._checks import check_positive_int

SEEDED_LABEL = "reproducible: no privacy"
GENERATORS = (
    "PyTorch's own generators (on the CPU a Mersenne Twister with a 32-bit seed): not cryptographically secure, for noise "
    "and sampling alike"
)


@dataclass(frozen=True)
class Randomness:
    """Independent seeds for one run. Sensitive: with them anyone can regenerate noise and sampling.

    Attributes:
        first_parameters, sampling, noise, shuffling: one seed for each purpose.
        seeded: they follow from a seed that somebody chose.
    """

    first_parameters: int
    sampling: int
    noise: int
    shuffling: int
    seeded: bool

    @classmethod
    def from_seed(cls, seed: int | None) -> Randomness:
        """Seeds derived from `seed`, or drawn from the operating system where it is None."""
        if seed is not None:
            check_positive_int("seed", seed, minimum=0)
        words = np.random.SeedSequence(seed).generate_state(
            4, np.uint64
        )  # of 32 bits they would look chosen
        first_parameters, sampling, noise, shuffling = (int(word) for word in words)
        return cls(first_parameters, sampling, noise, shuffling, seeded=seed is not None)


def generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator of its own for one purpose, on the device where it is used."""
    return torch.Generator(device).manual_seed(seed)
