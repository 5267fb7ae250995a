"""UCI Adult: 48,842 people of the 1994 US census. Is the income above 50,000 dollars a year?

Every range and list in adult.toml is public (the census questionnaire, UCI's adult.names) or a
round number. None is computed from the rows, so preprocessing does not belong in the account.
"""

import hashlib
import io
import tomllib
from importlib.resources import files

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from indpriv.errors import EvidenceError

SHA256 = "b2fe6180aecef86ffdad7e819dc18796210b607ebbdb19c9e6efd0a88b11db13"
KNOWN = tomllib.loads(files("indpriv").joinpath("demo/adult.toml").read_text(encoding="utf-8"))
CLASS_NAMES = tuple(KNOWN["class_names"])
NUMBERS, CATEGORIES = KNOWN["numbers"], KNOWN["categories"]
AGE_BANDS = dict(KNOWN["age_bands"])


def read_frame() -> pd.DataFrame:
    """The shipped table: 48,842 rows of UCI's 15 columns and `split`."""
    content = files("indpriv").joinpath("demo/adult.parquet").read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise EvidenceError("adult.parquet is not the file that was shipped; install indpriv again")
    frame: pd.DataFrame = pq.read_table(io.BytesIO(content)).to_pandas()
    return frame


def encode(frame: pd.DataFrame) -> NDArray[np.float32]:
    """The inputs of rows, (n, 107) in [-1, 1]: scaled `NUMBERS`, then one-hot `CATEGORIES`.

    Raises EvidenceError for a category that is not on its public list.
    """
    columns = [((frame[name] - zero) / one).clip(-1, 1) for name, (zero, one) in NUMBERS.items()]
    for name, values in CATEGORIES.items():
        if unknown := set(frame[name]) - set(values):
            raise EvidenceError(f"Adult has {name}={min(unknown)!r}, which is not on UCI's list")
        columns += [frame[name] == value for value in values]
    return np.stack(columns, axis=1).astype(np.float32)
