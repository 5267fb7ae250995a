"""Checks that a model's per-example gradients exist, and that Opacus trains on the same ones."""

from __future__ import annotations

from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModuleFastGradientClipping
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from indpriv.errors import InputError
from indpriv.recording.norms.autograd_check import TINY
from indpriv.recording.norms.autotune import UNFIT
from indpriv.recording.norms.backends import training_backend
from indpriv.recording.norms.batches import Batch, call, first_tensor, map_tensors
from indpriv.recording.norms.hindrance import hindrance, named, shared_positions
from indpriv.recording.norms.shadow_model import ModelInTraining, make_shadow
from indpriv.recording.norms.variant import Variant
from indpriv.recording.random_states import kept_random_state

_PROBED = 4  # examples that stand for all others
_ROUNDING = 1e-6  # relative, of outputs
_LEAK = "which thus reach the model without clipping or noise, so no epsilon is valid"


def validate_module(module: nn.Module) -> None:
    """Raise InputError for layers that mix examples or have no per-example gradient."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise InputError(
                f"the parameter {name!r} is complex: Opacus adds noise to its real part only, so "
                "no epsilon is valid; store real and imaginary part as a real parameter "
                "(torch.view_as_complex makes it complex in the forward pass)"
            )
    if replaceable := _replaceable(module):
        raise InputError(
            f"{', '.join(replaceable)}: Opacus takes no per-example gradients of such layers, "
            "which mix examples or hide their parts; replace them before the optimizer is made: "
            "model = opacus.validators.ModuleValidator.fix(model)"
        )
    for part in module.modules():
        if isinstance(part, nn.Embedding) and (
            part.max_norm is not None or part.scale_grad_by_freq
        ):
            raise InputError(
                "an Embedding with max_norm or scale_grad_by_freq mixes examples; "
                "make it without them"
            )


def _replaceable(module: nn.Module) -> list[str]:
    """Layers that Opacus's validator refuses, except nn.MultiheadAttention, whose norms exist."""
    checks = ModuleValidator.VALIDATORS
    return [
        named(name, part)
        for name, part in module.named_modules()
        if type(part) in checks
        and type(part) is not nn.MultiheadAttention
        and any(p.requires_grad for p in part.parameters())
        and checks[type(part)](part)
    ]


def check_memory(module: nn.Module, inputs: Any) -> None:
    """Raise InputError if a forward pass keeps anything about its examples.

    Two copies of the module pass over different parts of some real inputs. Then their buffers are
    equal, and so are their outputs for one and the same part: whatever else a module keeps of its
    examples, in lists or attributes, matters only if it changes outputs.
    """
    size = min(_PROBED, len(first_tensor(inputs)) // 2)
    if not size:
        return
    parts = [_rows(inputs, start, start + size) for start in (0, size)]
    first, second = (make_shadow(module) for _ in parts)
    for shadow, part in zip((first, second), parts, strict=True):
        _outputs(shadow, part)
    others = dict(second.named_buffers())
    for name, value in first.named_buffers():
        both_nan = (value != value) & (others[name] != others[name])
        if not bool(((value == others[name]) | both_nan).all()):
            raise InputError(
                f"a forward pass changes the buffer {name!r} depending on its examples, {_LEAK}; "
                "remove that, or fix the buffer before training"
            )
    mine, theirs = (_outputs(shadow, parts[0]) for shadow in (first, second))
    if not all(map(_close, mine, theirs)):
        raise InputError(
            "outputs of the model depend on examples that it has seen before: a layer keeps "
            f"something of them, {_LEAK}; remove that, e.g. a list or a running mean in the module"
        )


def _outputs(shadow: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors that a copy of the model returns in training, always with the same seed."""
    with kept_random_state(), torch.no_grad():
        torch.manual_seed(0)
        leaves = tree_leaves(call(shadow, inputs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _rows(inputs: Any, start: int, stop: int) -> Any:
    return map_tensors(inputs, lambda tensor: tensor[start:stop])


def _close(mine: Tensor, theirs: Tensor) -> bool:
    """Equal, or up to rounding on devices that sum in another order each time."""
    if mine.shape != theirs.shape or not mine.is_floating_point():
        return torch.equal(mine, theirs)
    scale = _ROUNDING * float(mine.abs().nan_to_num().max()) if mine.numel() else 0.0
    return torch.allclose(mine, theirs, rtol=0, atol=scale, equal_nan=True)


def check_opacus_norms(
    wrapped: AbstractGradSampleModule,
    model: ModelInTraining,
    batch: Batch,
    ours: Tensor,
    tolerance: float,
) -> None:
    """Raise InputError if training with Opacus uses other gradients than autograd.

    Compares the norms of a few examples with `ours`, which agree with autograd.
    """
    _check_padding(wrapped, model.module)
    if shared := shared_positions(wrapped, batch):
        raise InputError(shared)
    shadow = model.shadow()
    try:
        backend = training_backend(wrapped, shadow, model.loss_fn)
        theirs = Variant(model, "Opacus", ((shadow, backend),)).updated_norms(batch)
    except UNFIT as error:
        raise InputError(
            hindrance(wrapped, batch)
            or "Opacus cannot compute per-example gradients of this model as it is wrapped "
            f"({type(error).__name__}: {error}); {_another_mode(wrapped)}"
        ) from error
    wrong = theirs < ours * (1 - tolerance) - TINY
    if not isinstance(wrapped, GradSampleModuleFastGradientClipping):
        # In ghost mode, too large a norm is safe: the gradient is only clipped too much.
        wrong |= theirs > ours * (1 + tolerance) + TINY
    if bool(wrong.any()):
        i = int(wrong.int().argmax())
        raise InputError(
            hindrance(wrapped, batch)
            or "Opacus computes other per-example gradients of this model than autograd: in "
            f"training example {i} would have norm {float(theirs[i]):.6g}, by autograd it has "
            f"{float(ours[i]):.6g}; {_another_mode(wrapped)}"
        )


def _another_mode(wrapped: AbstractGradSampleModule) -> str:
    if getattr(wrapped, "force_functorch", False):
        return "freeze the layers that Opacus does not support (requires_grad_(False))"
    return 'train with grad_sample_mode="functorch"'


def _check_padding(wrapped: AbstractGradSampleModule, module: nn.Module) -> None:
    """Raise InputError if Opacus trains padding; the examples at hand may contain none."""
    ghost = isinstance(wrapped, GradSampleModuleFastGradientClipping)
    if ghost or getattr(wrapped, "force_functorch", False):
        return  # gradients are autograd's
    for name, part in module.named_modules():
        if (
            type(part) is nn.Embedding
            and part.padding_idx is not None
            and part.weight.requires_grad
        ):
            raise InputError(
                f"in hooks and ew mode, Opacus ignores padding_idx of the Embedding {name!r}: it "
                "trains the row of padding, with gradients that autograd does not give it; train "
                'with grad_sample_mode="functorch", or make the Embedding without padding_idx'
            )
