"""The check of every backend: its norms are those of autograd on one example at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from indpriv.recording.norms.batches import Batch
from indpriv.recording.norms.shadow_model import ModelInTraining

N_CHECKED = 8  # examples on which norms are compared
_TWICE = 2  # of these are differentiated again; the losses of all are computed again
# Backends and autograd do the same float32 arithmetic in another order. Norms that are further
# apart than this belong to different gradients.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
TINY = 1e-12  # norms below it count as 0


class AutogradCheck:
    """Norms of a few examples by autograd, with which others are compared.

    Attributes:
        few: the examples.
        norms: (examples,) float64 norms by autograd.
        is_random: the forward pass draws random numbers, so that norms cannot be compared.
        tolerance: relative difference that rounding may cause.
    """

    def __init__(self, model: ModelInTraining, batch: Batch) -> None:
        """Differentiate the first examples of a batch one by one, some of them twice."""
        self.few = batch.rows(0, N_CHECKED)
        self.norms = model.norms_one_by_one(self.few)
        again = model.norms_one_by_one(self.few.rows(0, _TWICE))
        shadow = model.shadow()
        with torch.enable_grad():  # as in training: a counter may count such passes alone
            losses, others = (model.losses(shadow, self.few).detach() for _ in range(2))
        self.is_random = not (
            torch.allclose(self.norms[:_TWICE], again, rtol=1e-6, equal_nan=True)
            and torch.allclose(losses, others, rtol=1e-6, equal_nan=True)
        )
        self.tolerance = _TOLERANCE[model.compute_dtype]

    def agree(self, norms: Tensor, others: Tensor) -> bool:
        """Whether two vectors of norms differ by no more than rounding."""
        return torch.allclose(norms, others, rtol=self.tolerance, atol=TINY, equal_nan=True)

    def disagreement(self, norms: Tensor) -> str:
        """How the norms of the first examples differ from autograd's; "" if they do not."""
        ours, expected = norms[: len(self.norms)], self.norms
        if self.is_random or self.agree(ours, expected):
            return ""
        worst = int((ours - expected).abs().argmax())
        return (
            f"example {worst} has norm {ours[worst]:.6g} within its batch and "
            f"{expected[worst]:.6g} on its own; does the model or the loss mix examples?"
        )
