"""The array types that most functions take and return, and what is asked of ids."""

from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class Ids(Protocol):
    """(n,) ids: an array, or a column of a file, of which indices and slices read what they need.

    `np.asarray` reads all of them.
    """

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...

    def __array__(self) -> NDArray[Any]: ...


def all_distinct(ids: NDArray[np.generic]) -> bool:
    """Whether no id occurs twice; whole numbers in order, as ids often are, take no memory."""
    if ids.dtype.kind in "iu" and bool(np.greater(ids[1:], ids[:-1]).all()):
        return True
    return not pd.Series(ids).duplicated().any()
