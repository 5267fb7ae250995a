"""Chooses a backend that fits a model, and the variant that is fastest with it. Sensitive.

A choice changes the cost of norms, never the norms: every variant is compared with autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.norms.autograd_check import N_CHECKED, AutogradCheck
from indpriv.recording.norms.backends import BACKENDS, KEEP_GRADIENTS
from indpriv.recording.norms.batches import Batch
from indpriv.recording.norms.hindrance import hindrance
from indpriv.recording.norms.layer_choice import Fastest, fewest_multiplications
from indpriv.recording.norms.memory import largest_that_fits, saved_bytes
from indpriv.recording.norms.shadow_model import ModelInTraining
from indpriv.recording.norms.timing import best_seconds, fastest, fastest_size
from indpriv.recording.norms.variant import Variant

_MANY = 256  # examples that stand for a whole data set: larger batches are then tried as well
_LARGEST = 32_768  # examples at once: no model gains from more
_COMPARED = 16  # examples on which both memory orders of images are timed
_THREADS = 8  # at most; each may use several cores, since Python itself runs in one at a time
_MARGIN = 0.15  # keep threads unless slower by more: they cope better when other programs compete
_WORKSPACE = 3  # times the saved bytes: gradients and patches of convolutions add to them
# What a backend raises on a model of a kind that it does not support.
UNFIT = (NotImplementedError, RuntimeError, ValueError, AttributeError, TypeError, KeyError)


def choose_variant(
    model: ModelInTraining, check: AutogradCheck, batch: Batch, backend: str, *, tune: bool
) -> tuple[Variant, str]:
    """A variant that agrees with autograd, and why it is not the first backend ("" if it is).

    "auto" is "layerwise" if it fits, else the fastest that fits, or without tuning the first.

    Raises:
        InputError: there is no backend of that name, or none fits.
    """
    if backend not in ("auto", *BACKENDS):
        known = ", ".join(map(repr, BACKENDS))
        raise InputError(f"backend={backend!r} is not known; choose one of 'auto', {known}")
    fitting: list[Variant] = []
    reasons: dict[str, str] = {}
    for name in BACKENDS if backend == "auto" else (backend,):
        variant, reasons[name] = _try(name, model, check, batch, tune=tune)
        if variant is not None:
            fitting.append(variant)
            if name == "layerwise" or not tune:
                break
    if not fitting:
        raise InputError(_why_none_fits(model, check, reasons))
    return min(fitting, key=lambda variant: variant.seconds), next(iter(reasons.values()))


def _why_none_fits(model: ModelInTraining, check: AutogradCheck, reasons: Mapping[str, str]) -> str:
    """What the backend asked for says; of several, which layer stands in the way, or the last one.

    The last one fits almost every model.
    """
    name, reason = list(reasons.items())[-1]
    return (hindrance(model.module, check.few) if len(reasons) > 1 else "") or (
        f"per-example norms of this model cannot be computed: {reason} (backend {name}); freeze "
        "the layers that it names (requires_grad_(False)), or replace them"
    )


def _try(
    name: str, model: ModelInTraining, check: AutogradCheck, batch: Batch, *, tune: bool
) -> tuple[Variant | None, str]:
    """A checked variant of a backend, or None and why there is none."""
    choose = Fastest() if tune else fewest_multiplications
    variant = Variant(model, name, ())
    try:
        shadow = model.shadow()
        variant.shadows = ((shadow, BACKENDS[name](shadow, model.loss_fn, choose, model.each)),)
        reason = _probe(variant, check)
        if not reason:
            largest = _largest_batch(variant, batch)
            variant.batch_size = largest
            if tune and largest > N_CHECKED:
                reason = _tune(variant, check, batch, largest, choose)
    except InputError:
        raise
    except UNFIT as error:
        reason = f"{type(error).__name__}: {error}"
    return (None, reason) if reason else (variant, "")


def _probe(variant: Variant, check: AutogradCheck) -> str:
    """How a few norms differ from autograd's; "" if they do not."""
    # Another batch size first: a dimension whose length follows it is the batch.
    variant.updated_norms(check.few.repeated(len(check.few) + 1))
    return check.disagreement(variant.updated_norms(check.few))


