"""How well a model's labels survive perturbation: an attack's signal that needs labels only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from indpriv._types import FloatArray

COPIES = 20
_SEED = 0  # all models see the same copies; they protect nothing
_PIXEL_RANGE = 2.0  # of images scaled to [-1, 1]
_COLUMNS = 10  # a copy of a table row replaces one column in this number


def robustness(labels: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> FloatArray:
    """Share of perturbed copies that get their label, shrunk to be above 0 and below 1.

    After Choquette-Choo, Tramer, Carlini and Papernot 2021 (arXiv:2007.14321). A copy of an image
    has normal noise of a quarter or half of the range of pixels, or is moved by a pixel. A copy of
    a table row takes a tenth of its columns from another row.

    Args:
        labels: from inputs to predicted classes.
        inputs: (n, ...) the examples.
        targets: (n,) their classes.

    Returns:
        (number of right labels + 1/2) / (number of copies + 1), (n,) float64.
    """
    right = torch.zeros(len(targets), dtype=torch.float64)
    for copy in _copies(inputs):
        right += (labels(copy) == targets).cpu()
    found: FloatArray = ((right + 0.5) / (COPIES + 1)).numpy()
    return found


def _copies(inputs: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    is_image = inputs.dim() == 4
    for number in range(COPIES):
        if not is_image:
            others = inputs[torch.randperm(len(inputs), generator=generator)]
            replaced = torch.rand(inputs.shape, generator=generator) < 1 / _COLUMNS
            yield torch.where(replaced, others, inputs)
        elif number % 5 == 4:  # a fifth of the copies
            direction = 1 if number % 2 else -1
            yield torch.roll(inputs, direction, dims=2 + number // 5 % 2)
        else:
            scale = _PIXEL_RANGE * (0.25 if number % 2 else 0.5)
            yield inputs + scale * torch.randn(inputs.shape, generator=generator)
