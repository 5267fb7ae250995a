"""UCI Adult: 48,842 people of the 1994 US census. Is the income above 50,000 dollars a year?

It ships with the demo, which reads and encodes it (indpriv/demo/adult.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from audits.training.datasets.base import Dataset, OneHot, Split, in_bands
from indpriv.demo.adult import AGE_BANDS, CATEGORIES, CLASS_NAMES, NUMBERS, encode, read_frame

METADATA_COLUMNS = ("race", "sex", "age_band")
HOUSEHOLD_COLUMN = "synthetic_household"
_MOST_IN_HOUSEHOLD, _HOUSEHOLD_SEED = 6, 1994  # any seed will do: the households are made up


def attributes() -> dict[str, OneHot]:
    """Where `encode` puts each of the categories."""
    found, first = {}, len(NUMBERS)
    for name, listed in CATEGORIES.items():
        found[name] = OneHot(first, tuple(listed))
        first += len(found[name].values)
    return found


def load() -> Dataset:
    """Adult, with race, sex and age_band as metadata (see `load_dataset`)."""
    frame = read_frame()
    splits = {}
    for name in ("train", "test"):
        rows = frame[frame["split"] == name].reset_index(drop=True)
        metadata = rows[["race", "sex"]].assign(age_band=in_bands(rows["age"], AGE_BANDS))
        targets = (rows["income"] == CLASS_NAMES[1]).to_numpy().astype(np.int64)
        splits[name] = Split(encode(rows), targets, metadata)
    return Dataset(
        name="adult",
        train=splits["train"],
        test=splits["test"],
        class_names=CLASS_NAMES,
        preprocessing="numbers scaled by fixed ranges, categories one-hot over UCI's lists; "
        "nothing fitted on the data",
        source="UCI Adult (Becker and Kohavi 1996), CC BY 4.0",
        attributes=attributes(),
    )


def load_households() -> Dataset:
    """Adult with made-up households of one to six people, for audits of units of several rows.

    UCI's file does not say who lives together: consecutive rows share a household of random size.
    """
    adult = load()
    sizes = np.random.default_rng(_HOUSEHOLD_SEED).integers(
        1, _MOST_IN_HOUSEHOLD + 1, len(adult.train)
    )
    household = np.repeat(np.arange(len(sizes)), sizes)[: len(adult.train)]
    columns = pd.DataFrame(adult.train.metadata).assign(**{HOUSEHOLD_COLUMN: household})
    return replace(
        adult,
        name="adult_households",
        train=replace(adult.train, metadata=columns),
        source=f"{adult.source}; its households are synthetic: consecutive rows in groups of 1 to "
        f"{_MOST_IN_HOUSEHOLD}",
        on_trust={
            "households": "synthetic, drawn at random: the data does not say who lives together"
        },
    )
