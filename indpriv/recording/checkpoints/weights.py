"""From the content of a checkpoint to the parameters of a model. Sensitive."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import Content, tensors_in

LoadFn = Callable[[Any], Mapping[str, Tensor]]
"""`load(state)` -> state_dict, for unusual layouts; state is the object saved in the file."""

# Where trainers store the parameters: indpriv and most scripts, Opacus, Lightning, others.
_PLACES = (
    "model_state_dict",
    "module_state_dict",
    "state_dict",
    "model",
    "net",
    "module",
    "weights",
    "params",
)
_SHOWN = 5


def state_of(content: Content, load: LoadFn | None = None) -> dict[str, Tensor]:
    """The state_dict inside a checkpoint; InputError if there is none.

    The user's function `load` finds it; without one, it is looked for in the usual places.
    """
    values = content.values
    if load is not None:
        try:
            state = load(values)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise InputError(
                f"{content.path}: the spec's load failed on it: {type(error).__name__}: {error}; "
                f"load is called with the saved object ({_describe(values)}) and must return a "
                "state_dict"
            ) from error
        found = dict(tensors_in(state)) if isinstance(state, Mapping) else {}
    else:
        found = _usual_place(values)
    if not found:
        raise InputError(
            f"{content.path} has no state_dict in a usual place ({_describe(values)}); "
            "pass AuditSpec(load=lambda state: state[...]), which returns it"
        )
    return found


def _usual_place(values: Any) -> dict[str, Tensor]:
    if not isinstance(values, Mapping):
        return {}
    for name in _PLACES:
        if isinstance(values.get(name), Mapping):
            inner = dict(tensors_in(values[name]))
            if inner:
                return inner
    found = dict(tensors_in(values))
    return found if len(found) == len(values) else {}


def _describe(values: Any) -> str:
    if not isinstance(values, Mapping):
        return f"a {type(values).__name__}"
    if not values:
        return "an empty dict"
    names = [str(name)[:40] for name in values]
    return f"a dict of {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"


def fit(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Match a saved state to a model: prefixes of wrappers are removed, tied parameters filled in.

    Wrappers put a prefix before every name (Opacus `_module.`, DataParallel `module.`,
    torch.compile `_orig_mod.`, a LightningModule the name of an attribute), which is found by
    comparison. Tensors outside that prefix are ignored; under it, names, shapes and types must
    match exactly, otherwise InputError lists the differences.
    """
    wanted = model.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        tied.setdefault(id(tensor), []).append(name)
    prefix = _prefix(state, wanted, tied)
    inner = {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }
    for names in tied.values():  # safetensors stores a tensor under one of its names only
        present = next((name for name in names if name in inner), None)
        if present is not None:
            inner.update({name: inner[present] for name in names if name not in inner})
    differences = _differences(inner, wanted)
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise InputError(
            "its parameters are not those of the spec's model: "
            f"{'; '.join(differences[:_SHOWN])}{more}. Build the model that was trained, or remove "
            "this checkpoint"
        )
    return inner


def _prefix(
    state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tied: Mapping[int, list[str]]
) -> str:
    """The prefix of all of the model's names; if there is none, that of most of them."""
    if all(name in state for name in wanted):
        return ""
    groups = list(tied.values())
    whole = [
        prefix
        for prefix in _prefixes(state, groups[0] if groups else ())
        if all(any(prefix + name in state for name in names) for names in groups)
    ]
    if len(whole) > 1:
        raise InputError(
            f"it contains several models (prefixes {', '.join(map(repr, sorted(whole)))}); "
            "choose one with AuditSpec(load=...)"
        )
    candidates = whole or sorted({"", *_prefixes(state, wanted)})
    return max(candidates, key=lambda prefix: sum(prefix + own in state for own in wanted))


def _prefixes(names: Iterable[str], owns: Iterable[str]) -> set[str]:
    """What precedes any of the model's own names in the names of a file."""
    owns = set(owns)
    return {
        name[: -len(own)]
        for name in names
        for own in owns
        if name == own or name.endswith(f".{own}")
    }


def _differences(inner: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    present = [(name, inner[name], tensor) for name, tensor in wanted.items() if name in inner]
    pairs: list[tuple[str, object, object]] = [
        (name, tuple(theirs.shape), tuple(ours.shape)) for name, theirs, ours in present
    ]
    pairs += [(name, theirs.dtype, ours.dtype) for name, theirs, ours in present]
    differences = [
        f"{name} is {theirs} in the file and {ours} in the model"
        for name, theirs, ours in pairs
        if theirs != ours
    ]
    missing = [f"{name} is missing from the file" for name in wanted if name not in inner]
    unknown = [f"{name} is unknown to the model" for name in inner if name not in wanted]
    return differences + missing + unknown


def load_into(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a matched state into a model; InputError, before any change, if one is not finite."""
    for name, tensor in state.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not torch.isfinite(tensor).all():
            raise InputError(
                f"its {name} has NaN or infinite values: training had diverged, or the file is "
                "damaged; remove this checkpoint"
            )
    model.load_state_dict(dict(state))


def fingerprint_of(state: Mapping[str, Tensor]) -> str:
    """Hash of the names, shapes, types and values of a state."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
