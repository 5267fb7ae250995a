"""Types that most functions take and return: arrays, choices, and how work reports progress."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike as ArrayLike
from numpy.typing import NDArray as NDArray
from pydantic_core import core_schema

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# Called as progress(done, total): units of work finished, and in all.
Progress = Callable[[int, int], None]
# Called as progress(stage, done, total), where the work has several stages.
StageProgress = Callable[[str, int, int], None]


class OneOf:
    """The only texts that a value can be."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def __get_pydantic_core_schema__(self, _kind: Any, _: Any) -> Any:
        return core_schema.literal_schema([*self.texts])


def silent(_stage: str, _done: int, _total: int) -> None:
    """Report nothing."""
