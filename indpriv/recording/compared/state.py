"""What is published between steps: fingerprints of it, and the update repeated. Sensitive."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from indpriv._facts import text
from indpriv.recording.compared.findings import UNKNOWN, Findings
from indpriv.recording.compared.outputs import relative
from indpriv.recording.opacus.ranks import local
from indpriv.recording.random_states import kept_random_state, random_state, set_random_state

hash_of: Callable[[Tensor], Tensor] = getattr(torch, "hash_tensor", torch.sum)
_DEEP, _MANY = 6, 4000  # levels of containers and objects that are looked into, and how many
_LEFT_OUT = (type, torch.Generator, torch.optim.Optimizer)
# Attributes of modules that torch and Opacus write.
_OF_TORCH = frozenset(["training", "activations", "max_batch_len", "ddp_hooks", "_modules"])
_OF_TORCH |= {"_parameters", "_buffers", "_forward_counter"}
_SAME_STEP = 1e-6


class PublishedState:
    """Parameters, buffers, extra state and the optimizer's state, as they were seen last."""

    def __init__(self, module: nn.Module, inner: Any, findings: Findings) -> None:
        self._module, self._inner, self._findings = module, inner, findings
        self._last: tuple[Any, ...] | None = None
        self._copy: Any = None  # of the inner optimizer, to repeat the step
        self._random: Any = None  # state when it was made

    def keep(self, *, known: bool = True) -> None:
        """What follows is compared with the state as it is now; with nothing, unless known."""
        self._last = None  # also where the print fails
        self._last = self._print() if known else None

    def compare(self, when: str, *, but_buffers: bool = False) -> bool:
        """Whether it is what it was; False too if that is not known."""
        last, self._last = self._last, self._print()
        if last is None:
            return False
        end = -1 if but_buffers else None  # a forward pass may write what is published, too
        same = bool(last[but_buffers:end] == self._last[but_buffers:end])
        detail = text("check.state", "changed", when=when)
        self._findings.compare("state", same, detail, UNKNOWN)
        return same

    @torch.no_grad()
    def _print(self) -> tuple[Any, ...]:
        """Fingerprints of buffers, parameters, the optimizer's state and extra state."""
        module = self._module
        leaves = torch.utils._pytree.tree_leaves([dict(one) for one in self._inner.state.values()])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        prints = [print_of(part) for part in (module.buffers(), module.parameters(), tensors)]
        plain = repr([leaf for leaf in leaves if not isinstance(leaf, Tensor)])
        # What else a state dict publishes.
        more = [
            held_in(part.get_extra_state())
            for part in module.modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        ]
        return *prints, plain, more

    def copy_optimizer(self) -> None:
        """Prepare to repeat the coming step from its gradient."""
        self._copy, self._random = copy.deepcopy(self._inner), random_state()
        for mine, theirs in self._pairs():
            mine.grad = None if theirs.grad is None else theirs.grad.detach().clone()

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        groups = zip(self._copy.param_groups, self._inner.param_groups, strict=True)
        return (pair for a, b in groups for pair in zip(a["params"], b["params"], strict=True))

    @property
    def is_copied(self) -> bool:
        """Whether the step that was made is to be repeated."""
        return self._copy is not None

    def repeat_step(self) -> None:
        """Compare what the copy makes of the gradient with what training made."""
        try:
            with kept_random_state():
                set_random_state(self._random)
                step = type(self._copy).step
                getattr(step, "__wrapped__", step)(self._copy)  # without hooks
            pairs = [tuple(map(local, pair)) for pair in self._pairs()]
        finally:
            self._copy = None
        off = max(max(relative(a, b), relative(b, a)) for a, b in pairs)
        of_torch = f"{type(self._inner).__module__}.".startswith("torch.optim.")
        detail = text("check.step", "other" if of_torch else "library")
        self._findings.compare("step", of_torch and off <= _SAME_STEP, detail, UNKNOWN)


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


def _to_list(values: Iterable[Tensor]) -> list[Any]:
    found = list(values)
    same = len({(value.device, value.dtype) for value in found}) == 1
    return torch.stack(found).tolist() if same else [value.item() for value in found]
