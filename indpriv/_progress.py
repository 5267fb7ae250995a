"""How a long computation reports its progress."""

import threading
from collections.abc import Callable

# Called as progress(done, total): units of work finished, and in all.
Progress = Callable[[int, int], None]
# Called as progress(stage, done, total), where the work has several stages.
StageProgress = Callable[[str, int, int], None]
# Called as advance(more): examples done since the last call; one that is half done counts 0.5.
Advance = Callable[[float], None]


def silent(_stage: str, _done: int, _total: int) -> None:
    """Report nothing."""


def unheard(_more: float) -> None:
    """Report nothing."""


class Examples:
    """Counts examples that are done, on any thread, and reports them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0.0, total, progress
        self._lock = threading.Lock()

    def advance(self, more: float) -> None:
        """Report that more examples are done."""
        with self._lock:
            self._done += more
            if self._progress is not None:
                self._progress(min(round(self._done), self._total), self._total)
