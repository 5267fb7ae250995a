"""Gradient canaries: made-up gradients in any Opacus run, to audit it in one run. Sensitive.

Each canary is a gradient along one coordinate of its own, so canaries are orthogonal and their
scores are independent. A fair coin makes it a member; the run's own sampler draws it as it draws
examples; if it is a member, its gradient is added to the sum of clipped gradients, before the
noise. At the end its score is the log-likelihood ratio of all noisy updates along its coordinate.

Canaries are no data: the guarantee of the examples stays. The noise on a canary's coordinate is
perturbed by at most max_grad_norm in the steps that drew it. Clipping is not tested, since canaries
enter after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv._checks import check_positive_int, check_row
from indpriv._likelihood import log_likelihood_ratio
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.norm_log.run_files import GRADIENT_CANARIES
from indpriv.recording.opacus.run_attack import AttackedRun, AttackedStep

METHOD = "likelihood ratio of gradient canaries"


@dataclass(frozen=True)
class GradientCanaries:
    """Insert gradient canaries into the run.

    Args:
        count: number of canaries, at most the number of trainable parameters. Each perturbs the
            noise on one coordinate.
        lengths: norms of their gradients over max_grad_norm, in (0, 1], taken in turn. Canaries of
            full length test the worst case, shorter ones the epsilon of an example of that norm.
        seed: makes coordinates and coins reproducible: for tests. None draws them from the
            operating system.

    >>> from indpriv.recording import GradientCanaries, Recorder
    >>> recorder = Recorder("runs/mine", dataset=train_set, loss_fn=loss_fn,  # doctest: +SKIP
    ...                     attack=GradientCanaries(1000))
    """

    count: int
    lengths: Sequence[float] = (1.0,)
    seed: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("count", self.count)
        check_row("lengths", self.lengths, lambda x: (x > 0) & (x <= 1), "numbers in (0, 1]")

    def start(self, attacked: AttackedRun) -> Canaries:
        """Choose coordinates and flip the coins."""
        attacked.check_one_rank_of_poisson("gradient canaries")
        parameters = [p for p in attacked.run.module.parameters() if p.requires_grad]
        n_coordinates = sum(p.numel() for p in parameters)
        if self.count > n_coordinates:
            raise InputError(
                f"{self.count} gradient canaries need as many coordinates, but the model has "
                f"{n_coordinates} trainable parameters; insert fewer"
            )
        rng = np.random.default_rng(self.seed)
        coordinates = rng.choice(n_coordinates, self.count, replace=False)
        return Canaries(
            parameters,
            coordinates,
            lengths=np.resize(np.asarray(self.lengths, dtype=np.float64), self.count),
            member=rng.random(self.count) < 0.5,
        )


class Canaries:
    """The canaries of one run, and the evidence that each has left so far."""

    file_name = GRADIENT_CANARIES

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        coordinates: IntArray,
        *,
        lengths: FloatArray,
        member: BoolArray,
    ) -> None:
        """Place canaries; coordinates (n,) count through all parameters, lengths are relative."""
        self.n_canaries = len(coordinates)
        self._lengths, self._member = lengths, member
        self._evidence = np.zeros(self.n_canaries)
        ends = np.cumsum([p.numel() for p in parameters])
        owner = np.searchsorted(ends, coordinates, side="right")
        self._places = [
            _Place(p, numbers, torch.as_tensor(coordinates[numbers] - end + p.numel()))
            for k, (p, end) in enumerate(zip(parameters, ends.tolist(), strict=True))
            if len(numbers := np.flatnonzero(owner == k))
        ]
        self._before: list[FloatArray] = []

    def before_noise(self, step: AttackedStep) -> None:
        """Add the gradients of the members that were drawn to the clipped sum."""
        added = np.zeros(self.n_canaries)
        added[step.drawn_canaries] = step.setting.max_grad_norm
        added *= self._lengths * self._member
        self._before = []
        for place in self._places:
            total = place.parameter.summed_grad
            self._before.append(place.read(total))
            place.add(total, added[place.canaries])

    def after_noise(self, step: AttackedStep) -> None:
        """Score what the update says along each coordinate."""
        setting = step.setting
        seen = np.zeros(self.n_canaries)
        for place, before in zip(self._places, self._before, strict=True):
            seen[place.canaries] = place.read(place.parameter.grad) - before
        self._evidence += log_likelihood_ratio(
            seen / (setting.noise_multiplier * setting.max_grad_norm),
            relative_norm=self._lengths,
            noise_multiplier=setting.noise_multiplier,
            sample_rate=setting.sample_rate,
        )

    def scores(self, model: nn.Module) -> AttackScores:
        """The evidence for each canary's membership; groups are lengths."""
        return AttackScores(
            scores=self._evidence.copy(),
            member=self._member.copy(),
            method=METHOD,
            groups=np.array([f"{length:g}" for length in self._lengths], dtype=object),
            fair_coins=True,
            adversary="updates",
        )


@dataclass(frozen=True)
class _Place:
    """Where some canaries (n,) live in one parameter: positions (n,) in its flat order."""

    parameter: Any  # an nn.Parameter to which Opacus adds the attribute summed_grad
    canaries: IntArray
    positions: Tensor

    def _index(self, values: Tensor) -> tuple[Tensor, ...]:
        return torch.unravel_index(self.positions.to(values.device), values.shape)

    def read(self, values: Tensor) -> FloatArray:
        """Values of a tensor shaped as the parameter, at the canaries' coordinates."""
        return values.detach()[self._index(values)].double().cpu().numpy()

    def add(self, values: Tensor, added: FloatArray) -> None:
        """Add to them in place."""
        values[self._index(values)] += torch.as_tensor(added).to(values)
