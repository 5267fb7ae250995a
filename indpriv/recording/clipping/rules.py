"""Clipping rules that Opacus lacks, or has in a form that its account does not fit. Sensitive.

Each is an optimizer in place of the one that `PrivacyEngine.make_private` returned, in hooks mode:

    optimizer = QuantileClipping.of(optimizer, quantile=0.5)

The Recorder logs what an example contributes to the released sum, as a share of what the noise
multiplier is for, times max_grad_norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise
from torch import Tensor

from indpriv._arrays import FloatArray
from indpriv.errors import InputError
from indpriv.norm_log.evidence import LARGEST_NORM
from indpriv.norm_log.fields import StepSetting

_RANGE = 1e6  # the clipping norm stays within this factor of the first one
_STABILISER = 1e-6  # as in Opacus's clip factor


class ClippingRule(DPOptimizer):
    """Flat clipping, for subclasses to change.

    Attributes:
        clipping: name of the rule in logs and audit files.
        no_privacy: why a run with this rule is not differentially private; "" if it is.
    """

    noise_multiplier: float
    max_grad_norm: float
    clipping: ClassVar[str] = "flat"
    no_privacy: ClassVar[str] = ""
    _kept: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, optimizer: DPOptimizer, **options: Any) -> Self:
        """The rule in place of an optimizer that `make_private(clipping="flat")` returned.

        Raises:
            InputError: another optimizer, or options that the rule refuses.
        """
        if type(optimizer) is not DPOptimizer:
            raise InputError(
                f"the optimizer is a {type(optimizer).__name__}; {cls.__name__} takes the place of "
                'an Opacus DPOptimizer: use make_private(clipping="flat") in hooks mode and in one '
                "process"
            )
        made = cls(
            optimizer.original_optimizer,
            noise_multiplier=optimizer.noise_multiplier,
            max_grad_norm=optimizer.max_grad_norm,
            expected_batch_size=optimizer.expected_batch_size,
            loss_reduction=optimizer.loss_reduction,
            generator=optimizer.generator,
            secure_mode=optimizer.secure_mode,
            **options,
        )
        if optimizer.step_hook is not None:
            made.attach_step_hook(optimizer.step_hook)
        return made

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of gradients."""
        return float(self.gradient_multiplier(self.noise_multiplier) * self.max_grad_norm)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """Noise multiplier of the sum of gradients, of that of all that a step releases."""
        return noise_multiplier

    def contributions(self, norms: FloatArray, setting: StepSetting) -> FloatArray:
        """Contributions (n,) of examples with these norms (n,), in units of max_grad_norm."""
        return norms

    def state(self) -> dict[str, Any]:
        """What earlier steps have left in the rule, in tensors and numbers; `restore` takes it."""
        return {name.lstrip("_"): getattr(self, name) for name in self._kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where another object of the rule had come to."""
        for name in self._kept:
            held = state[name.lstrip("_")]
            if isinstance(held, list):  # of tensors, one for each parameter
                held = [value.to(p) for value, p in zip(held, self.params, strict=True)]
            setattr(self, name, held)

    def _norms(self) -> Tensor:
        """(n,) norms of the gradients of this micro-batch, as Opacus computes them."""
        samples = self.grad_samples
        if not len(samples[0]):
            return torch.zeros(0)
        each = [g.reshape(len(g), -1).norm(2, dim=-1).to(samples[0].device) for g in samples]
        return torch.stack(each, dim=1).norm(2, dim=1)


class QuantileClipping(ClippingRule):
    """Clip at a running quantile of the norms (Andrew et al. 2021, arXiv:1905.03871, Theorem 1).

    Each step also releases the number of gradients that are not clipped, with noise, and moves
    max_grad_norm by it: C exp(-rate (share - quantile)). `noise_multiplier` is that of both
    releases together, as accountants count it; the gradients get more noise, with multiplier
    (noise_multiplier^-2 - (2 count_noise)^-2)^(-1/2).

    The number is centred: an example adds 1/2 or -1/2. It is divided by the expected batch size.
    Opacus's AdaClipDPOptimizer does neither: there an example that is not clipped adds 1, for which
    the noise of the theorem is too little, and the size of the batch is not protected.

    Args:
        quantile: share of gradients that are to stay unclipped.
        rate: learning rate of the clipping norm.
        count_noise: standard deviation of the noise of the number; default a twentieth of the
            expected batch size.
    """

    clipping = "quantile"
    _kept = ("max_grad_norm", "_first")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        quantile: float = 0.5,
        rate: float = 0.2,
        count_noise: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(optimizer, **settings)
        if not 0 < quantile < 1 or not 0 < rate < math.inf:
            raise InputError(
                f"quantile={quantile!r} is not in (0, 1), or rate={rate!r} is not positive"
            )
        if not self.expected_batch_size:
            raise InputError("quantile clipping needs the expected batch size")
        self.quantile, self.rate = quantile, rate
        self.count_noise = self.expected_batch_size / 20 if count_noise is None else count_noise
        self._first, self._centred = float(self.max_grad_norm), 0.0
        self.gradient_multiplier(self.noise_multiplier)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """See ClippingRule: without the number of unclipped gradients."""
        rest = noise_multiplier**-2 - (2 * self.count_noise) ** -2 if noise_multiplier else math.inf
        if rest <= 0:
            raise InputError(
                f"noise_multiplier={noise_multiplier:g} is not below twice the noise of the number "
                f"of unclipped gradients, {self.count_noise:g}: that number alone would use up "
                "the privacy of a step; take larger batches or more count_noise"
            )
        return float(rest**-0.5)

    def contributions(self, norms: FloatArray, setting: StepSetting) -> FloatArray:
        """Of the sum and of the number together; never 0, since even a gradient of 0 is counted."""
        sigma, clip = setting.noise_multiplier, setting.max_grad_norm
        share = np.minimum(norms / clip, 1.0) / self.gradient_multiplier(sigma)
        return np.asarray(clip * sigma * np.hypot(share, 1 / (2 * self.count_noise)))

    def clip_and_accumulate(self) -> None:
        """Clip, and count the gradients that are not clipped."""
        norms = self._norms()
        unclipped = norms + _STABILISER <= float(self.max_grad_norm)
        self._centred += float(unclipped.sum()) - len(norms) / 2
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Add the noise of the gradients."""
        accounted = self.noise_multiplier
        self.noise_multiplier = self.gradient_multiplier(accounted)
        try:
            super().add_noise()
        finally:
            self.noise_multiplier = accounted

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Clip and add noise; then move the clipping norm for the next step."""
        updates = super().pre_step(closure)
        if updates:
            zero = torch.zeros((), device=self.params[0].device)
            noise = _generate_noise(self.count_noise, zero, self.generator, self.secure_mode)
            share = 0.5 + (self._centred + float(noise)) / float(self.expected_batch_size)
            self._centred = 0.0
            moved = float(self.max_grad_norm) * math.exp(-self.rate * (share - self.quantile))
            self.max_grad_norm = min(max(moved, self._first / _RANGE), self._first * _RANGE)
        return updates


class AdaClip(ClippingRule):
    """Clip gradients that are centred and scaled by coordinate.

    After Pichapati et al. 2019 (arXiv:1908.07643), Algorithm 1.

    Mean and standard deviation of each coordinate are estimated from the noisy mean gradients of
    earlier steps, which are public. In the first step it clips at max_grad_norm; later that is
    only the unit of contributions. Means of batches vary less than single gradients: once most are
    clipped, the widths shrink from step to step, and training stalls.
    """

    clipping = "adaclip"
    _kept = ("_means", "_variances")
    _MEAN, _VARIANCE = 0.99, 0.9  # shares of the old estimates that are kept
    _LEAST, _MOST = 1e-12, 10.0  # of a coordinate's variance

    def __init__(self, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        if self.loss_reduction != "mean" or not self.expected_batch_size:
            raise InputError('AdaClip needs loss_reduction="mean" and the expected batch size')
        size = sum(p.numel() for p in self.params)
        start = float(self.max_grad_norm) ** 2 / size
        self._means = [torch.zeros_like(p) for p in self.params]
        self._variances = [torch.full_like(p, start) for p in self.params]

    def _scales(self) -> list[Tensor]:
        """The width of each coordinate: b = sqrt(s) sqrt(sum of all s), with s the deviation."""
        deviations = [v.sqrt() for v in self._variances]
        total = sum(float(s.sum(dtype=torch.float64)) for s in deviations)
        return [s.mul(total).sqrt() for s in deviations]

    def transforms(self) -> list[tuple[Tensor, Tensor]]:
        """(centre, factor) of each trainable tensor: what is clipped is (g - centre) * factor."""
        clip = float(self.max_grad_norm)
        return [(m, clip / b) for m, b in zip(self._means, self._scales(), strict=True)]

    def clip_and_accumulate(self) -> None:
        """Centre and scale the gradients of each example, then clip."""
        for p, (centre, factor) in zip(self.params, self.transforms(), strict=True):
            _check_processed_flag(p.grad_sample)
            parts = p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]
            moved = [(part - centre) * factor for part in parts]
            p.grad_sample = moved if isinstance(p.grad_sample, list) else moved[0]
        super().clip_and_accumulate()

    @torch.no_grad()
    def scale_grad(self) -> None:
        """Undo centre and scale on the noisy mean, and learn from it."""
        super().scale_grad()
        clip, size = float(self.max_grad_norm), float(self.expected_batch_size)
        for index, (p, b) in enumerate(zip(self.params, self._scales(), strict=True)):
            away = p.grad * (b / clip)
            seen = away.square() - (self.noise_multiplier * b / size).square()
            seen.clamp_(self._LEAST, self._MOST)
            p.grad = away + self._means[index]
            self._means[index] = self._means[index] + (1 - self._MEAN) * away
            kept = self._VARIANCE * self._variances[index]
            self._variances[index] = kept + (1 - self._VARIANCE) * seen


class LargestNormNoise(ClippingRule):
    """Noise in proportion to the largest clipped norm of the batch: NOT differentially private.

    This is "l2-max" of Wei and Liu (TIFS 2021), "dynS" where max_grad_norm decays. The scale of
    the noise shows in each of its coordinates, and tells that norm. The Recorder logs the realised
    noise and marks the run void.
    """

    clipping = "flat"
    no_privacy = LARGEST_NORM

    def __init__(self, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        self._largest, self._given, self._realised = 0.0, 0.0, 0.0

    def clip_and_accumulate(self) -> None:
        """Clip, and remember the largest norm that is left."""
        norms = self._norms().clamp(max=float(self.max_grad_norm))
        self._largest = max([self._largest, *norms.tolist()])
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Add noise; an empty batch, which has no norm, gets that of max_grad_norm."""
        self._given = self.noise_multiplier
        if self._largest > 0:
            self.noise_multiplier *= self._largest / self.max_grad_norm
        self._realised, self._largest = self.noise_multiplier, 0.0
        super().add_noise()

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; until it ends, `noise_multiplier` is the realised one."""
        updates = super().pre_step(closure)
        if updates and self.noise_multiplier == self._realised:  # the step hook did not set it
            self.noise_multiplier = self._given
        return updates
