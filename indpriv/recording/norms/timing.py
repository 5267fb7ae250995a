"""Timing of variants that compute the same norms: a choice changes the cost, never the norms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

_SMALLEST = 16  # examples: the first batch size tried; with fewer, the overhead of calls dominates
_LONG_BATCH = 0.25  # seconds: call overhead is negligible; larger batches only leave the cache
_ROUNDS = 3  # runs of each variant; the fastest counts, the others were slowed by other programs
_FAR_BEHIND = 3  # times the best: too slow for other programs to be the reason
_LONG_RUN = 0.05  # seconds: one such run after a first one is precise enough
_VERY_LONG_RUN = 0.2  # seconds: what slows a whole run so long would slow another as well


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the better of two runs after a warm-up; of the first one alone if it is long."""
    _seconds(run, device)
    seconds = _seconds(run, device)
    return seconds if seconds > _LONG_RUN else min(seconds, _seconds(run, device))


def fastest(
    variants: Sequence[Callable[[], object]], device: torch.device, *, margin: float = 0.0
) -> int:
    """Index of the fastest variant by its best run, after one warm-up run each.

    Variants run in turn, so that a slow spell of the machine affects all of them; one that is far
    behind is not run again. The first may be slower by a share `margin` and still win.
    """
    for variant in variants:
        _seconds(variant, device)
    best = dict.fromkeys(range(len(variants)), math.inf)
    for done in range(1, 1 + _ROUNDS):
        best = {i: min(before, _seconds(variants[i], device)) for i, before in best.items()}
        lead = min(best.values())
        best = {i: seconds for i, seconds in best.items() if seconds <= _FAR_BEHIND * lead}
        if len(best) == 1 or lead > (_LONG_RUN if done > 1 else _VERY_LONG_RUN):
            break
    return min(best, key=lambda i: best[i] / (1.0 if i else 1.0 + margin))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a run; on one core the time of this thread alone, without other programs."""
    one_core = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if one_core else time.perf_counter
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def fastest_size(seconds_of: Callable[[int], float], largest: int) -> tuple[int, float]:
    """The fastest batch size, and its seconds per example, from the seconds of a batch.

    Sizes are doubled for as long as that lowers the seconds per example; one failure to do so is
    ignored as chance if a batch takes little time.
    """
    size = min(_SMALLEST, largest)
    seconds = seconds_of(size)
    best = size, seconds / size
    failures = 0
    while size < largest and seconds < _LONG_BATCH and failures < (2 if seconds < _LONG_RUN else 1):
        size = min(2 * size, largest)
        seconds = seconds_of(size)
        if seconds / size < best[1]:
            best, failures = (size, seconds / size), 0
        else:
            failures += 1
    return best
