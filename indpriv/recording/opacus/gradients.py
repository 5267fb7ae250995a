"""What Opacus clips, at what norm, and what noise it adds, as training does it. Sensitive.

Opacus divides max_grad_norm by the norms to get its clip factors: in
`optimizer.clip_and_accumulate`, or in ghost mode in `model.get_clipping_coef`, inside
`loss.backward()`. During that call max_grad_norm is replaced by an object that records the norms
and can use a threshold of its own for each example. Opacus's arithmetic runs unchanged, and the
noise, which is added later, stays at max_grad_norm. It leaves the clipped sum in p.summed_grad and
the noisy sum in p.grad; their difference is the noise. Divided by noise_multiplier * max_grad_norm
it must look like independent standard normal numbers: in all parameters and in each, unlike that of
earlier steps, and unrelated to the sum.

Opacus 1.6 cuts patches out of an image by the strides that a contiguous image would have
(`unfold2d`). From images in channels-last format it therefore reads the wrong numbers, without a
warning: hooks mode trains on wrong gradients, and ghost mode clips the right gradients by wrong
norms, so that not even the worst-case epsilon holds. functorch mode is right.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from indpriv._facts import damaged, refused, text
from indpriv._types import FloatArray, IntArray
from indpriv.norm_log.session_counts import NoiseCounts
from indpriv.recording.norms.shadow_model import trainable_names
from indpriv.recording.opacus.run import GHOST_MODELS, convolutions, local

_MANY_SQUARES = 10**6  # a sum of fewer squares is too small by less than 1e-4 in float32
# To the precision of the norms: of a parameter's norm, of all parameters', and of the clip factor.
_ROUNDINGS = 3
STABILISER = 1e-6  # Opacus's clip factor is max_grad_norm / (norm + 1e-6)
_SHORT = 1e-10  # norm of a sum that has no direction: of an empty batch, or lost in rounding
_COMPARED = 10_000  # coordinates whose noise is compared with that of earlier steps

Thresholds = Callable[[IntArray, float], Tensor]
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
    with torch.no_grad():  # products of two normal numbers, as in the gradient of a linear layer
        probe = torch.empty_like(largest).normal_(generator=generator)
        probe *= torch.empty_like(largest).normal_(generator=generator)
        taken = float(probe.reshape(1, -1).norm(2, dim=-1))
        return max(0.0, float(probe.square_().sum(dtype=torch.float64).sqrt()) / taken - 1.0)


@dataclass(frozen=True)
class ClippedBatch:
    """One micro-batch as Opacus clipped it."""

    # (n,) float64, before clipping, on the model's device, in Opacus's own precision; where layers
    # are clipped one by one, of what clipping leaves.
    norms: Tensor
    positions: IntArray | None  # (n,) in the data set; None if not of the batch drawn for this step
    max_grad_norm: float
    # How much longer than max_grad_norm a clipped gradient can be, as a fraction, because norms in
    # half precision are rounded.
    rounding: float = 0.0
    limits: Tensor | None = None  # (n,) clip thresholds, if each example has its own
    each: tuple[float, ...] | None = None  # clipping norms of tensors that are clipped one by one

    @property
    def factors(self) -> Tensor:
        """(n,) clip factors, where gradients are clipped as a whole."""
        limits = self.max_grad_norm if self.limits is None else self.limits
        return torch.as_tensor(limits / (self.norms + STABILISER)).clamp(max=1.0)


def _check_trained(
    before: frozenset[str], model: nn.Module, *_: Any, frozen_too: bool = False
) -> None:
    """Raise InputError if other parameters are trained than at first; some may rest in between."""
    now = trainable_names(model)
    changed = now ^ before if frozen_too else now - before
    if changed and (frozen_too or torch.is_grad_enabled()):
        done, names = "unfrozen" if now - before else "frozen", ", ".join(sorted(changed)[:5])
        raise refused("refusal.training", "frozen", done=done, names=names)


@dataclass
class ClippingWatch:
    """Reports each micro-batch that is clipped in the block of `watching`, also empty ones.

    EvidenceError while training: norms cannot be observed (another version of Opacus) or are less
    precise than individual thresholds need, the examples of a batch are not known, or gradients
    were changed after clipping.
    """

    model: Any
    clipper: Any  # what takes per-example gradients of the model
    optimizer: Any
    # Of the next micro-batch, from its size, perhaps asked several times; None if none is expected.
    positions_of: Callable[[int], IntArray | None]
    on_batch: Callable[[ClippedBatch], None]  # once for each whose gradients enter a step, in order
    thresholds: Thresholds | None = None

    def __post_init__(self) -> None:
        # A function that holds names alone: copies of the model copy its hooks.
        self._check = partial(_check_trained, trainable_names(self.model))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the block."""
        with ExitStack() as stack:
            for name, layer in convolutions(self.model):
                handle = layer.register_forward_pre_hook(partial(_check_image, name))
                stack.callback(handle.remove)
            is_ghost = isinstance(self.clipper, GHOST_MODELS)
            stack.enter_context(self._of_ghost(self.clipper) if is_ghost else self._of_hooks())
            stack.enter_context(self.model.register_forward_pre_hook(self._check))
            yield

    @contextmanager
    def _of_hooks(self) -> Iterator[None]:
        optimizer, plain = self.optimizer, self.optimizer.clip_and_accumulate

        def clip_and_accumulate() -> None:
            batch = self._clip(optimizer, plain)
            if batch is None:
                size = len(optimizer.grad_samples[0])
                if size:
                    raise damaged("refusal.training", "no_norms", size=size)
                batch = self.batch(torch.zeros(0, dtype=torch.float64), optimizer.max_grad_norm)
            self.on_batch(batch)

        with patch.object(optimizer, "clip_and_accumulate", clip_and_accumulate):
            yield

    @contextmanager
    def _of_ghost(self, model: Any) -> Iterator[None]:
        """Norms appear in the backward pass; they count once the optimizer takes the gradients in.

        In between, p.grad holds sums of clipped gradients, which training can change before the
        noise is added.
        """
        optimizer = self.optimizer
        plain_coefficients, plain_enable_hooks = model.get_clipping_coef, model.enable_hooks
        plain_accumulate, limit = optimizer.accumulate, optimizer.max_grad_norm
        pending: list[ClippedBatch] = []
        # Gradients as the backward pass left them, and the versions of their values.
        clipped: list[tuple[Tensor, int]] = []

        def get_clipping_coef() -> Tensor:
            found: list[Tensor] = []
            batch = self._clip(model, lambda: found.append(plain_coefficients()))
            # Replaces the batch of an earlier backward pass, as its gradients are replaced.
            pending[:] = [] if batch is None else [batch]
            return found[0]

        def enable_hooks() -> None:  # what Opacus does last in a backward pass
            plain_enable_hooks()
            gradients = [p.grad for p in optimizer.params if p.grad is not None]
            clipped[:] = [(grad, grad._version) for grad in gradients] if pending else []

        def accumulate() -> None:
            self._check(self.model, frozen_too=True)
            gradients = [p.grad for p in optimizer.params]
            if pending:
                if len(gradients) != len(clipped) or any(
                    gradient is not kept or kept._version != version
                    for gradient, (kept, version) in zip(gradients, clipped, strict=True)
                ):
                    raise damaged("refusal.training", "changed_gradients")
                self.on_batch(pending.pop())
            elif not hasattr(optimizer, "_adjusted_noise_multiplier") and any(
                grad is not None and bool(grad.any()) for grad in gradients
            ):
                if optimizer.max_grad_norm != limit:  # moved in the backward pass, by Opacus 1.5
                    raise refused("refusal.attached", "adaptive")
                raise damaged("refusal.training", "not_clipped")
            clipped.clear()
            plain_accumulate()

        plain_backward = DPTensorFastGradientClipping.backward

        def backward(loss: Any) -> None:
            if not loss.loss_per_sample.ndim:  # which one clip factor after the other multiplies
                raise refused("refusal.training", "one_loss")
            plain_backward(loss)

        with (
            patch.object(model, "get_clipping_coef", get_clipping_coef),
            patch.object(model, "enable_hooks", enable_hooks),
            patch.object(optimizer, "accumulate", accumulate),
            patch.object(DPTensorFastGradientClipping, "backward", backward),
        ):
            yield

    def batch(self, norms: Tensor, max_grad_norm: float, rounding: float = 0.0) -> ClippedBatch:
        """The next micro-batch, with these norms."""
        return ClippedBatch(norms, self.positions_of(len(norms)), max_grad_norm, rounding)

    def _clip(self, owner: Any, clip: Callable[[], None]) -> ClippedBatch | None:
        """Run Opacus's clipping; return the batch whose norms it divided by, if it did so."""
        self._check(self.model, frozen_too=True)
        each = isinstance(owner, DPPerLayerOptimizer)
        name = "max_grad_norms" if each else "max_grad_norm"
        limits = getattr(owner, name)
        stand_ins = [_StandIn(limit, self) for limit in (limits if each else [limits])]
        with patch.object(owner, name, stand_ins if each else stand_ins[0]):
            clip()
        batches = [one.seen for one in stand_ins if one.seen is not None]
        if len(batches) < len(stand_ins):
            return None
        if not each:
            return batches[0]
        # Each tensor of parameters is clipped at a norm of its own.
        left = [batch.norms.clamp(max=batch.max_grad_norm) for batch in batches]
        rounding = max(batch.rounding for batch in batches)
        whole = math.hypot(*limits)  # Opacus adds it up in float32
        same = math.isclose(whole, owner.max_grad_norm, rel_tol=1e-6)
        norms = torch.stack(left).norm(dim=0)
        batch = self.batch(norms, owner.max_grad_norm if same else whole, rounding)
        return replace(batch, each=tuple(map(float, limits)))


