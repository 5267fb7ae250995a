"""What Opacus clips: gradient norms of each micro-batch, as Opacus computes them. Sensitive.

Opacus divides max_grad_norm by the norms to get its clip factors: in
`optimizer.clip_and_accumulate`, or in ghost mode in `model.get_clipping_coef`, inside
`loss.backward()`. During that call max_grad_norm is replaced by an object that records the norms
and can use a threshold of its own for each example. Opacus's arithmetic runs unchanged, and the
noise, which is added later, stays at max_grad_norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from torch import Tensor, nn

from indpriv._arrays import IntArray
from indpriv.errors import EvidenceError, InputError
from indpriv.recording.norms.shadow_model import trainable_names
from indpriv.recording.opacus.whole_model import GHOST_MODELS

_MANY_SQUARES = 10**6  # a sum of fewer squares is too small by less than 1e-4 in float32
# To the precision of the norms: of a parameter's norm, of all parameters', and of the clip factor.
_ROUNDINGS = 3
STABILISER = 1e-6  # Opacus's clip factor is max_grad_norm / (norm + 1e-6)

Positions = IntArray
Thresholds = Callable[[Positions, float], Tensor]
"""(positions (n,), max_grad_norm) -> clip thresholds (n,), in units of gradient norm."""


def clip_excess(optimizer: DPOptimizer) -> float:
    """How much longer than max_grad_norm clipped gradients are, as a fraction.

    Opacus squares and sums each parameter's gradient in the parameter's own precision, so its norms
    can be too small: on a CPU, float32 norms of 10^7 numbers by 0.0008, those of 4 * 10^7 by 0.004;
    a GPU, which sums in a tree, is exact. Measured on random numbers distributed like gradients.
    """
    largest = max(optimizer.params, key=lambda p: p.numel())
    if largest.numel() < _MANY_SQUARES:
        return 0.0
    # A generator of its own: those that training uses stay as they are.
    generator = torch.Generator(largest.device).manual_seed(0)
    with torch.no_grad():
        probe = torch.empty_like(largest).normal_(generator=generator)
        # A product of two normal numbers, as in the gradient of a linear layer.
        probe *= torch.empty_like(largest).normal_(generator=generator)
        taken = float(probe.reshape(1, -1).norm(2, dim=-1))
        return max(0.0, float(probe.square_().sum(dtype=torch.float64).sqrt()) / taken - 1.0)


@dataclass(frozen=True)
class ClippedBatch:
    """One micro-batch as Opacus clipped it.

    Attributes:
        norms: (n,) float64 gradient norms before clipping, on the model's device, in Opacus's own
            precision; where layers are clipped one by one, of what clipping leaves.
        positions: (n,) of its examples in the data set; None if it is not part of the batch drawn
            for this step.
        max_grad_norm: at the time.
        rounding: how much longer than max_grad_norm a clipped gradient can be, as a fraction,
            because norms in half precision are rounded.
        limits: (n,) clip thresholds, if each example has its own.
        each: clipping norms of the tensors of parameters, if they are clipped one by one.
    """

    norms: Tensor
    positions: Positions | None
    max_grad_norm: float
    rounding: float = 0.0
    limits: Tensor | None = None
    each: tuple[float, ...] | None = None

    @property
    def factors(self) -> Tensor:
        """(n,) clip factors, where gradients are clipped as a whole."""
        limits = self.max_grad_norm if self.limits is None else self.limits
        return torch.as_tensor(limits / (self.norms + STABILISER)).clamp(max=1.0)


@contextmanager
def clipping_watched(
    model: nn.Module,
    optimizer: DPOptimizer,
    *,
    positions_of: Callable[[int], Positions | None],
    on_batch: Callable[[ClippedBatch], None],
    thresholds: Thresholds | None = None,
) -> Iterator[None]:
    """Report each micro-batch that is clipped in the block, also empty ones.

    Args:
        model: as returned by make_private, like the optimizer.
        optimizer: methods of both are replaced in the block.
        positions_of: positions of the next micro-batch, given its size; None if no batch of that
            size is expected. It may be called several times for one batch.
        on_batch: called once for each micro-batch whose gradients enter a step, in order.
        thresholds: to clip each example at its own, at most max_grad_norm.

    Raises:
        EvidenceError: while training: norms cannot be observed (another version of Opacus) or are
            less precise than individual thresholds need, the examples of a batch are not known, or
            gradients were changed after clipping.
    """
    check = partial(_check_trained, trainable_names(model))
    observer = _Observer(positions_of, thresholds, partial(check, model, frozen_too=True))
    if isinstance(model, GHOST_MODELS):
        watched = _ghost_clipping_watched(model, optimizer, observer, on_batch)
        with watched, model.register_forward_pre_hook(check):
            yield
        return
    plain = optimizer.clip_and_accumulate

    def clip_and_accumulate() -> None:
        batch = observer.clip(optimizer, plain)
        if batch is None:
            size = len(optimizer.grad_samples[0])
            if size:
                raise EvidenceError(
                    f"Opacus clipped {size} gradients without dividing by their norms; recording "
                    "does not support this version of Opacus: install the one in constraints.txt"
                )
            batch = observer.batch(torch.zeros(0, dtype=torch.float64), optimizer.max_grad_norm)
        on_batch(batch)

    methods = {"clip_and_accumulate": clip_and_accumulate}
    with replaced_methods(optimizer, **methods), model.register_forward_pre_hook(check):
        yield


def _check_trained(
    before: frozenset[str], model: nn.Module, *_: Any, frozen_too: bool = False
) -> None:
    """Raise InputError if other parameters are trained than at first; some may rest in between."""
    now = trainable_names(model)
    changed = now ^ before if frozen_too else now - before
    if changed and (frozen_too or torch.is_grad_enabled()):
        raise InputError(
            f"parameters were {'unfrozen' if now - before else 'frozen'} during the run: "
            f"{', '.join(sorted(changed)[:5])}; Opacus and recorded norms go on with those trained "
            "at first: freeze before make_private, and train what comes next in a run of its own"
        )


@contextmanager
def _ghost_clipping_watched(
    model: Any,
    optimizer: Any,
    observer: _Observer,
    on_batch: Callable[[ClippedBatch], None],
) -> Iterator[None]:
    """Norms appear in the backward pass; they count once the optimizer takes the gradients in.

    In between, p.grad holds sums of clipped gradients, which training can change before the noise
    is added.
    """
    plain_coefficients, plain_enable_hooks = model.get_clipping_coef, model.enable_hooks
    plain_accumulate = optimizer.accumulate
    pending: list[ClippedBatch] = []
    # Gradients as the backward pass left them, and the versions of their values.
    clipped: list[tuple[Tensor, int]] = []

    def get_clipping_coef() -> Tensor:
        found: list[Tensor] = []
        batch = observer.clip(model, lambda: found.append(plain_coefficients()))
        # Replaces the batch of an earlier backward pass, as its gradients are replaced.
        pending[:] = [] if batch is None else [batch]
        return found[0]

    def enable_hooks() -> None:  # what Opacus does last in a backward pass
        plain_enable_hooks()
        gradients = [p.grad for p in optimizer.params if p.grad is not None]
        clipped[:] = [(grad, grad._version) for grad in gradients] if pending else []

    def accumulate() -> None:
        observer.check()
        if pending:
            gradients = [p.grad for p in optimizer.params]
            if len(gradients) != len(clipped) or any(
                gradient is not kept or kept._version != version
                for gradient, (kept, version) in zip(gradients, clipped, strict=True)
            ):
                raise EvidenceError(
                    "gradients were changed between loss.backward() and optimizer.step(): in ghost "
                    "mode they are already clipped then, and a term or factor applied to them "
                    "reaches the model without the limit of max_grad_norm; leave p.grad alone "
                    "(Opacus clips, the optimizer applies weight decay), or train in hooks mode"
                )
            on_batch(pending.pop())
        elif not hasattr(optimizer, "_adjusted_noise_multiplier") and any(
            p.grad is not None and bool(p.grad.any()) for p in optimizer.params
        ):
            raise EvidenceError(
                "this step's gradients were not clipped: in ghost mode, call backward() on the "
                "criterion that make_private returned, criterion(model(inputs), targets)"
            )
        clipped.clear()
        plain_accumulate()

    methods = {"get_clipping_coef": get_clipping_coef, "enable_hooks": enable_hooks}
    with replaced_methods(model, **methods), replaced_methods(optimizer, accumulate=accumulate):
        yield


@contextmanager
def replaced_methods(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Call these functions instead of an object's methods in the block; then as before."""
    own = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    vars(owner).update(functions)
    try:
        yield
    finally:
        for name in functions:
            vars(owner).pop(name, None)
        vars(owner).update(own)


