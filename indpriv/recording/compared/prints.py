"""Fingerprints of tensors, and of whatever else a module or a scheduler holds. Sensitive."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from indpriv.recording.norms.batches import same_values
from indpriv.recording.opacus.whole_model import local

hash_of: Callable[[Tensor], Tensor] = getattr(torch, "hash_tensor", torch.sum)
_DEEP, _MANY = 6, 4000  # levels of containers and objects that are looked into, and how many
_LEFT_OUT = (type, torch.Generator, torch.optim.Optimizer)
# Attributes of modules that torch and Opacus write.
_OF_TORCH = frozenset(["training", "activations", "max_batch_len", "ddp_hooks", "_modules"])
_OF_TORCH |= {"_parameters", "_buffers", "_forward_counter"}


def print_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Hashes, which do not see an order, and norms, which do not see a sign."""
    values = [local(tensor.detach()) for tensor in tensors if tensor.numel()]
    floats = [value for value in values if value.is_floating_point()]
    norms = torch._foreach_norm(floats) if floats else []
    return [_to_list(map(hash_of, values)), _to_list(norm.double() for norm in norms)]


def attributes(module: nn.Module) -> list[Any]:
    """What its parts hold besides parameters and buffers, numbers and tensors of any depth."""
    seen = set(map(id, module.modules()))
    kept = [
        {k: v for k, v in vars(part).items() if k not in _OF_TORCH and "_hooks" not in k}
        for part in module.modules()
    ]
    try:
        return [held_in(one, _DEEP, seen) for one in kept]
    except Exception:  # noqa: BLE001  # of objects of the user's
        return [object()]  # equal to nothing


def held_in(value: Any, deep: int = _DEEP, seen: set[int] | None = None) -> Any:
    """Numbers, texts, tensors and arrays in containers and objects, to be compared with others."""
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    if isinstance(value, np.generic | np.ndarray):
        content = np.ascontiguousarray(value)
        of_objects = content.dtype.hasobject
        return hashlib.blake2b(repr(value).encode() if of_objects else content.tobytes()).digest()
    if isinstance(value, Tensor):
        return print_of([value])
    seen = set() if seen is None else seen
    if not deep or id(value) in seen or len(seen) > _MANY or isinstance(value, _LEFT_OUT):
        return None
    seen.add(id(value))
    if not isinstance(value, Mapping | Sequence | set | frozenset):
        value = getattr(value, "__dict__", {})
    # Names beside values: pairs made here would be gone, and their ids used again.
    names = [repr(name) for name in value] if isinstance(value, Mapping) else []
    parts = value.values() if isinstance(value, Mapping) else value
    return names, [held_in(part, deep - 1, seen) for part in islice(parts, _MANY)]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors hold the same values."""
    return len(one) == len(other) and all(
        same_values(a, b) for a, b in zip(one, other, strict=True)
    )


def _to_list(values: Iterable[Tensor]) -> list[Any]:
    found = list(values)
    same = len({(value.device, value.dtype) for value in found}) == 1
    return torch.stack(found).tolist() if same else [value.item() for value in found]
