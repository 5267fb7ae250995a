"""Memory format of images: for some, Opacus's convolutions compute wrong per-example gradients.

Opacus 1.6 cuts patches out of an image by the strides that a contiguous image would have
(`unfold2d`). From images in channels-last format it therefore reads the wrong numbers, without a
warning: hooks mode trains on wrong gradients, and ghost mode clips the right gradients by wrong
norms, so that not even the worst-case epsilon holds. functorch mode is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.norms.shadow_model import plain_class

_REMEDY = (
    "Opacus then computes wrong per-example gradients without a warning; keep the model in "
    "torch.contiguous_format and pass images.contiguous(), or train with "
    'grad_sample_mode="functorch"'
)


def check_memory_format(model: nn.Module, module: nn.Module) -> None:
    """Raise InputError if a trained convolution has channels-last weights, and so such outputs.

    `module` is the user's own inside the `model` that make_private returned.
    """
    for name, layer in _convolutions(model, module):
        if not layer.weight.is_contiguous():
            raise InputError(
                f"the convolution {name!r} has its weights in channels-last memory format; "
                f"{_REMEDY}"
            )


@contextmanager
def memory_format_watched(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """In the block, refuse images whose gradients Opacus would get wrong; arguments as above."""
    handles = [
        layer.register_forward_pre_hook(partial(_refuse, name))
        for name, layer in _convolutions(model, module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _convolutions(model: nn.Module, module: nn.Module) -> list[tuple[str, nn.Conv2d]]:
    """Trained convolutions that Opacus handles itself; it uses functorch for subclasses."""
    if getattr(model, "force_functorch", False):
        return []
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if plain_class(layer) is nn.Conv2d and any(p.requires_grad for p in layer.parameters())
    ]


def _refuse(name: str, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    images = inputs[0]
    if (
        isinstance(images, Tensor)
        and images.ndim == 4
        and torch.is_grad_enabled()
        and not _rows_in_order(images)
    ):
        raise InputError(
            f"the convolution {name!r} got images that are not stored row by row in memory (shape "
            f"{tuple(images.shape)}, strides {images.stride()}; channels last?); {_REMEDY}"
        )


def _rows_in_order(images: Tensor) -> bool:
    height, width = images.shape[2:]
    down, right = images.stride()[2:]
    return (width == 1 or right == 1) and (height == 1 or down == width)
