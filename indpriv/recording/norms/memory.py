"""How many examples fit into memory at once, and smaller micro-batches if memory runs out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from indpriv.errors import InputError

Result = TypeVar("Result")

_MEMORY_SHARE = 0.25  # of the free memory: training, data loading and other programs need the rest
_UNKNOWN_MEMORY = 2**31  # bytes assumed to be free if the system does not report it
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "alloc_cpu")  # in PyTorch's messages


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate; on a CPU, caches count as free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_available_memory()]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_bytes().strip()) != b"max":
        limits.append(max(0, int(text) - int(used.read_bytes())))  # the limit of a container
    return min(limits)


def _available_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _UNKNOWN_MEMORY


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
    """Number of examples, at least one, that use at most a quarter of the free memory."""
    fitting = int(free_memory(device) * _MEMORY_SHARE) // max(1, bytes_per_example)
    return max(1, min(at_most, fitting))


def in_micro_batches(
    run: Callable[[int, int], Result], total: int, size: int
) -> tuple[list[Result], int]:
    """Call `run(start, stop)` on even micro-batches, halving them whenever memory runs out.

    Returns the results in order, and the largest size to try next time. Raises InputError if not
    even one example fits into memory.
    """
    results: list[Result] = []
    done = 0
    while done < total:
        n_batches = -(-(total - done) // size)
        stop = done + -(-(total - done) // n_batches)
        try:
            results.append(run(done, stop))
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            if stop - done == 1:
                raise InputError(
                    "there is not enough memory for the gradient norm of one example; "
                    "free some memory, or use a device with more"
                ) from error
            size = (stop - done) // 2
            continue
        done = stop
    return results, size


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch ran out of memory, on a GPU or in the machine."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in _OUT_OF_MEMORY
    )
