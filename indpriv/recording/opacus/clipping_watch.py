"""What Opacus clips: the gradient norms of each physical batch, seen once as it computes them. Sensitive.

Opacus divides max_grad_norm by the norms to get its clip factors: in `optimizer.clip_and_accumulate`, or in ghost mode
in `model.get_clipping_coef`, inside `loss.backward()`. For the time of that call max_grad_norm is an object that shows
the norms and may put a threshold of its own in front of each example; Opacus's arithmetic runs unchanged, and noise,
which is added later, stays at max_grad_norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from indpriv.errors import EvidenceError

_MANY_SQUARES = 10**6  # fewer of them fall short by less than 1e-4 in float32
_ROUNDINGS = (
    3  # to the precision of norms: of a parameter's, of all parameters', and of the clip factor
)
_STABILISER = 1e-6  # Opacus's clip factor is max_grad_norm / (norm + 1e-6)

Positions = NDArray[np.int64]
Thresholds = Callable[[Positions, float], Tensor]


def clip_excess(optimizer: DPOptimizer) -> float:
    """By what share of max_grad_norm Opacus's clipped gradients are longer than that, for its norms come out too short.

    It squares and sums each parameter's gradient in the parameter's own precision. On a CPU, float32 norms of 10^7 numbers
    are 0.0008 too small, those of 4 * 10^7 are 0.004; on a GPU, which sums in a tree, they are not. Measured, on numbers
    spread like gradients.
    """
    largest = max(optimizer.params, key=lambda p: p.numel())
    if largest.numel() < _MANY_SQUARES:
        return 0.0
    own = torch.Generator(largest.device).manual_seed(
        0
    )  # of a probe; training's generators stay where they are
    with torch.no_grad():
        probe = torch.empty_like(largest).normal_(generator=own)
        probe *= torch.empty_like(largest).normal_(
            generator=own
        )  # spread as in the gradient of a linear layer
        taken = float(probe.reshape(1, -1).norm(2, dim=-1))
        return max(0.0, float(probe.square_().sum(dtype=torch.float64).sqrt()) / taken - 1.0)


@dataclass(frozen=True)
class ClippedBatch:
    """One physical batch as Opacus clipped it.

    Attributes:
        norms: (n,) float64 gradient norms before clipping, on the model's device, in Opacus's own precision.
        positions: (n,) of its examples in the data set; None where it is no part of the batch drawn for this step.
        max_grad_norm: at the time.
        rounding: by what share of max_grad_norm a clipped gradient may be longer, where norms are in half precision.
    """

    norms: Tensor
    positions: Positions | None
    max_grad_norm: float
    rounding: float = 0.0


def watch_clipping(
    model: nn.Module,
    optimizer: DPOptimizer,
    *,
    positions_of: Callable[[int], Positions | None],
    on_batch: Callable[[ClippedBatch], None],
    thresholds: Thresholds | None = None,
) -> Callable[[], None]:
    """See every physical batch that a run clips, also empty ones; optionally clip each example at a threshold of its own.

    Args:
        model: as PrivacyEngine.make_private returned it.
        optimizer: likewise; it is instrumented in place, in ghost mode the model too.
        positions_of: positions of the next physical batch, given its size; None where none of that size is due. It may
            be asked several times about one batch.
        on_batch: called once for each physical batch whose gradients enter a step, in order.
        thresholds: clip thresholds (n,) of the examples at some positions under some max_grad_norm, in units of gradient
            norm, each at most max_grad_norm; default max_grad_norm for all.

    Returns:
        a function that takes everything off again.

    Raises:
        EvidenceError: while training, where norms do not show (another Opacus), thresholds are due for a batch whose
            examples are not known, or whose norms are coarser than float32, or gradients were changed once clipped.
    """
    watcher = _Watcher(positions_of, thresholds)
    if isinstance(model, GradSampleModuleFastGradientClipping):
        return _watch_ghost(model, optimizer, watcher, on_batch)
    plain = optimizer.clip_and_accumulate

    def clip_and_accumulate() -> None:
        batch = watcher.seen_in(optimizer, plain)
        if batch is None:
            size = len(optimizer.grad_samples[0])
            if size:
                raise EvidenceError(
                    f"Opacus clipped {size} gradients without dividing by their norms; this version of Opacus is not "
                    "supported by recording: install the one in constraints.txt"
                )
            batch = watcher.batch(torch.zeros(0, dtype=torch.float64), optimizer.max_grad_norm)
        on_batch(batch)

    optimizer.clip_and_accumulate = clip_and_accumulate

    def unwatch() -> None:
        vars(optimizer).pop("clip_and_accumulate", None)

    return unwatch


def _watch_ghost(
    model: GradSampleModuleFastGradientClipping,
    optimizer: Any,
    watcher: _Watcher,
    on_batch: Callable[[ClippedBatch], None],
) -> Callable[[], None]:
    """Norms show in the backward pass; they count once the optimizer takes the gradients in.

    Between the two lie the sums of clipped gradients in p.grad, where training can reach them before the noise does.
    """
    coefficients, enable_hooks, accumulate = (
        model.get_clipping_coef,
        model.enable_hooks,
        optimizer.accumulate,
    )
    pending: list[ClippedBatch] = []
    clipped: list[
        tuple[Tensor, int]
    ] = []  # gradients as the backward pass left them, and the versions of their values

    def get_clipping_coef() -> Tensor:
        found: list[Tensor] = []
        batch = watcher.seen_in(model, lambda: found.append(coefficients()))
        pending[:] = (
            [] if batch is None else [batch]
        )  # a second backward pass replaces the first one's gradients
        return found[0]

    def enable_hooks_again() -> None:  # the last that Opacus does in a backward pass
        enable_hooks()
        clipped[:] = (
            [(p.grad, p.grad._version) for p in optimizer.params if p.grad is not None]
            if pending
            else []
        )

    def accumulate_clipped() -> None:
        if pending:
            gradients = [p.grad for p in optimizer.params]
            if len(gradients) != len(clipped) or any(
                gradient is not kept or kept._version != version
                for gradient, (kept, version) in zip(gradients, clipped, strict=True)
            ):
                raise EvidenceError(
                    "gradients were changed between loss.backward() and optimizer.step(): in ghost mode they are clipped by "
                    "then, and whatever is added to them or multiplies them reaches the model beyond max_grad_norm; leave "
                    "p.grad alone (Opacus clips, weight decay is the optimizer's), or train in hooks mode"
                )
            on_batch(pending.pop())
        clipped.clear()
        accumulate()

    model.get_clipping_coef = get_clipping_coef
    model.enable_hooks = enable_hooks_again
    optimizer.accumulate = accumulate_clipped

    def unwatch() -> None:
        vars(model).pop("get_clipping_coef", None)
        vars(model).pop("enable_hooks", None)
        vars(optimizer).pop("accumulate", None)

    return unwatch


@dataclass(frozen=True)
class _Watcher:
    positions_of: Callable[[int], Positions | None]
    thresholds: Thresholds | None

    def batch(self, norms: Tensor, max_grad_norm: float) -> ClippedBatch:
        return ClippedBatch(norms, self.positions_of(len(norms)), max_grad_norm)

    def seen_in(self, owner: Any, clip: Callable[[], None]) -> ClippedBatch | None:
        """Run Opacus's clipping and return the batch whose norms it divided by; None where it divided by none."""
        shown = _Shown(owner.max_grad_norm, self)
        owner.max_grad_norm = shown
        try:
            clip()
        finally:
            owner.max_grad_norm = shown.max_grad_norm
        if shown.norms is None:
            return None
        return replace(self.batch(shown.norms, shown.max_grad_norm), rounding=shown.rounding)