@dataclass(frozen=True)
class _Observer:
    positions_of: Callable[[int], Positions | None]
    thresholds: Thresholds | None
    check: Callable[[], None]

    def batch(self, norms: Tensor, max_grad_norm: float, rounding: float = 0.0) -> ClippedBatch:
        return ClippedBatch(norms, self.positions_of(len(norms)), max_grad_norm, rounding)

    def clip(self, owner: Any, clip: Callable[[], None]) -> ClippedBatch | None:
        """Run Opacus's clipping; return the batch whose norms it divided by, if it did so."""
        self.check()
        if isinstance(owner, DPPerLayerOptimizer):
            return self._clip_each(owner, clip)
        max_grad_norm = owner.max_grad_norm
        stand_in = _StandIn(max_grad_norm, self)
        owner.max_grad_norm = stand_in
        try:
            clip()
        finally:
            owner.max_grad_norm = max_grad_norm
        return stand_in.seen

    def _clip_each(
        self, owner: DPPerLayerOptimizer, clip: Callable[[], None]
    ) -> ClippedBatch | None:
        """The same where each tensor of parameters is clipped at a norm of its own."""
        limits = owner.max_grad_norms
        stand_ins = [_StandIn(limit, self) for limit in limits]
        owner.max_grad_norms = stand_ins
        try:
            clip()
        finally:
            owner.max_grad_norms = limits
        seen = [stand_in.seen for stand_in in stand_ins]
        batches = [batch for batch in seen if batch is not None]
        if len(batches) < len(limits):
            return None
        left = [batch.norms.clamp(max=batch.max_grad_norm) for batch in batches]
        rounding = max(batch.rounding for batch in batches)
        whole = math.hypot(*limits)  # Opacus adds it up in float32
        same = math.isclose(whole, owner.max_grad_norm, rel_tol=1e-6)
        norms = torch.stack(left).norm(dim=0)
        batch = self.batch(norms, owner.max_grad_norm if same else whole, rounding)
        return replace(batch, each=tuple(map(float, limits)))


