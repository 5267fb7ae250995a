"""Clipping under a privacy filter: examples that would exceed its cap are left out. Sensitive.

An example is left out by clipping it at 0 from then on. Before each step, every example that is not
yet left out is charged for its clip threshold of that step, whether it is drawn or not: the
threshold depends on the trajectory and on the example, never on a batch. Rows of one unit are
charged, and left out, together. `indpriv.PrivacyFilter` says what this guarantees.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from indpriv._arrays import FloatArray, IntArray
from indpriv.errors import EvidenceError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.step_settings import StepSetting
from indpriv.recording.clipping.individual import ClipLevels


class Filter(Protocol):
    """What a privacy filter charges; `indpriv.PrivacyFilter`."""

    @property
    def order(self) -> float:
        """Rényi order, fixed before training."""
        ...

    @property
    def rdp_cap(self) -> float:
        """Divergence at that order that no example may exceed."""
        ...

    def charges(
        self,
        relative_norms: FloatArray,
        *,
        noise_multiplier: float,
        sample_rate: float,
        units: IntArray | None = None,
    ) -> FloatArray:
        """(n,) divergence of one step at clip thresholds (n,), given as fractions of max_grad_norm.

        With units (n,), each row is charged what all rows of its unit cost together.
        """
        ...

    def spent(self, log: NormLog, left_out_at: IntArray) -> FloatArray:
        """(n_examples,) what each example of a log spent before the step that left it out."""
        ...


class FilteredClipping:
    """What each example has spent, and which examples are still present."""

    def __init__(
        self,
        policy: Filter,
        levels: ClipLevels | None,
        n_examples: int,
        units: IntArray | None = None,
    ) -> None:
        """Begin with all examples present and nothing spent.

        Without levels (of individual clipping), all examples are clipped at max_grad_norm. units
        (n_examples,) numbers the unit of each row from 0; None if each row is a unit.
        """
        self._policy, self._levels, self._units = policy, levels, units
        self._positions = np.arange(n_examples)
        self.spent = np.zeros(n_examples)
        self.present = np.ones(n_examples, dtype=bool)
        self._charged: tuple[int, StepSetting] | None = None  # the step that was charged last
        # Of one step, and what they depend on: its setting and the version of the levels.
        self._charges: tuple[StepSetting, int, FloatArray] | None = None
        self._unlogged: list[tuple[int, IntArray]] = []  # steps, and positions left out

    def restore(self, log: NormLog, left_out_at: IntArray) -> None:
        """Continue where a log ends; left_out_at (n_examples,) as `read_left_out` returns it."""
        self.spent = self._policy.spent(log, left_out_at)
        self.present = left_out_at >= log.total_steps

    def charge(self, step: int, setting: StepSetting) -> None:
        """Charge present examples for the coming step; leave out those that would exceed the cap.

        A step is charged once, however many micro-batches it has.

        Raises:
            EvidenceError: the step was already charged, under other settings.
        """
        if self._charged is not None and self._charged[0] == step:
            if self._charged[1] != setting:
                raise EvidenceError(
                    f"the settings of step {step} changed from {self._charged[1]} to {setting} "
                    "after the privacy filter had charged for it; change noise, clipping and "
                    "sampling between steps only"
                )
            return
        charges = self._charges_of(setting)
        beyond = self.present & (self.spent + charges > self._policy.rdp_cap)
        if beyond.any():
            self.present = self.present & ~beyond
            self._unlogged.append((step, np.flatnonzero(beyond)))
        self.spent += np.where(self.present, charges, 0.0)
        self._charged = step, setting

    def thresholds(self, positions: IntArray, max_grad_norm: float) -> Tensor:
        """Clip thresholds (n,) float64 at these positions, for the step that was charged last."""
        present = torch.as_tensor(self.present[positions])
        if self._levels is None:
            return present * max_grad_norm
        return present * self._levels.thresholds(positions, max_grad_norm)

    def newly_left_out(self) -> tuple[IntArray, IntArray]:
        """Positions (n,) left out but not logged yet, and the steps (n,) that left them out."""
        none = self._positions[:0]
        positions = [found for _, found in self._unlogged]
        steps = [np.full(len(found), step) for step, found in self._unlogged]
        return np.concatenate([*positions, none]), np.concatenate([*steps, none])

    def logged(self) -> None:
        """All examples that were left out so far are in the log."""
        self._unlogged = []

    def _charges_of(self, setting: StepSetting) -> FloatArray:
        """(n_examples,) of one step; computed again only if setting or levels have changed."""
        version = 0 if self._levels is None else self._levels.version
        if self._charges is None or self._charges[:2] != (setting, version):
            clip = setting.max_grad_norm
            relative = np.ones(len(self._positions))
            if self._levels is not None:
                relative = self._levels.bounds(self._positions, clip) / clip
            charges = self._policy.charges(
                relative,
                noise_multiplier=setting.noise_multiplier,
                sample_rate=setting.sample_rate,
                units=self._units,
            )
            self._charges = setting, version, charges
        return self._charges[2]
