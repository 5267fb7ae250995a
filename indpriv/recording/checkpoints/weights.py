"""From what a checkpoint holds to the parameters of a model: layouts, prefixes, shapes. Sensitive."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import Content, tensors_in

LoadFn = Callable[[Any], Mapping[str, Tensor]]
"""`load(state)` -> state_dict, for layouts that are not known here; state is what the file holds."""

# Where trainers keep the parameters: indpriv and most scripts, Opacus, Lightning, others.
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
    """The state_dict inside a checkpoint, with the names that it was saved with.

    Args:
        content: from `read_content`.
        load: the user's own way to it; None looks in the usual places.

    Raises:
        InputError: no tensors by name there.
    """
    values = content.values
    if load is not None:
        try:
            state = load(values)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise InputError(
                f"{content.path}: the spec's load failed on it: {type(error).__name__}: {error}; it gets what the file "
                f"holds ({_describe(values)}) and must return a state_dict"
            ) from error
        found = dict(tensors_in(state)) if isinstance(state, Mapping) else {}
    else:
        found = _usual_place(values)
    if not found:
        raise InputError(
            f"{content.path} holds no state_dict in a usual place ({_describe(values)}); say where it is with "
            "AuditSpec(load=lambda state: state[...])"
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
    names = [str(name)[:40] for name in values]
    return (
        f"a dict of {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        if names
        else "an empty dict"
    )


def fit(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by its own names: wrappers' prefixes are taken off, ties filled in.

    Wrappers put a prefix before every name (`_module.` of Opacus, `module.` of DataParallel, `_orig_mod.` of
    torch.compile, an attribute's name in a LightningModule), which is found by comparison. What a LightningModule keeps
    besides, outside that prefix, is left out; under it names must match exactly.

    Raises:
        InputError: names or shapes differ; the message lists them.
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
    for names in tied.values():  # safetensors keeps one of several names of a tensor
        present = next((name for name in names if name in inner), None)
        if present is not None:
            inner.update({name: inner[present] for name in names if name not in inner})
    differences = _differences(inner, wanted)
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise InputError(
            f"its parameters are not those of the spec's model: {'; '.join(differences[:_SHOWN])}{more}. Build the model "
            "that was trained, or leave this checkpoint out"
        )
    return inner


def _prefix(
    state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tied: Mapping[int, list[str]]
) -> str:
    """What stands before every name of the model; the longest where none fits whole, "" where nothing does."""
    if all(name in state for name in wanted):
        return ""
    groups = list(tied.values())
    candidates = {
        name[: -len(own)]
        for name in state
        for own in (groups[0] if groups else ())
        if name == own or name.endswith(f".{own}")
    }
    whole = [
        c for c in candidates if all(any(c + name in state for name in names) for names in groups)
    ]
    if len(whole) > 1:
        raise InputError(
            f"it holds several models ({', '.join(repr(c) for c in sorted(whole))} before every name); choose one with "
            "AuditSpec(load=...)"
        )
    return whole[0] if whole else _common_prefix(set(state), wanted)


def _common_prefix(names: set[str], wanted: Mapping[str, Tensor]) -> str:
    """The prefix under which most names are the model's, so that a message shows real differences."""
    prefixes = {
        "",
        *(
            name[: name.rfind(f".{own}") + 1]
            for name in names
            for own in wanted
            if name.endswith(f".{own}")
        ),
    }
    return max(sorted(prefixes), key=lambda prefix: sum(prefix + own in names for own in wanted))


def _differences(inner: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    shapes = [
        f"{name} is {tuple(inner[name].shape)} in the file and {tuple(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in inner and inner[name].shape != tensor.shape
    ]
    shapes += [
        f"{name} is {inner[name].dtype} in the file and {tensor.dtype} in the model"
        for name, tensor in wanted.items()
        if name in inner and inner[name].dtype != tensor.dtype
    ]
    missing = [f"{name} is missing from the file" for name in wanted if name not in inner]
    return (
        shapes
        + missing
        + [f"{name} is unknown to the model" for name in inner if name not in wanted]
    )


def load_into(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a fitted state into a model.

    Raises:
        InputError: NaN or infinite values; the model is unchanged.
    """
    for name, tensor in state.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not torch.isfinite(tensor).all():
            raise InputError(
                f"its {name} holds NaN or infinite values: training had diverged by then, or the file is damaged; leave "
                "this checkpoint out"
            )
    model.load_state_dict(dict(state))


def fingerprint_of(state: Mapping[str, Tensor]) -> str:
    """Hash of all tensors of a state, by name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
