"""A text that ships with Python: each row is a piece of it, to be continued by one character."""

from __future__ import annotations

import re
import string
from pydoc_data.topics import topics

import numpy as np
import pandas as pd

from audits.training.datasets.base import Dataset, Split
from indpriv._types import IntArray
from indpriv.errors import InputError

SOURCE = (
    "the topics of Python's language reference (module pydoc_data of the installed Python; "
    "Python Software Foundation License 2)"
)
ALPHABET = " " + string.ascii_lowercase + string.digits + ".,"
CONTEXT = 32  # characters of a row, before the one that continues it
N_TRAIN, _N_TEST = 4_000, 1_000
METADATA_COLUMNS = ("topic", "next")


def load() -> Dataset:
    """5,000 rows of 32 characters and the next one; inputs (n, 32) are numbers of characters."""
    pieces = [(name, p) for name in sorted(topics) for p in pieces_of(topics[name], CONTEXT + 1)]
    if len(pieces) < N_TRAIN + _N_TEST:
        raise InputError(
            f"the topics of this Python give {len(pieces):,} rows, {N_TRAIN + _N_TEST:,} are "
            "needed; use CPython 3.11 or later, with its module pydoc_data"
        )
    pieces = pieces[: N_TRAIN + _N_TEST]
    codes = encode([piece for _, piece in pieces], CONTEXT + 1)
    inputs, targets = codes[:, :-1].astype(np.float32), codes[:, -1]
    metadata = pd.DataFrame(
        {"topic": [name for name, _ in pieces], "next": [_kind(p[-1]) for _, p in pieces]}
    )
    is_test = np.arange(len(pieces)) % 5 == 4
    whole = Split(inputs, targets, metadata)
    return Dataset(
        name="topics",
        train=whole.take(~is_test),
        test=whole.take(is_test),
        class_names=tuple("space" if c == " " else c for c in ALPHABET),
        preprocessing="lower case, other characters as spaces; every fifth row is in the test "
        "split",
        source=SOURCE,
    )


def _kind(character: str) -> str:
    kinds = {" ": "space", ".": "punctuation", ",": "punctuation"}
    return kinds.get(character, "digit" if character.isdigit() else "letter")


def pieces_of(text: str, length: int) -> list[str]:
    """A text in the characters of ALPHABET, cut into pieces of one length; its end is left out."""
    plain = "".join(c if c in ALPHABET or c.isspace() else " " for c in text.lower())
    text = re.sub(r"\s+", " ", plain)
    return [text[k : k + length] for k in range(0, len(text) - length + 1, length)]


def encode(lines: list[str], length: int) -> IntArray:
    """(n, length) numbers of characters; short lines end in spaces."""
    codes = {character: number for number, character in enumerate(ALPHABET)}
    return np.array([[codes[c] for c in line.ljust(length)] for line in lines], dtype=np.int64)
