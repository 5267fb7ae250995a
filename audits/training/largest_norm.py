"""Noise that protects nobody, to reproduce a paper."""

from collections.abc import Callable
from typing import Any

import torch

from indpriv.norm_log.evidence import LARGEST_NORM
from indpriv.recording.clipping import ClippingRule


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
