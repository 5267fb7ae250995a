"""What fits into memory, and what is fastest: choices that change the cost of norms, and never the norms."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

_MEMORY_SHARE = 0.25  # of what is free: training, its loader and other programs need the rest
_UNKNOWN_MEMORY = 2**31  # bytes taken as free where the system does not say
_SMALLEST = 16  # examples: the first size tried; below it the overhead of calls rules
_LONG_ENOUGH = 0.25  # seconds a batch: calls cost nothing beside the work, and larger ones only leave the cache
_ROUNDS = 3  # of each way to compute: the best tells its speed, the others what else the machine had to do
_BEHIND = 3  # times the seconds: no slow spell is to be blamed
_LONG = 0.05  # seconds of a run: what follows its first is as good as any other


def free_memory(device: torch.device) -> int:
    """Bytes that this process may take: free on a GPU, available (caches count as free) in the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_available_memory()]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if (
        limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max"
    ):  # of a container
        limits.append(max(0, int(text) - int(used.read_text())))
    return min(limits)


def _available_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _UNKNOWN_MEMORY


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of the better of two runs after a first one, or of a single one where it is long."""
    _seconds(run, device)
    seconds = _seconds(run, device)
    return seconds if seconds > _LONG else min(seconds, _seconds(run, device))


def fastest(
    ways: Sequence[Callable[[], object]], device: torch.device, *, margin: float = 0.0
) -> int:
    """The index of the fastest of several ways to compute the same, by their best runs; the first ones do not count.

    They run in turn, so that a slow spell of the machine meets them all. A way that is far behind is not run again.

    Args:
        ways: what to run.
        device: where they compute.
        margin: share of its time by which the first may be slower than another one.
    """
    for way in ways:
        _seconds(way, device)
    best = dict.fromkeys(range(len(ways)), math.inf)
    for done in range(1, 1 + _ROUNDS):
        best = {i: min(before, _seconds(ways[i], device)) for i, before in best.items()}
        lead = min(best.values())
        best = {i: seconds for i, seconds in best.items() if seconds <= _BEHIND * lead}
        if len(best) == 1 or (done > 1 and lead > _LONG):
            break
    return min(best, key=lambda i: best[i] / (1.0 if i else 1.0 + margin))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """On one core this thread's own time: the work of others does not count."""
    one_core = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if one_core else time.perf_counter
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward pass, parameters included."""
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        forward()
    return sum(kept.values())


def largest_that_fits(bytes_per_example: int, device: torch.device, *, at_most: int) -> int:
    """Examples, at least one, that take no more than a quarter of the free memory."""
    return max(
        1, min(at_most, int(free_memory(device) * _MEMORY_SHARE) // max(1, bytes_per_example))
    )


def fastest_size(seconds_of: Callable[[int], float], largest: int) -> tuple[int, float]:
    """Double the size for as long as that lowers the seconds per example, once by chance excepted where a batch is short.

    Args:
        seconds_of: seconds of a batch of a size.
        largest: size not to go beyond.

    Returns:
        the fastest size, and its seconds per example.
    """
    size = min(_SMALLEST, largest)
    seconds = seconds_of(size)
    best = size, seconds / size
    worse = 0
    while size < largest and seconds < _LONG_ENOUGH and worse < (2 if seconds < _LONG else 1):
        size = min(2 * size, largest)
        seconds = seconds_of(size)
        if seconds / size < best[1]:
            best, worse = (size, seconds / size), 0
        else:
            worse += 1
    return best


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch failed for want of memory, on a GPU or in the machine."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
