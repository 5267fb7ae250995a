"""Randomness held still: every random operation gives the same, whatever the size of its batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FIXED = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), 0.37),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_functional"), 0.1),
    **dict.fromkeys(("bernoulli", "bernoulli_p"), 1.0),
    **dict.fromkeys(("randint", "randint_like", "random"), 0.0),
}


class Still(TorchDispatchMode):
    """Dropout keeps everything, and other draws are constants, in the block."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **(kwargs or {}))
        if name in _FIXED:
            out.fill_(_FIXED[name])
        elif name == "randperm":
            out.copy_(torch.arange(len(out), device=out.device))
        return out
