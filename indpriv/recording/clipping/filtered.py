"""Clipping under a privacy filter: an example that would pass the cap is clipped at 0 from then on. Sensitive.

Before each step, whoever is drawn, every example still there is charged for its clip threshold of that step: a function
of the trajectory and of the example, never of a batch. Rows of one unit are charged together, and leave together. `indpriv.PrivacyFilter` says what that guarantees.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indpriv.errors import EvidenceError
from indpriv.norm_log.norm_log import NormLog
from indpriv.recording.clipping.individual import ClipLevels
from indpriv.recording.opacus.tally import StepSetting


class Filter(Protocol):
    """What a privacy filter charges; `indpriv.PrivacyFilter`."""

    @property
    def order(self) -> float:
        """Rényi order, fixed before training."""
        ...

    @property
    def rdp_cap(self) -> float:
        """What nobody passes."""
        ...

    def charges(
        self,
        relative_norms: NDArray[np.float64],
        *,
        noise_multiplier: float,
        sample_rate: float,
        units: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        """(n,) divergence of one step at clip thresholds (n,), as fractions of max_grad_norm; of units where rows have some."""
        ...

    def spent(self, log: NormLog, left_out_at: NDArray[np.int64]) -> NDArray[np.float64]:
        """(n_examples,) what the log of a run says each example spent before the step that left it out."""
        ...


class FilteredClipping:
    """Who is still there, and what each example has spent."""

    def __init__(
        self,
        policy: Filter,
        levels: ClipLevels | None,
        n_examples: int,
        units: NDArray[np.int64] | None = None,
    ) -> None:
        """Everybody is there and has spent nothing.

        Args:
            policy: what is charged, and the cap.
            levels: of individual clipping; None where everybody is clipped at max_grad_norm.
            n_examples: of the data set.
            units: (n_examples,) number of the unit each row belongs to, from 0 on; None where a row is a unit.
        """
        self._policy, self._levels, self._units = policy, levels, units
        self._everybody = np.arange(n_examples)
        self.spent = np.zeros(n_examples)
        self.present = np.ones(n_examples, dtype=bool)
        self._charged: tuple[int, StepSetting] | None = None  # the step that was charged last
        self._charges: tuple[StepSetting, int, NDArray[np.float64]] | None = None
        self._newly: list[tuple[int, NDArray[np.int64]]] = []

    def restore(self, log: NormLog, left_out_at: NDArray[np.int64]) -> None:
        """Go on where the log of a run ends; left_out_at (n_examples,) as it says, total_steps where an example stayed."""
        self.spent = self._policy.spent(log, left_out_at)
        self.present = left_out_at >= log.total_steps

    def charge(self, step: int, setting: StepSetting) -> None:
        """Charge everybody who is there for the step about to be taken, once, and leave out who would pass the cap.

        Raises:
            EvidenceError: the step was charged under other settings, before its first batch was clipped.
        """
        if self._charged is not None and self._charged[0] == step:
            if self._charged[1] != setting:
                raise EvidenceError(
                    f"the settings of step {step} moved from {self._charged[1]} to {setting} after the privacy filter had "
                    "charged for it; change noise, clipping and sampling between steps only"
                )
            return
        charges = self._charges_of(setting)
        beyond = self.present & (self.spent + charges > self._policy.rdp_cap)
        if beyond.any():
            self.present = self.present & ~beyond
            self._newly.append((step, np.flatnonzero(beyond)))
        self.spent += np.where(self.present, charges, 0.0)
        self._charged = step, setting

    def thresholds(self, positions: NDArray[np.int64], max_grad_norm: float) -> Tensor:
        """Clip thresholds (n,) float64 of the examples at these positions, for the step that was charged last."""
        present = torch.as_tensor(self.present[positions])
        if self._levels is None:
            return present * max_grad_norm
        return present * self._levels.thresholds(positions, max_grad_norm)

    def newly_left_out(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions and steps (n,) of who was left out and is not logged yet."""
        positions = [found for _, found in self._newly]
        steps = [np.full(len(found), step) for step, found in self._newly]
        return np.concatenate([*positions, self._everybody[:0]]), np.concatenate(
            [*steps, self._everybody[:0]]
        )

    def logged(self) -> None:
        """Who was left out up to now is in the log."""
        self._newly = []

    def _charges_of(self, setting: StepSetting) -> NDArray[np.float64]:
        """(n_examples,) of one step; computed anew where the setting or the levels have changed."""
        version = 0 if self._levels is None else self._levels.version
        if self._charges is None or self._charges[:2] != (setting, version):
            relative = np.ones(len(self._everybody))
            if self._levels is not None:
                relative = (
                    self._levels.bounds(self._everybody, setting.max_grad_norm)
                    / setting.max_grad_norm
                )
            charges = self._policy.charges(
                relative,
                noise_multiplier=setting.noise_multiplier,
                sample_rate=setting.sample_rate,
                units=self._units,
            )
            self._charges = setting, version, charges
        return self._charges[2]
