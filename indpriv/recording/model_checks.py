"""What a model must not have, if its per-example gradients are to exist and to be those that Opacus trains on."""

from __future__ import annotations

from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from opacus.validators import ModuleValidator
from torch import nn

from indpriv.errors import InputError


def validate_module(module: nn.Module) -> None:
    """Raise InputError, with Opacus's message, for layers that mix examples or have no per-example gradient."""
    modes = [(part, part.training) for part in module.modules()]
    errors = ModuleValidator.validate(module.train(), strict=False)
    for part, training in modes:
        part.training = training
    # Opacus cannot train nn.MultiheadAttention, but its norms exist.
    taken = [ModuleValidator.VALIDATORS[nn.MultiheadAttention](m) for m in module.modules() if _is_attention(m)]
    errors = [error for error in errors if str(error) not in {str(each) for group in taken for each in group}]
    if errors:
        raise InputError(
            "per-example gradients of this model do not exist or are not private: "
            + "; ".join(str(error).strip() for error in errors)
            + " (opacus.validators.ModuleValidator.fix(model) replaces such layers before training)"
        )
    for part in module.modules():
        if isinstance(part, nn.Embedding) and (part.max_norm is not None or part.scale_grad_by_freq):
            raise InputError("an Embedding with max_norm or scale_grad_by_freq mixes examples; make it without them")


def check_padding(model: AbstractGradSampleModule, module: nn.Module) -> None:
    """Raise InputError where training gives the row of padding a gradient: the examples at hand may have no padding."""
    if isinstance(model, GradSampleModuleFastGradientClipping) or getattr(model, "force_functorch", False):
        return  # gradients are autograd's
    for name, part in module.named_modules():
        if type(part) is nn.Embedding and part.padding_idx is not None and part.weight.requires_grad:
            raise InputError(
                f"Opacus ignores padding_idx of the Embedding {name!r} in hooks and ew mode: it trains the row of "
                'padding, with gradients that autograd does not give it; train with grad_sample_mode="functorch", or make the Embedding '
                "without padding_idx"
            )


def _is_attention(module: nn.Module) -> bool:
    return type(module) is nn.MultiheadAttention
