"""Types that most functions take and return: arrays, choices, and how work reports progress."""

import threading
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
# Called as advance(more): examples done since the last call; one that is half done counts 0.5.
Advance = Callable[[float], None]


class OneOf:
    """The only texts that a value can be."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def __get_pydantic_core_schema__(self, _kind: Any, _: Any) -> Any:
        return core_schema.literal_schema([*self.texts])


def silent(_stage: str, _done: int, _total: int) -> None:
    """Report nothing."""


def advancing(total: int, progress: Progress | None) -> Advance:
    """A function that counts the examples done, on any thread, and reports how many there are."""
    done, lock = 0.0, threading.Lock()

    def advance(more: float) -> None:
        nonlocal done
        with lock:
            done += more
            if progress is not None:
                progress(min(round(done), total), total)

    return advance