def _largest_batch(variant: Variant, batch: Batch) -> int:
    """The largest number of examples that fit into memory and could be worth trying."""
    model = variant.model
    shadow = model.shadow()

    def saved(size: int) -> int:
        with torch.enable_grad():
            return saved_bytes(partial(model.losses, shadow, batch.repeated(size)))

    per_example = max(1, (saved(2 * N_CHECKED) - saved(N_CHECKED)) // N_CHECKED)
    needed = _WORKSPACE * per_example
    if variant.name in KEEP_GRADIENTS:
        needed += 2 * model.n_parameters * torch.finfo(model.compute_dtype).bits // 8
    at_most = _LARGEST if len(batch) >= _MANY else len(batch)
    return largest_that_fits(needed, batch.device, at_most=at_most)


def _tune(variant: Variant, check: AutogradCheck, batch: Batch, largest: int, choose: Any) -> str:
    """Find the fastest threads, memory order and batch size; return how norms disagree, or ""."""
    device = batch.device
    choose.times = True

    def trial(variant: Variant, size: int) -> Callable[[], Tensor]:
        return partial(variant.updated_norms, batch.repeated(size))

    def find_size() -> None:
        variant.batch_size, variant.seconds = fastest_size(
            lambda size: best_seconds(trial(variant, size), device), largest
        )

    one_thread = variant.shadows
    # Random numbers would be drawn in another order in each run with several threads.
    if device.type == "cpu" and variant.name == "layerwise" and not check.is_random:
        variant.shadows = (*variant.shadows, *_more_shadows(variant, check, choose))
    try:
        turned = replace(variant, channels_last=True)
        if _has_images(variant.model.module, batch.inputs) and _takes_channels_last(turned, check):
            runs = [trial(each, min(largest, _COMPARED)) for each in (variant, turned)]
            variant.channels_last = bool(fastest(runs, device))
        find_size()
        alone = replace(variant, shadows=one_thread)
        runs = [trial(each, variant.batch_size) for each in (variant, alone)]
        is_settled = len(variant.shadows) == 1 or _threads_help(check, *runs)
    except UNFIT:
        if len(variant.shadows) == 1:
            raise
        is_settled = False  # threads that share a model's or a loss's state can also fail
    if not is_settled:
        variant.shadows = one_thread
        find_size()
    # The variants of layers depend on the batch size: check those that will be used.
    return check.disagreement(trial(variant, variant.batch_size)())


def _more_shadows(
    variant: Variant, check: AutogradCheck, choose: Any
) -> tuple[tuple[nn.Module, Any], ...]:
    """Shadow models for more threads; none if the model or the loss cannot be used in several."""
    model = variant.model
    more: list[tuple[nn.Module, Any]] = []
    try:
        for _ in range(1, min(torch.get_num_threads(), _THREADS)):
            shadow, loss_fn = model.shadow(), copy.deepcopy(model.loss_fn)  # either may keep state
            more.append((shadow, BACKENDS[variant.name](shadow, loss_fn, choose, model.each)))
            if _probe(replace(variant, shadows=more[-1:]), check):
                return ()
        _probe(replace(variant, shadows=(*variant.shadows, *more)), check)
    except UNFIT:
        return ()
    return tuple(more)


def _threads_help(
    check: AutogradCheck, side_by_side: Callable[[], Tensor], alone: Callable[[], Tensor]
) -> bool:
    """Whether threads are not slower and give the same norms, as they do without global state."""
    shared: list[Tensor] = []
    own: list[Tensor] = []
    runs = [lambda: shared.append(side_by_side()), lambda: own.append(alone())]
    faster = fastest(runs, torch.device("cpu"), margin=_MARGIN) == 0
    return faster and all(check.agree(norms, own[0]) for norms in shared)


def _takes_channels_last(variant: Variant, check: AutogradCheck) -> bool:
    """Whether norms stay right: Opacus's hooks and models that view images may not allow it."""
    try:
        return not check.disagreement(variant.updated_norms(check.few))
    except RuntimeError:
        return False


def _has_images(module: nn.Module, inputs: Any) -> bool:
    """Whether the memory order of (batch, channels, height, width) could matter."""
    return (
        isinstance(inputs, Tensor)
        and inputs.ndim == 4
        and any(isinstance(m, nn.Conv2d) for m in module.modules())
    )
