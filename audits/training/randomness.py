"""A run's random numbers. A seed makes a run reproducible, and then it has no privacy."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from indpriv._checks import check_positive_int
from indpriv.recording.random_states import private_generator

SEEDED_LABEL = "reproducible: no privacy"
GENERATORS = (
    "PyTorch's own generators (on the CPU a Mersenne Twister with a 32-bit seed), which are not "
    "cryptographically secure"
)


@dataclass(frozen=True)
class Randomness:
    """Independent seeds of one run. Sensitive: they allow regenerating noise and sampling.

    Attributes:
        first_parameters, sampling, noise, shuffling, canaries, clipping_norm, labels: one seed for
            each purpose.
        seeded: whether they follow from a seed that was chosen.
    """

    first_parameters: int
    sampling: int
    noise: int
    shuffling: int
    canaries: int
    clipping_norm: int
    labels: int
    seeded: bool

    @classmethod
    def from_seed(cls, seed: int | None) -> Randomness:
        """Seeds derived from `seed`, or drawn from the operating system if it is None."""
        if seed is not None:
            check_positive_int("seed", seed, minimum=0)
        # 64 bits each: the Recorder takes a seed of at most 32 bits for one that was chosen.
        words = np.random.SeedSequence(seed).generate_state(7, np.uint64)
        names = (field.name for field in fields(cls) if field.name != "seeded")
        seeds = {name: int(word) for name, word in zip(names, words, strict=True)}
        return cls(**seeds, seeded=seed is not None)


def generator(
    seed: int, device: str | torch.device = "cpu", *, private: bool = False
) -> torch.Generator:
    """A separate generator for one purpose, on the device that uses it; private: without seed."""
    return private_generator(device) if private else torch.Generator(device).manual_seed(seed)
