"""Randomness held still: every random operation gives the same, whatever the size of its batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from indpriv.recording.norms.batches import tensors_of

_UNIFORM = frozenset(["rand", "rand_like", "uniform"])
_BETWEEN = frozenset(["randint", "randint_like", "random"])  # whole numbers
_CHANCE = frozenset(["bernoulli", "bernoulli_p"])
_REAL = frozenset(["randn", "randn_like", "normal", "normal_functional", "exponential"])
_REAL |= {"log_normal", "geometric", "cauchy"}
_MEANS = frozenset(["poisson", "_standard_gamma", "_sample_dirichlet"])  # of their argument
_LARGE = 1 << 24
_SELDOM = 0.05, 0.2  # places at which what has a chance, such as to be kept, does not happen


class Still(TorchDispatchMode):
    """Dropout keeps everything, and other draws are constants, in the block.

    place: from 0 to 1, where constants lie in what may be drawn; a permutation reverses the order.

    Attributes:
        foreign: tensors that were read inside `reading`, and came from elsewhere.
    """

    def __init__(self, place: float = 0.37) -> None:
        super().__init__()
        self._place = place
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
        numbers = [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]
        if name in _UNIFORM:
            least, most = numbers[:2] if len(numbers) > 1 else (0.0, 1.0)
            out.fill_(least + self._place * (most - least))
        elif name in _BETWEEN:
            least, most = numbers[:2] if len(numbers) > 1 else [0, *numbers, _LARGE][:2]
            out.fill_(int(least + self._place * (most - least)))
        elif name in _CHANCE:
            out.fill_(float(not _SELDOM[0] < self._place < _SELDOM[1]))
        elif name in _REAL:
            out.fill_(0.1 + self._place)
        elif name in _MEANS:
            out.copy_(args[0])
        elif name == "multinomial":
            out.zero_()
        elif name == "randperm":
            out.copy_(torch.arange(len(out), device=out.device).flip(0))
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
