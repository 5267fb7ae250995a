"""How noise and clipping moved over training, and what historical rules make of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indpriv._plain import AtLeastZero, Count
from indpriv.accountant.composition.historical_rules import ComposedEpsilons, composed_epsilons
from indpriv.analysis.schedule.curve import Curve
from indpriv.norm_log.norm_log import NormLog

_SHOWN = 200  # steps
_SAME = 1e-9  # a relative difference that rounding explains
_MOST_SETTINGS = 20_000  # different ones, for which the rules take seconds


@dataclass(frozen=True)
class ScheduleFindings:
    """Settings at evenly spaced steps; each of the first four fields has one value for each.

    Attributes:
        steps: their numbers. noise_std: noise_multiplier times max_grad_norm. Quantile clipping
            adds slightly more to the sum of gradients, since its multiplier is of two releases.
        max_grad_norm, noise_multiplier: as accounted.
        curve: test accuracy at checkpoints; None where the run kept none.
        rules: the worst case by the rules of the papers on dynamic parameters; they are not
            bounds. None without Poisson sampling.
    """

    steps: tuple[Count, ...]
    max_grad_norm: tuple[AtLeastZero, ...]
    noise_multiplier: tuple[AtLeastZero, ...]
    noise_std: tuple[AtLeastZero, ...]
    curve: Curve | None = None
    rules: ComposedEpsilons | None = None

    @property
    def moves(self) -> bool:
        """Whether noise or clipping changed while training."""
        return any(len(set(column)) > 1 for column in (self.max_grad_norm, self.noise_multiplier))

    @property
    def held_fixed(self) -> str:
        """What stayed the same at all steps: noise multiplier, standard deviation, or both."""
        columns = {
            "noise multiplier": self.noise_multiplier,
            "noise standard deviation": self.noise_std,
        }
        still = [name for name, column in columns.items() if np.ptp(column) <= _SAME * max(column)]
        return " and ".join(still) or "neither"


def schedule_of(log: NormLog, delta: float, curve: Curve | None) -> ScheduleFindings:
    """Settings over the training of a log; delta is that of the account."""
    settings, n = log.settings, log.total_steps
    shown = np.unique(np.linspace(0, n - 1, min(n, _SHOWN)).astype(np.int64))
    clip, noise = settings.max_grad_norm[shown], settings.noise_multiplier[shown]
    rules = None
    if log.sampler == "poisson" and len(np.unique(settings.noise_multiplier)) <= _MOST_SETTINGS:
        rules = composed_epsilons(
            settings.noise_multiplier, settings.sample_rate, total_steps=n, delta=delta
        )
    return ScheduleFindings(
        tuple(shown.tolist()),
        tuple(clip.tolist()),
        tuple(noise.tolist()),
        tuple((clip * noise).tolist()),
        curve,
        rules if rules is not None and np.isfinite(list(vars(rules).values())).all() else None,
    )
