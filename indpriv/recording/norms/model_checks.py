"""What a model must not have, if its per-example gradients are to exist and to be those that Opacus trains on."""

from __future__ import annotations

from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.norms.backends import first_tensor, map_tensors
from indpriv.recording.norms.shadow_model import make_twin
from indpriv.recording.random_states import kept_random_state

_PROBED = 4  # examples that stand for all others


def validate_module(module: nn.Module) -> None:
    """Raise InputError, with Opacus's message, for layers that mix examples or have no per-example gradient."""
    complex_ones = [
        name for name, p in module.named_parameters() if p.requires_grad and p.is_complex()
    ]
    if complex_ones:
        raise InputError(
            f"the parameter {complex_ones[0]!r} is complex: Opacus adds noise to its real part only, so that no epsilon holds; "
            "keep real and imaginary part as a real parameter (torch.view_as_complex makes it complex in the forward pass)"
        )
    modes = [(part, part.training) for part in module.modules()]
    errors = ModuleValidator.validate(module.train(), strict=False)
    for part, training in modes:
        part.training = training
    # Opacus cannot train nn.MultiheadAttention, but its norms exist.
    taken = [
        ModuleValidator.VALIDATORS[nn.MultiheadAttention](m)
        for m in module.modules()
        if _is_attention(m)
    ]
    errors = [
        error
        for error in errors
        if str(error) not in {str(each) for group in taken for each in group}
    ]
    if errors:
        raise InputError(
            "per-example gradients of this model do not exist or are not private: "
            + "; ".join(str(error).strip() for error in errors)
            + " (opacus.validators.ModuleValidator.fix(model) replaces such layers before training)"
        )
    for part in module.modules():
        if isinstance(part, nn.Embedding) and (
            part.max_norm is not None or part.scale_grad_by_freq
        ):
            raise InputError(
                "an Embedding with max_norm or scale_grad_by_freq mixes examples; make it without them"
            )


def check_padding(model: AbstractGradSampleModule, module: nn.Module) -> None:
    """Raise InputError where training gives the row of padding a gradient: the examples at hand may have no padding."""
    if isinstance(model, GradSampleModuleFastGradientClipping) or getattr(
        model, "force_functorch", False
    ):
        return  # gradients are autograd's
    for name, part in module.named_modules():
        if (
            type(part) is nn.Embedding
            and part.padding_idx is not None
            and part.weight.requires_grad
        ):
            raise InputError(
                f"Opacus ignores padding_idx of the Embedding {name!r} in hooks and ew mode: it trains the row of "
                'padding, with gradients that autograd does not give it; train with grad_sample_mode="functorch", or make the Embedding '
                "without padding_idx"
            )


def check_buffers(module: nn.Module, inputs: Any) -> None:
    """Raise InputError where a forward pass keeps something of its examples in a buffer: nothing adds noise to that.

    Args:
        module: the user's own; it is left as it was.
        inputs: some real examples, of which two parts are held against each other.
    """
    size = min(_PROBED, len(first_tensor(inputs)) // 2)
    if not size or next(module.buffers(), None) is None:
        return
    first, second = (_buffers_after(module, inputs, start, start + size) for start in (0, size))
    for name, value in first.items():
        same = (value == second[name]) | (
            (value != value) & (second[name] != second[name])
        )  # NaN is NaN
        if not bool(same.all()):
            raise InputError(
                f"a forward pass changes the buffer {name!r} by what its examples are: they reach the model without clipping "
                "or noise, and no epsilon holds; leave that out, or fix the buffer before training"
            )


def _buffers_after(module: nn.Module, inputs: Any, start: int, stop: int) -> dict[str, Tensor]:
    """Buffers of a copy that has seen some examples in training, each part with the same random numbers."""
    twin = make_twin(module)
    with kept_random_state(), torch.no_grad():
        torch.manual_seed(0)
        twin(map_tensors(inputs, lambda tensor: tensor[start:stop]))
    return dict(twin.named_buffers())


def _is_attention(module: nn.Module) -> bool:
    return type(module) is nn.MultiheadAttention
