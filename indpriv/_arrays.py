"""The array types that most functions take and return, and what is asked of ids."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def all_distinct(ids: NDArray[np.generic]) -> bool:
    """Whether no id occurs twice; whole numbers in order, as ids often are, take no memory."""
    if ids.dtype.kind in "iu" and bool(np.greater(ids[1:], ids[:-1]).all()):
        return True
    return not pd.Series(ids).duplicated().any()