class _Shown:
    """Stands for max_grad_norm while Opacus clips; anything but a division by the norms fails."""

    def __init__(self, max_grad_norm: float, watcher: _Watcher) -> None:
        self.max_grad_norm = max_grad_norm
        self.norms: Tensor | None = None
        self.rounding = 0.0
        self._watcher = watcher

    def __truediv__(self, stabilised: Tensor) -> Tensor:
        self.norms = (stabilised.detach().double() - _STABILISER).clamp_(min=0)
        if torch.finfo(stabilised.dtype).bits < 32:
            self.rounding = _ROUNDINGS * torch.finfo(stabilised.dtype).eps / 2
        if self._watcher.thresholds is None:
            return self.max_grad_norm / stabilised
        positions = self._watcher.positions_of(len(stabilised))
        if positions is None:
            raise EvidenceError(
                f"a batch of {len(stabilised)} examples is not the one that was drawn for this step, so that the clip "
                "thresholds of its examples are not known; draw every batch from the attached loader and skip none"
            )
        if torch.finfo(stabilised.dtype).bits < 32:
            raise EvidenceError(
                f"the norms that Opacus clips by are {stabilised.dtype}, too coarse to hold each example at its own "
                "threshold; train in float32, without autocast, to clip individually"
            )
        return self._watcher.thresholds(positions, self.max_grad_norm).to(stabilised) / stabilised
