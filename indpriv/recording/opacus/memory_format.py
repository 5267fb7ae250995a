"""How images lie in memory: Opacus's convolutions take wrong per-example gradients where it is not row by row.

Opacus 1.6 cuts patches out of an image by the strides that a contiguous one would have (`unfold2d`). Of images with
channels last it then takes other numbers, without a word: hooks mode trains on wrong gradients, and ghost mode clips the
right ones by wrong norms, so that not even the worst-case epsilon holds. functorch mode is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from indpriv.errors import InputError

_REMEDY = (
    "Opacus then takes wrong per-example gradients without a word; keep the model in torch.contiguous_format and pass "
    'images.contiguous(), or train with grad_sample_mode="functorch"'
)


def check_memory_format(model: nn.Module, module: nn.Module) -> None:
    """Raise InputError where a convolution in training has weights with channels last, so that what it puts out has too.

    Args:
        model: as PrivacyEngine.make_private returned it.
        module: the user's own inside it.
    """
    for name, layer in _convolutions(model, module):
        if not layer.weight.is_contiguous():
            raise InputError(
                f"the convolution {name!r} has its weights with channels last in memory; {_REMEDY}"
            )


def watch_memory_format(model: nn.Module, module: nn.Module) -> Callable[[], None]:
    """Refuse, in the forward pass, images that Opacus takes wrong gradients of.

    Args:
        model: as PrivacyEngine.make_private returned it.
        module: the user's own inside it; hooked in place.

    Returns:
        a function that takes the hooks off again.
    """
    handles = [
        layer.register_forward_pre_hook(partial(_refuse, name))
        for name, layer in _convolutions(model, module)
    ]

    def unwatch() -> None:
        for handle in handles:
            handle.remove()

    return unwatch


def _convolutions(model: nn.Module, module: nn.Module) -> list[tuple[str, nn.Conv2d]]:
    """Those whose patches Opacus cuts out itself: a subclass of Conv2d goes to functorch."""
    if getattr(model, "force_functorch", False):
        return []
    layers = [(name, layer) for name, layer in module.named_modules() if type(layer) is nn.Conv2d]
    return [
        (name, layer) for name, layer in layers if any(p.requires_grad for p in layer.parameters())
    ]


def _refuse(name: str, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    images = inputs[0]
    if (
        isinstance(images, Tensor)
        and images.ndim == 4
        and torch.is_grad_enabled()
        and not _row_by_row(images)
    ):
        raise InputError(
            f"the convolution {name!r} is given images that do not lie row by row in memory (shape "
            f"{tuple(images.shape)}, strides {images.stride()}; channels last?); {_REMEDY}"
        )


def _row_by_row(images: Tensor) -> bool:
    height, width = images.shape[2:]
    down, right = images.stride()[2:]
    return (width == 1 or right == 1) and (height == 1 or down == width)