class _StandIn:
    """Stands for max_grad_norm while Opacus clips: divided by norms, or read by float()."""

    def __init__(self, max_grad_norm: float, clipping: ClippingWatch) -> None:
        self._max_grad_norm, self._clipping = max_grad_norm, clipping
        self.seen: ClippedBatch | None = None

    def __float__(self) -> float:
        return float(self._max_grad_norm)

    def __truediv__(self, stabilised: Tensor) -> Tensor:
        norms = (stabilised.detach().double() - STABILISER).clamp_(min=0)
        precision = torch.finfo(stabilised.dtype)
        is_coarse = precision.bits < 32
        rounding = _ROUNDINGS * precision.eps / 2 if is_coarse else 0.0
        self.seen = self._clipping.batch(norms, self._max_grad_norm, rounding)
        if self._clipping.thresholds is None:
            return self._max_grad_norm / stabilised
        if self.seen.positions is None:
            raise damaged("refusal.training", "unknown_batch", size=len(norms))
        if is_coarse:
            raise damaged("refusal.training", "coarse_norms", dtype=stabilised.dtype)
        limits = self._clipping.thresholds(self.seen.positions, self._max_grad_norm)
        self.seen = replace(self.seen, limits=limits.to(norms))
        return limits.to(stabilised) / stabilised


