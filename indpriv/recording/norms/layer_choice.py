"""Which of the exact variants computes a layer's squared norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from indpriv.recording.norms.layer_squares import Squares, variants_of
from indpriv.recording.norms.timing import fastest

_TIMED = 32  # examples, at most, on which variants are timed
_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "groups")

Choose = Callable[[nn.Module, frozenset[str], Tensor, Tensor], Squares]
"""(layer, names of its trainable parameters, inputs, gradient) -> the variant to use."""


def fewest_multiplications(
    layer: nn.Module, names: frozenset[str], inputs: Tensor, gradient: Tensor
) -> Squares:
    """The variant with the fewest multiplications; nothing is timed."""
    return variants_of(layer, inputs, gradient)[0]


class Fastest:
    """The fastest variant, timed once for each kind of layer and shapes; threads may share one."""

    def __init__(self) -> None:
        self.times = False
        self._chosen: dict[tuple[Any, ...], Squares] = {}

    def __call__(
        self, layer: nn.Module, names: frozenset[str], inputs: Tensor, gradient: Tensor
    ) -> Squares:
        """The fastest variant; with deterministic algorithms, that with fewest multiplications."""
        variants = variants_of(layer, inputs, gradient)
        if len(variants) == 1 or not self.times or torch.are_deterministic_algorithms_enabled():
            return variants[0]
        few = slice(0, _TIMED)
        key = (
            *(getattr(layer, name, None) for name in _OPTIONS),
            names,
            len(inputs[few]).bit_length(),  # the fastest changes little until the batch doubles
            inputs.shape[1:],
            gradient.shape[1:],
            inputs.stride()[1:],
            inputs.dtype,
        )
        if key not in self._chosen:
            runs = [partial(each, layer, names, inputs[few], gradient[few]) for each in variants]
            self._chosen[key] = variants[fastest(runs, gradient.device)]
        return self._chosen[key]
