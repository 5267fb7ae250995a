"""Gradient canaries: made-up gradients in any Opacus run, to audit it in one run. Sensitive.

Each canary is a gradient along one coordinate of its own, so canaries are orthogonal and their
scores are independent. A fair coin makes it a member; the run's own sampler draws it as it draws
examples; if it is a member, its gradient is added to the sum of clipped gradients, before the
noise. At the end its score is the log-likelihood ratio of all noisy updates along its coordinate.

Canaries are no data: the guarantee of the examples stays. The noise on a canary's coordinate is
perturbed by at most max_grad_norm in the steps that drew it. Clipping is tested only by canaries
that pass it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from indpriv._checks import check_positive_int, check_row
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray
from indpriv.attack_scores import AttackScores, log_likelihood_ratio
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.run_files import GRADIENT_CANARIES
from indpriv.recording.opacus.draws import Draw
from indpriv.recording.watch import AttackedRun

METHOD = "likelihood ratio of gradient canaries"
_TOO_LONG = 10.0  # max_grad_norms: a canary of full length that clipping has to shorten
_AT_ONCE = 1 << 24  # values of gradients that are clipped together


@dataclass(frozen=True)
class GradientCanaries:
    """Insert gradient canaries into the run.

    Args:
        count: number of canaries, at most the number of trainable parameters. Each perturbs the
            noise on one coordinate.
        lengths: norms of their gradients over max_grad_norm, in (0, 1], taken in turn. Canaries of
            full length test the worst case, shorter ones the epsilon of an example of that norm.
        through_clipping: the optimizer's own clipping is tested too. Canaries pass it as examples
            do, those of full length at ten times max_grad_norm. Not in ghost mode; each canary that
            a step draws costs as much memory as an example.
        seed: makes coordinates and coins reproducible: for tests. None draws them from the
            operating system.

    >>> from indpriv.recording import GradientCanaries, Recorder
    >>> recorder = Recorder("runs/mine", dataset=train_set, loss_fn=loss_fn,  # doctest: +SKIP
    ...                     attack=GradientCanaries(1000))
    """

    count: int
    lengths: Sequence[float] = (1.0,)
    through_clipping: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("count", self.count)
        check_row("lengths", self.lengths, lambda x: (x > 0) & (x <= 1), "numbers in (0, 1]")

    def start(self, attacked: AttackedRun) -> Canaries:
        """Choose coordinates and flip the coins."""
        attacked.check_one_rank_of_poisson("gradient canaries")
        parameters: list[Any] = [p for p in attacked.run.module.parameters() if p.requires_grad]
        n_coordinates = sum(p.numel() for p in parameters)
        if self.count > n_coordinates:
            raise refused("refusal.attacks", "too_many", count=self.count, n=n_coordinates)
        if self.through_clipping and (attacked.run.is_ghost or attacked.clips_at_levels):
            raise refused("refusal.attacks", "through_clipping")
        return Canaries(self, attacked, parameters, n_coordinates)


class Canaries:
    """The canaries of one run, and the evidence that each has left so far."""

    file_name = GRADIENT_CANARIES

    def __init__(
        self, asked: GradientCanaries, attacked: AttackedRun, parameters: list[Any], total: int
    ) -> None:
        """Choose coordinates, counted through all parameters, and flip the coins."""
        rng, optimizer = np.random.default_rng(asked.seed), attacked.run.optimizer
        self.n_canaries, self._parameters = asked.count, parameters  # Opacus adds grad_sample
        coordinates = rng.choice(total, asked.count, replace=False)
        self._member = rng.random(asked.count) < 0.5
        self._lengths = np.resize(np.asarray(asked.lengths, dtype=np.float64), asked.count)
        # Adds the clipped sum of grad_sample to summed_grad; None: canaries are added unclipped.
        self._clip = optimizer.clip_and_accumulate if asked.through_clipping else None
        self._evidence = self._before = np.zeros(asked.count)
        # Where they live: a parameter, its canaries, and an index of their coordinates in it.
        self._places: list[tuple[Any, IntArray, tuple[Tensor, ...]]] = []
        ends = np.cumsum([p.numel() for p in parameters])
        owner = np.searchsorted(ends, coordinates, side="right")
        for k, p in enumerate(parameters):
            numbers = np.flatnonzero(owner == k)
            positions = torch.as_tensor(coordinates[numbers] - ends[k] + p.numel())
            index = torch.unravel_index(positions.to(p.device), p.shape)
            self._places += [(p, numbers, index)] if len(numbers) else []

    def before_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Add the gradients of the members that were drawn to the clipped sum."""
        added = np.zeros(self.n_canaries)
        added[draw.canaries] = setting.max_grad_norm
        added *= self._lengths * self._member
        self._before = self._read("summed_grad")
        if self._clip is None:
            self._add(added)
        else:
            self._add_clipped(added * np.where(self._lengths == 1, _TOO_LONG, 1.0), self._clip)

    def _read(self, name: str) -> FloatArray:
        """Values (n_canaries,) of the parameters' summed_grad or grad at the coordinates."""
        seen = np.zeros(self.n_canaries)
        for p, canaries, index in self._places:
            seen[canaries] = getattr(p, name).detach()[index].double().cpu().numpy()
        return seen

    def _add(self, added: FloatArray) -> None:
        """Add to the clipped sum at the coordinates."""
        for p, canaries, index in self._places:
            p.summed_grad[index] += torch.as_tensor(added[canaries]).to(p.summed_grad)

    def _add_clipped(self, added: FloatArray, clip: Callable[[], None]) -> None:
        """Let the optimizer clip gradients of norms (n_canaries,), in batches of their own."""
        drawn = np.flatnonzero(added)
        size = max(1, _AT_ONCE // sum(p.numel() for p in self._parameters))
        examples = [getattr(p, "grad_sample", None) for p in self._parameters]
        for part in np.split(drawn, range(size, len(drawn), size)):
            for p in self._parameters:
                p.grad_sample = p.new_zeros((len(part), *p.shape))
            for p, canaries, index in self._places:
                inside = np.flatnonzero(np.isin(canaries, part))
                rows = torch.as_tensor(np.searchsorted(part, canaries[inside])).to(p.device)
                values = torch.as_tensor(added[canaries[inside]]).to(p.grad_sample)
                p.grad_sample[(rows, *(one[inside] for one in index))] = values
            clip()
        for p, samples in zip(self._parameters, examples, strict=True):
            p.grad_sample = samples

    def after_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Score what the update says along each coordinate."""
        noise = self._read("grad") - self._before
        self._evidence = self._evidence + log_likelihood_ratio(
            noise / (setting.noise_multiplier * setting.max_grad_norm),
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
