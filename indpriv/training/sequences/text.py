"""A text that ships with Python, and secrets to insert into it, as rows of characters."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np

from indpriv._arrays import IntArray
from indpriv.errors import InputError

SOURCE = (
    "the topics of Python's language reference (module pydoc_data of the installed Python; "
    "Python Software Foundation License 2)"
)
ALPHABET = " " + string.ascii_lowercase + string.digits + ".,"
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


def pieces_of(text: str, length: int) -> list[str]:
    """A text in the characters of ALPHABET, cut into pieces of one length; its end is left out."""
    plain = "".join(c if c in ALPHABET or c.isspace() else " " for c in text.lower())
    text = re.sub(r"\s+", " ", plain)
    return [text[k : k + length] for k in range(0, len(text) - length + 1, length)]


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


def encode(lines: list[str], length: int = LENGTH) -> IntArray:
    """(n, length) numbers of characters; short lines end in spaces."""
    codes = {character: number for number, character in enumerate(ALPHABET)}
    return np.array([[codes[c] for c in line.ljust(length)] for line in lines], dtype=np.int64)


def shifted(codes: IntArray) -> IntArray:
    """What a model sees when it predicts each character: those before it, and START."""
    return np.concatenate([np.full((len(codes), 1), START), codes[:, :-1]], axis=1)
