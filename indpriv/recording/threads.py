"""Work of several threads at the same time, each with its share of the cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run each task in a thread of its own, one task alone in this one.

    PyTorch's own threads meet after every operation, and wait for each other; whole tasks need not.
    While they run, `torch.set_num_threads` is set to each task's share of the threads, in the whole
    process.

    Returns:
        their results, in order; the first error is raised once all have ended.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    threads = torch.get_num_threads()
    share = max(1, threads // len(tasks))
    torch.set_num_threads(share)
    try:
        with ThreadPoolExecutor(
            len(tasks), initializer=torch.set_num_threads, initargs=(share,)
        ) as pool:
            return [future.result() for future in [pool.submit(task) for task in tasks]]
    finally:
        torch.set_num_threads(threads)
