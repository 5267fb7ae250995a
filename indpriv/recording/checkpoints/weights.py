"""From the content of a checkpoint to the parameters of a model. Sensitive."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import Content

LoadFn = Callable[[Any], Mapping[str, Tensor]]
"""`load(state)` -> state_dict, for unusual layouts; state is the object saved in the file."""

# Where trainers store the parameters: indpriv and most scripts, Opacus, Lightning, others.
_PLACES = (
    *("model_state_dict", "module_state_dict", "state_dict"),
    *("model", "net", "module", "weights", "params"),
)
_SHOWN = 5


def state_of(content: Content, load: LoadFn | None = None) -> dict[str, Tensor]:
    """The state_dict inside a checkpoint; InputError if there is none.

    The user's function `load` finds it; without one, it is looked for in the usual places.
    """
    values = content.values
    if not isinstance(values, Mapping):
        described = f"a {type(values).__name__}"
    else:
        names = [str(name)[:40] for name in values]
        more = ", ..." if len(names) > _SHOWN else ""
        described = f"a dict of {', '.join(names[:_SHOWN])}{more}" if names else "an empty dict"
    if load is not None:
        try:
            found = _tensors(load(values))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise InputError(
                f"{content.path}: the spec's load failed on it: {type(error).__name__}: {error}; "
                f"load is called with the saved object ({described}) and must return a state_dict"
            ) from error
    else:
        nested = (_tensors(content.entries.get(name)) for name in _PLACES)
        bare = _tensors(values)
        found = next(filter(None, nested), bare if len(bare) == len(content.entries) else {})
    if not found:
        raise InputError(
            f"{content.path} has no state_dict in a usual place ({described}); "
            "pass AuditSpec(load=lambda state: state[...]), which returns it"
        )
    return found


def _tensors(values: object) -> dict[str, Tensor]:
    """The entries of a mapping that are tensors with a name."""
    items = values.items() if isinstance(values, Mapping) else ()
    return {k: v for k, v in items if isinstance(k, str) and isinstance(v, Tensor)}


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
    prefix = _prefix(state, list(tied.values()))
    inner = {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }
    for names in tied.values():  # safetensors stores a tensor under one of its names only
        present = next((name for name in names if name in inner), None)
        if present is not None:
            inner.update({name: inner[present] for name in names if name not in inner})
    if differences := _differences(inner, wanted):
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise InputError(
            "its parameters are not those of the spec's model: "
            f"{'; '.join(differences[:_SHOWN])}{more}. Build the model that was trained, or remove "
            "this checkpoint"
        )
    return inner


def _prefix(state: Mapping[str, Tensor], tied: list[list[str]]) -> str:
    """What stands before all of a model's names; if nothing does, what does before most of them.

    tied: the names of each of the model's tensors.
    """
    found = [
        {saved[: -len(own)] for own in names for saved in state if f".{saved}".endswith(f".{own}")}
        for names in tied
    ]
    whole = set.intersection(*found) if found else {""}
    if "" in whole:
        return ""
    if len(whole) > 1:
        raise InputError(
            f"it contains several models (prefixes {', '.join(map(repr, sorted(whole)))}); "
            "choose one with AuditSpec(load=...)"
        )
    candidates = whole or {"", *set().union(*found)}
    return max(sorted(candidates), key=lambda prefix: sum(prefix in some for some in found))


def _differences(inner: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    both = [(name, inner[name], tensor) for name, tensor in wanted.items() if name in inner]
    compared: list[tuple[str, object, object]] = [
        *((name, tuple(theirs.shape), tuple(ours.shape)) for name, theirs, ours in both),
        *((name, theirs.dtype, ours.dtype) for name, theirs, ours in both),
    ]
    return [
        *(f"{name} is {a} in the file and {b} in the model" for name, a, b in compared if a != b),
        *(f"{name} is missing from the file" for name in wanted if name not in inner),
        *(f"{name} is unknown to the model" for name in inner if name not in wanted),
    ]


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
