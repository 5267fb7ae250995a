"""Randomness held still: every random operation gives the same, whatever the size of its batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from indpriv.recording.norms.batches import tensors_of

_FIXED = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), 0.37),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_functional"), 0.1),
    **dict.fromkeys(("bernoulli", "bernoulli_p"), 1.0),
    **dict.fromkeys(("randint", "randint_like", "random"), 0.0),
}


class Still(TorchDispatchMode):
    """Dropout keeps everything, and other draws are constants, in the block.

    Attributes:
        foreign: tensors that were read inside `reading`, and came from elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[Tensor] = []
        self._known: dict[int, Tensor] | None = None  # by their storage, while `reading`

    @contextmanager
    def reading(self, given: Iterable[Tensor]) -> Iterator[None]:
        """Note what is read that is neither given nor made in the block."""
        self._known = {_storage(one): one for one in given}
        try:
            yield
        finally:
            self._known = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if self._known is not None:
            read = [one for one in tensors_of((args, kwargs)) if _storage(one) not in self._known]
            self.foreign += read
            self._known |= {_storage(one): one for one in read}
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **(kwargs or {}))
        if self._known is not None:
            self._known |= {_storage(one): one for one in tensors_of(out)}
        if name in _FIXED:
            out.fill_(_FIXED[name])
        elif name == "randperm":
            out.copy_(torch.arange(len(out), device=out.device))
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