def _check_image(name: str, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    images = inputs[0]
    if not (isinstance(images, Tensor) and images.ndim == 4 and torch.is_grad_enabled()):
        return
    (height, width), (down, right) = images.shape[2:], images.stride()[2:]
    if (width != 1 and right != 1) or (height != 1 and down != width):
        layout: dict[str, Any] = {"shape": tuple(images.shape), "strides": images.stride()}
        layout |= {"name": name, "remedy": text("refusal.training", "contiguous")}
        raise refused("refusal.training", "images", **layout)


class NoiseWatch:
    """Sums over the noise of one session; they stay on the model's device until they are read."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        states: Mapping[nn.Parameter, Mapping[str, Any]] | None = None,
    ) -> None:
        """Prepare; parameters are those that the noise is added to.

        With FSDP2, sums are in the optimizer's states of parameters, and this rank's shards of
        parameters are watched, to which it adds noise.
        """
        self._parameters, self._states = parameters, states
        self._sizes = np.array([local(p).numel() for p in parameters])
        # MPS has no float64, and half precision rounds the noise.
        self._measures = all(
            p.device.type != "mps" and p.dtype in (torch.float32, torch.float64) for p in parameters
        )
        total, ends = int(self._sizes.sum()), np.cumsum(self._sizes)
        chosen = np.unique(np.random.default_rng().integers(0, total, _COMPARED))
        chosen = chosen if total > _COMPARED else np.arange(total)
        parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        self._compared = [
            torch.as_tensor(part - end + size, device=p.device)
            for p, part, end, size in zip(parameters, parts, ends, self._sizes, strict=True)
        ]
        self._n_compared = len(chosen)
        self._steps = 0
        self._previous: Tensor | None = None  # noise of the last step, and of the first one
        self._first: Tensor | None = None
        self._totals: dict[str, Tensor] = {}
        self._sums: list[tuple[Tensor, int]] = []

    def before(self) -> None:
        """Remember the clipped sums of a step, to which noise is about to be added."""
        held = [vars(p) if self._states is None else self._states[p] for p in self._parameters]
        sums = [one.get("summed_grad") for one in held]
        self._sums = [(total, total._version) for total in sums if total is not None]
        self._measures &= len(self._sums) == len(sums)

    def after(self, standard_deviation: float) -> None:
        """Measure the noise of a step; standard_deviation is what the account assumes of it."""
        # A sum that was changed in place is gone.
        known = all(total._version == version for total, version in self._sums)
        self._measures &= known and all(p.grad is not None for p in self._parameters)
        if self._measures:
            self._add(standard_deviation)
        self._sums = []

    @torch.no_grad()
    def _add(self, standard_deviation: float) -> None:
        sums, compared = [], []
        device = self._compared[0].device
        for p, (total, _), chosen in zip(self._parameters, self._sums, self._compared, strict=True):
            total = local(total).reshape(-1)
            noisy: Any = p.grad
            noise = (local(noisy).reshape(-1) - total).div_(standard_deviation)
            compared.append(noise[chosen].double().to(device))
            products = [noise * total, total.square(), second := noise.square_(), second.square()]
            sums.append(torch.stack([one.sum(dtype=torch.float64) for one in products]).to(device))
        powers, mine = torch.stack(sums), torch.cat(compared)
        along, squares = powers[:, :2].sum(0)
        none = torch.zeros_like(mine)
        others = [none if one is None else one for one in (self._previous, self._first)]
        # Of the signs of the noise, whose law is the same whatever its scale: their sum, with a
        # secret sign for each step, and the squared products of a step's signs with it.
        signs, earlier = mine.sign(), self._totals.get("signs", none)
        squared = (signs @ earlier).square() / earlier.square().sum()
        found = {
            "powers": powers[:, 2:],  # of each tensor, the sums of 2nd and 4th powers
            # The part in the clipped sum's direction.
            "along": torch.where(squares.sqrt() > _SHORT, along / squares.sqrt(), 0.0),
            "products": torch.stack([mine @ other for other in others]),
            "noise": torch.stack([mine, mine.square()]),
            # 0/0 only before the first step, or where few signs cancel out: a product of mean
            # square 1.
            "squared": torch.nan_to_num(squared, nan=1.0),
            "signs": secrets.choice((-1, 1)) * signs,
        }
        for name, value in found.items():
            self._totals[name] = value + self._totals.get(name, torch.zeros_like(value))
        self._previous, self._first = mine, mine if self._first is None else self._first
        self._steps += 1

    def counts(self) -> NoiseCounts | None:
        """What was measured so far; None unless every step was, and its noise was finite."""
        if not (self._measures and self._steps):
            return None
        totals = {name: total.cpu().numpy() for name, total in self._totals.items()}
        second, fourth = totals["powers"].T
        if not np.isfinite(fourth).all():
            return None
        values = self._sizes * self._steps
        variances = second / values
        least = int(np.argmin((variances - 1) * np.sqrt(values)))
        pairs = max(1, self._n_compared * (self._steps - 1))
        previous, first = (totals["products"] / np.sqrt(pairs)).tolist()
        return NoiseCounts(
            values=int(values.sum()),
            variance=float(second.sum() / values.sum()),
            least_variance=float(variances[least]),
            least_values=int(values[least]),
            fourth_moment=float(fourth.sum() / values.sum()),
            previous=previous,
            first=first,
            repeated=_excess_of_sum(*totals["noise"]),
            signed=_excess_of_mean(float(totals["squared"]) / self._steps, 2 / (9 * self._steps)),
            along_sum=float(totals["along"]) / np.sqrt(self._steps),
        )


def _excess_of_sum(total: FloatArray, squares: FloatArray) -> float:
    """Standard deviations by which a sum of noise (n,) is longer than one of independent noise.

    squares: (n,) sums of the squares of what was added. The squared length of the sum over theirs
    is about chi squared with n degrees of freedom, over n; fewer where some coordinates have more
    noise (Wilson and Hilferty 1931).
    """
    most = squares.sum()
    if not most > 0:
        return 0.0
    spread = 2 / 9 * np.square(squares).sum() / most**2
    return _excess_of_mean(np.square(total).sum() / most, spread)


def _excess_of_mean(mean: float, spread: float) -> float:
    """Standard deviations by which chi squared over its n degrees of freedom is above 1.

    spread: 2 / (9 n).
    """
    return float((np.cbrt(mean) - 1 + spread) / np.sqrt(spread))
