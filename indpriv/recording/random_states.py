"""Generators of noise and coins: left as they are, told where they can be guessed or draw the same again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# torch draws its own seeds from 53 bits or more; people, and libraries on their behalf, choose from 32.
_CHOSEN_SEEDS = 2**32
_DEFAULT_SEED = 67280421310721  # of an unseeded torch.Generator()


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave torch's random generators as they were, so that recording does not change training."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


def generator_of(given: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """The generator that torch draws from on a device: the one that is given, else the device's own; None if not known."""
    if given is not None or device.type not in ("cpu", "cuda"):
        return given
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


def is_guessable(generator: torch.Generator | None) -> bool:
    """Whether the seed of a generator looks chosen by a person, or is torch's default; torch seeds all devices alike."""
    seed = (torch.default_generator if generator is None else generator).initial_seed()
    return seed < _CHOSEN_SEEDS or seed == _DEFAULT_SEED


def fingerprint_of_state(state: bytes, run_id: str) -> str:
    """What a log may hold of a state, so that the sessions of one run can be compared: dear to guess a seed from."""
    return (
        hashlib.scrypt(state, salt=run_id.encode(), n=2**14, r=8, p=1, dklen=8).hex()
        if state
        else ""
    )


class SeenStates:
    """The states in which one generator has left its draws; about 100 bytes of memory each."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.first = b""  # empty until something is drawn

    def repeated(self, generator: torch.Generator | None) -> bool:
        """Whether the draw just made left a generator where an earlier one had: both drew the same numbers."""
        if generator is None:
            return False
        state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).digest()
        seen_before = state in self._seen
        self._seen.add(state)
        self.first = self.first or state
        return seen_before
