"""How a long computation reports its progress."""

from collections.abc import Callable

# Called as progress(done, total): units of work finished, and in all.
Progress = Callable[[int, int], None]
# Called as progress(stage, done, total), where the work has several stages.
StageProgress = Callable[[str, int, int], None]


def silent(_stage: str, _done: int, _total: int) -> None:
    """Report nothing."""
