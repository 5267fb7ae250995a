"""Projections of nn.MultiheadAttention, which calls the global `linear`: hooks do not see them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

OnProjection = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(output, inputs, weight, bias) of a projection -> the output to go on with."""


class _Projections(threading.local):
    """Replaces the global `linear` while any thread needs that.

    PyTorch's fast path, which computes a whole attention in one call, is off meanwhile.
    """

    on_projection: OnProjection | None = None  # of this thread
    _lock = threading.Lock()
    _threads = 0
    _before: tuple[Callable[..., Tensor], bool] | None = None

    @classmethod
    def count(cls, change: int) -> None:
        """Count threads; the first one replaces `linear`, the last one restores it."""
        with cls._lock:
            if not cls._threads:
                cls._before = nn.functional.linear, torch.backends.mha.get_fastpath_enabled()
                nn.functional.linear = partial(_observed, cls._before[0])
                torch.backends.mha.set_fastpath_enabled(False)
            cls._threads += change
            if not cls._threads and cls._before is not None:
                nn.functional.linear, fast = cls._before
                torch.backends.mha.set_fastpath_enabled(fast)


_projections = _Projections()


@contextmanager
def observed_projections(on_projection: OnProjection) -> Iterator[None]:
    """Pass the output of every `linear` in this thread through a function."""
    outer = _projections.on_projection
    _projections.count(+1)
    _projections.on_projection = on_projection
    try:
        yield
    finally:
        _projections.on_projection = outer
        _projections.count(-1)


def _observed(
    linear: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`linear`, with its arguments named as in PyTorch."""
    output = linear(input, weight, bias)
    observe = _projections.on_projection
    return output if observe is None else observe(output, input, weight, bias)
