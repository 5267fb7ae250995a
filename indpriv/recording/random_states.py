"""Random generators: kept as they are, and checked for guessable seeds and repeated draws."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# torch draws its own seeds from 53 bits or more; people and libraries choose seeds of 32 bits.
_CHOSEN_SEEDS = 2**32
_DEFAULT_SEED = 67280421310721  # of an unseeded torch.Generator()


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the generators of torch, numpy and Python as they were, for training's sake."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()  # transforms may use them
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def generator_of(given: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """The given generator, else the one that torch uses on the device; None if not known."""
    if given is not None or device.type not in ("cpu", "cuda"):
        return given
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


def is_guessable(generator: torch.Generator | None) -> bool:
    """Whether a generator's seed seems to be chosen by a person, or is torch's default.

    torch seeds all devices with the same number, so None stands for the CPU's generator.
    """
    seed = (torch.default_generator if generator is None else generator).initial_seed()
    return seed < _CHOSEN_SEEDS or seed == _DEFAULT_SEED


def fingerprint_of_state(state: bytes, run_id: str) -> str:
    """A hash to compare the sessions of one run by; expensive to guess a seed from."""
    return (
        hashlib.scrypt(state, salt=run_id.encode(), n=2**14, r=8, p=1, dklen=8).hex()
        if state
        else ""
    )


class SeenStates:
    """The states in which draws have left one generator; about 100 bytes of memory each."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.first = b""  # empty until something is drawn

    def repeated(self, generator: torch.Generator | None) -> bool:
        """Whether the last draw left the generator in the same state as an earlier one.

        Both then drew the same numbers.
        """
        if generator is None:
            return False
        state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).digest()
        seen_before = state in self._seen
        self._seen.add(state)
        self.first = self.first or state
        return seen_before
