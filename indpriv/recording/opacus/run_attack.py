"""What an attack on a run sees while the run trains, and what a Recorder asks of it. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn

from indpriv._arrays import IntArray
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.norm_log.step_settings import StepSetting
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.training_data import Examples, TrainingData


@dataclass(frozen=True)
class AttackedRun:
    """A run that is about to train.

    Attributes:
        run: model, optimizer and loader.
        data: what it trains on.
        train, test: the same, as passes read it; test is None without a test set.
        norm_pass: of the model.
        clips_at_levels: examples have clip thresholds of their own.
    """

    run: OpacusRun
    data: TrainingData
    train: Examples
    test: Examples | None
    norm_pass: NormPass
    clips_at_levels: bool

    def check_one_rank_of_poisson(self, attack: str) -> None:
        """Raise InputError unless one rank trains on Poisson batches."""
        if type(self.run.batch_sampler) is not UniformWithReplacementSampler:
            raise InputError(
                f"{attack} need one rank that draws Poisson batches, but the loader draws with "
                f"{self.run.sampler_class}; pass poisson_sampling=True to make_private and train "
                "on one rank"
            )


@dataclass(frozen=True)
class AttackedStep:
    """One update whose noise is about to be added, or was added.

    Attributes:
        setting: realised settings.
        drawn: positions of the examples in its batch.
        drawn_canaries: numbers of the canaries that the sampler drew.
    """

    setting: StepSetting
    drawn: IntArray
    drawn_canaries: IntArray


class StartedAttack(Protocol):
    """An attack that watches every update of one run.

    Attributes:
        file_name: of its scores, in the run directory.
        n_canaries: number of canaries that the run's sampler draws besides the examples.
    """

    file_name: str
    n_canaries: int

    def before_noise(self, step: AttackedStep) -> None:
        """Called when the clipped gradients of a step are summed up."""
        ...

    def after_noise(self, step: AttackedStep) -> None:
        """Called when p.grad holds the noisy sum, before it is divided by the batch size."""
        ...

    def scores(self, model: nn.Module) -> AttackScores:
        """Scores at the end; model: the final model in eval mode."""
        ...


class RunAttack(Protocol):
    """What a Recorder takes as `attack=`."""

    def start(self, attacked: AttackedRun) -> StartedAttack:
        """Prepare to watch a run; InputError if the attack does not fit it."""
        ...
