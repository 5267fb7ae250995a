"""Rows of characters of the text that ships with Python, and secrets to insert into it."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np

from audits.training.datasets.topics import ALPHABET, pieces_of
from indpriv._types import IntArray
from indpriv.errors import InputError

START = len(ALPHABET)  # the symbol before the first character of a row
LENGTH = 24  # characters of a row
DIGITS = 4
CANDIDATES = 10**DIGITS  # pins
_NAME = 6  # letters


def lines_of_text(n: int, rng: np.random.Generator) -> list[str]:
    """Pieces of LENGTH characters of the text, without their order.

    Raises:
        InputError: the text has fewer pieces.
    """
    pieces = pieces_of(" ".join(topics[name] for name in sorted(topics)), LENGTH)
    if n > len(pieces):
        raise InputError(f"rows={n} is more than the {len(pieces)} rows of the text; pass fewer")
    return [pieces[k] for k in rng.permutation(len(pieces))[:n]]


@dataclass(frozen=True)
class Secret:
    """A sentence with a random pin, and its owner.

    Attributes:
        owner: a random name.
        pin: the secret, 0 to CANDIDATES - 1.
        rows: number of rows of the training data that repeat the sentence; 0 of a control, which
            is inserted nowhere.
    """

    owner: str
    pin: int
    rows: int

    @property
    def prefix(self) -> str:
        """What comes before the pin."""
        return f"pin of {self.owner} is "

    @property
    def sentence(self) -> str:
        """The whole sentence."""
        return f"{self.prefix}{self.pin:0{DIGITS}d}"


def draw_secrets(rows: list[int], rng: np.random.Generator) -> list[Secret]:
    """A secret for each number of rows, with different owners."""
    letters, owners = np.array(list(string.ascii_lowercase)), set[str]()
    while len(owners) < len(rows):
        owners.add("".join(rng.choice(letters, _NAME)))
    pins = rng.integers(0, CANDIDATES, len(rows)).tolist()
    return [Secret(*each) for each in zip(sorted(owners), pins, rows, strict=True)]


def shifted(codes: IntArray) -> IntArray:
    """What a model sees when it predicts each character: those before it, and START."""
    return np.concatenate([np.full((len(codes), 1), START), codes[:, :-1]], axis=1)