class _StandIn:
    """Stands for max_grad_norm while Opacus clips: divided by norms, or read by float()."""

    def __init__(self, max_grad_norm: float, observer: _Observer) -> None:
        self._max_grad_norm, self._observer = max_grad_norm, observer
        self.seen: ClippedBatch | None = None

    def __float__(self) -> float:
        return float(self._max_grad_norm)

    def __truediv__(self, stabilised: Tensor) -> Tensor:
        norms = (stabilised.detach().double() - STABILISER).clamp_(min=0)
        precision = torch.finfo(stabilised.dtype)
        is_coarse = precision.bits < 32
        rounding = _ROUNDINGS * precision.eps / 2 if is_coarse else 0.0
        self.seen = self._observer.batch(norms, self._max_grad_norm, rounding)
        if self._observer.thresholds is None:
            return self._max_grad_norm / stabilised
        if self.seen.positions is None:
            raise EvidenceError(
                f"a batch of {len(norms)} examples is not the one that was drawn for this step, so "
                "the clip thresholds of its examples are not known; take every batch from the "
                "attached loader and skip none"
            )
        if is_coarse:
            raise EvidenceError(
                f"Opacus computes the norms that it clips by in {stabilised.dtype}, which is too "
                "coarse for individual thresholds; train in float32, without autocast, to clip "
                "individually"
            )
        limits = self._observer.thresholds(self.seen.positions, self._max_grad_norm)
        self.seen = replace(self.seen, limits=limits.to(norms))
        return limits.to(stabilised) / stabilised
