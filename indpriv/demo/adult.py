"""UCI Adult: 48,842 people of the 1994 US census. Is the income above 50,000 dollars a year?

Every range and list below is public (the census questionnaire, UCI's adult.names) or a round number
written here. None is computed from the rows, so preprocessing does not belong in the account.
"""

from __future__ import annotations

import hashlib
import io
from importlib.resources import files

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from indpriv.errors import EvidenceError

SHA256 = "b2fe6180aecef86ffdad7e819dc18796210b607ebbdb19c9e6efd0a88b11db13"
CLASS_NAMES = ("<=50K", ">50K")

# column: (value that becomes 0, distance from it that becomes 1); results are clipped to [-1, 1].
NUMBERS = {
    "age": (50.0, 50.0),  # years
    "education_num": (8.5, 7.5),  # codes 1 (preschool) to 16 (doctorate)
    "capital_gain": (0.0, 20_000.0),  # dollars; larger gains count as 20,000
    "capital_loss": (0.0, 5_000.0),  # dollars
    "hours_per_week": (50.0, 50.0),
}
# UCI's own lists, in the order of adult.names; "?" is an unknown answer. The column fnlwgt is left
# out: a survey weight is not an attribute of a person.
CATEGORIES = {
    "workclass": "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, "
    "Without-pay, Never-worked, ?",
    "education": "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, "
    "7th-8th, 12th, Masters, 1st-4th, 10th, Doctorate, 5th-6th, Preschool",
    "marital_status": "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, "
    "Married-spouse-absent, Married-AF-spouse",
    "occupation": "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, "
    "Prof-specialty, Handlers-cleaners, Machine-op-inspct, Adm-clerical, Farming-fishing, "
    "Transport-moving, Priv-house-serv, Protective-serv, Armed-Forces, ?",
    "relationship": "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    "race": "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    "sex": "Female, Male",
    "native_country": "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, "
    "Outlying-US(Guam-USVI-etc), India, Japan, Greece, South, China, Cuba, Iran, Honduras, "
    "Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, Ireland, France, "
    "Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, "
    "Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, "
    "Holand-Netherlands, ?",
}
# age_band: the first year of each band. The census asked people aged 17 and above.
AGE_BANDS = {17: "17-24", 25: "25-34", 35: "35-44", 45: "45-54", 55: "55-64", 65: "65+"}


def read_frame() -> pd.DataFrame:
    """The shipped table: 48,842 rows of UCI's 15 columns and `split`."""
    content = files("indpriv").joinpath("demo/adult.parquet").read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise EvidenceError(
            "indpriv/demo/adult.parquet is not the file that was shipped; install indpriv again"
        )
    frame: pd.DataFrame = pq.read_table(io.BytesIO(content)).to_pandas()
    return frame


def encode(frame: pd.DataFrame) -> NDArray[np.float32]:
    """The inputs of rows, (n, 107) in [-1, 1]: scaled `NUMBERS`, then one-hot `CATEGORIES`.

    Raises EvidenceError for a category that is not on its public list.
    """
    columns = [((frame[name] - zero) / one).clip(-1, 1) for name, (zero, one) in NUMBERS.items()]
    for name, listed in CATEGORIES.items():
        values = listed.split(", ")
        if unknown := set(frame[name]) - set(values):
            raise EvidenceError(f"Adult has {name}={min(unknown)!r}, which is not on UCI's list")
        columns += [frame[name] == value for value in values]
    return np.stack(columns, axis=1).astype(np.float32)
