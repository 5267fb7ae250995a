"""[training] of an audit file."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from audits.training.config.schedules import ClippingNorm, NumberOrSchedule, Schedule
from audits.training.config.values import (
    KNOWN_KEYS_ONLY,
    AtLeastZero,
    Count,
    Flag,
    Positive,
    Share,
)
from indpriv.errors import InputError

_NOT_FEDERATED: Any = Field(default=None)  # None in federated runs, which have rounds instead


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class TrainingConfig:
    """[training]: DP-SGD in Opacus's words.

    Attributes:
        epochs: passes over the data, in expectation. Pass either this or steps.
        batch_size: expected size of a Poisson batch; the sampling rate is
            1 / ceil(n / batch_size), as in Opacus.
        learning_rate: learning rate of SGD with momentum.
        max_grad_norm: clipping norm, a number or a schedule; or "median": the private median of the
            norms of all training examples at the first parameters, see
            `indpriv.release.private_median_norm`. The learning rate does not follow it.
        median_epsilon: of "median", the epsilon of its release, which is part of the worst case and
            of every individual epsilon; target_epsilon, stop_at_epsilon and filter_epsilon include
            it, so that the steps have the rest.
        delta: delta of every epsilon of the run.
        steps: number of steps.
        stop_at_epsilon: the run ends before the step with which the worst-case epsilon of one row
            would pass this; by plan, before it begins.
        target_epsilon: worst-case epsilon of one row; the noise is chosen to reach it. Pass either
            this or noise; or both, with noise as a schedule: its shape is kept, and it is
            multiplied by the number that reaches the target.
        noise_multiplier: noise standard deviation divided by max_grad_norm, a number or a schedule.
        noise_std: in its place, the noise standard deviation of a sum of gradients, a number or a
            schedule; noise_multiplier is then noise_std / max_grad_norm of each step.
        loss: "cross_entropy", or "hinge" (see `audits.training.models.HingeLoss`); also of the
            baseline.
        momentum: momentum of SGD.
        weight_decay: this times the parameters is added to the noisy gradient, which costs no
            privacy; the baseline has it, too.
        schedule: of the learning rate, also that of the baseline: "constant", or "cosine", which
            falls from learning_rate to 0 over the run (Loshchilov and Hutter 2017, without
            restarts). Noise and clipping norm have schedules of their own.
        clipping: "flat", or "per_layer": each of the M tensors of parameters is clipped at
            max_grad_norm / sqrt(M). Wei and Liu state clipping norm C and noise sigma of one layer;
            their run has max_grad_norm = C sqrt(M) and noise_multiplier = sigma / sqrt(M).
            "quantile": max_grad_norm is that of the first step and then follows a quantile of the
            norms; "adaclip": each coordinate is centred and scaled; see
            `indpriv.recording.QuantileClipping` and `AdaClip`.
        quantile: of "quantile", the share of gradients that are to stay unclipped; default 0.5.
        quantile_rate: of "quantile", the learning rate of the clipping norm; default 0.2.
        quantile_noise: of "quantile", the noise of the number of unclipped gradients, as a share
            of the expected batch size; default 0.05. noise_multiplier is that of both together.
        noise_scale: what the noise is in proportion to: "max_grad_norm", or "largest_norm" of the
            batch (l2-max and dynS of Wei and Liu), which is not differentially private.
        allow_no_privacy: the run may have no privacy; "largest_norm" needs it.
        individual_clipping: clip each example at its last recorded level, which makes the account
            exact however rarely norms are recorded.
        clip_headroom: how far that level is above the norm, as a fraction of max_grad_norm; None
            for the Recorder's default.
        filter_epsilon: limit of a privacy filter: no example's epsilon exceeds it at delta,
            whatever the noise; None for no filter.
        grad_sample_mode: how Opacus computes per-example gradients: "hooks", or "ghost" (less
            memory, often faster).
        max_physical_batch_size: number of examples that are computed at once; None for whole
            batches.
        non_private_baseline: also train the same model without privacy, to compare attacks.
        non_private_learning_rate: learning rate of the baseline; None for learning_rate.
        non_private_weight_decay: weight decay of the baseline; None for weight_decay.
        non_private_epochs: passes of the baseline over the data; None for as many steps as with DP.
            A baseline that trains for longer remembers more, which an attack can show.
    """

    max_grad_norm: ClippingNorm
    delta: Annotated[float, Field(strict=True, gt=0, lt=1)]
    batch_size: Count = _NOT_FEDERATED
    learning_rate: Positive = _NOT_FEDERATED
    epochs: Count | None = None
    steps: Count | None = None
    median_epsilon: Positive | None = None
    target_epsilon: Positive | None = None
    stop_at_epsilon: Positive | None = None
    noise_multiplier: NumberOrSchedule | None = None
    noise_std: NumberOrSchedule | None = None
    loss: Literal["cross_entropy", "hinge"] = "cross_entropy"
    momentum: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    weight_decay: AtLeastZero = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    clipping: Literal["flat", "per_layer", "quantile", "adaclip"] = "flat"
    quantile: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None
    quantile_rate: Positive | None = None
    quantile_noise: Positive | None = None
    noise_scale: Literal["max_grad_norm", "largest_norm"] = "max_grad_norm"
    allow_no_privacy: Flag = False
    individual_clipping: Flag = False
    clip_headroom: Share | None = None
    filter_epsilon: Positive | None = None
    grad_sample_mode: Literal["hooks", "ghost"] = "hooks"
    max_physical_batch_size: Count | None = None
    non_private_baseline: Flag = False
    non_private_learning_rate: Positive | None = None
    non_private_weight_decay: AtLeastZero | None = None
    non_private_epochs: Count | None = None

    def total_steps(self, steps_per_epoch: int) -> int:
        """Number of steps, unless stop_at_epsilon ends the run before."""
        return self.steps or (self.epochs or 0) * steps_per_epoch

    def learning_rate_factor(self, step: int, total_steps: int) -> float:
        """What the learning rate of a step is multiplied by.

        step: from 0 to total_steps - 1.
        """
        if self.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * step / total_steps))

    def with_clipping_norm(self, norm: float) -> TrainingConfig:
        """The training of the steps, once the median was drawn: without what it has spent."""
        spent = self.median_epsilon
        if spent is None:
            return self
        left = {name: value - spent for name, value in self._epsilons.items() if value is not None}
        return replace(self, max_grad_norm=norm, median_epsilon=None, **left)  # type: ignore[arg-type]

    @property
    def _epsilons(self) -> dict[str, float | None]:
        """Limits of the worst case, or of every example's epsilon."""
        names = ("target_epsilon", "stop_at_epsilon", "filter_epsilon")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        federated = self.batch_size is None
        if not federated and (self.epochs is None) == (self.steps is None):
            raise InputError(
                "it has neither epochs nor steps; give one of them"
                if self.epochs is None
                else "it has both epochs and steps; give one of them"
            )
        if self.stop_at_epsilon is not None and self.non_private_baseline:
            raise InputError(
                "stop_at_epsilon does not go with non_private_baseline, which would train for "
                "longer; give steps"
            )
        if self.noise_multiplier is not None and self.noise_std is not None:
            raise InputError("it has both noise_multiplier and noise_std; give one of them")
        noise = self.noise_std if self.noise_multiplier is None else self.noise_multiplier
        if self.target_epsilon is None and noise is None:
            raise InputError("it has neither target_epsilon nor noise_multiplier; give one of them")
        if self.target_epsilon is not None and not isinstance(noise, Schedule | None):
            name = "noise_std" if self.noise_multiplier is None else "noise_multiplier"
            raise InputError(
                f"it has both target_epsilon and {name}; give one of them, or a schedule, whose "
                "shape is kept"
            )
        self._check_clipping()
        _check_median(self)
        if self.clip_headroom is not None and not self.individual_clipping:
            raise InputError(
                "clip_headroom is given without individual clipping; set individual_clipping = "
                "true or leave it out"
            )
        for name in ("learning_rate", "weight_decay", "epochs"):
            name = f"non_private_{name}"
            if getattr(self, name) is not None and not self.non_private_baseline:
                raise InputError(
                    f"{name} is given without a baseline; set non_private_baseline = true or leave "
                    "it out"
                )

    def _check_clipping(self) -> None:
        """Raise InputError for what this kind of clipping or of noise does not go with."""
        largest = self.noise_scale == "largest_norm"
        if largest and not self.allow_no_privacy:
            raise InputError(
                'noise_scale = "largest_norm" is not differentially private: the size of the noise '
                "tells the largest norm of the batch; set allow_no_privacy = true, or leave it out"
            )
        for name in ("quantile", "quantile_rate", "quantile_noise"):
            if getattr(self, name) is not None and self.clipping != "quantile":
                raise InputError(f'{name} is for clipping = "quantile" only; leave it out')
        moves = isinstance(self.max_grad_norm, Schedule)
        others = {
            'grad_sample_mode = "ghost"': self.grad_sample_mode == "ghost",
            "individual_clipping": self.individual_clipping,
            "filter_epsilon": self.filter_epsilon is not None,
            "target_epsilon": largest and self.target_epsilon is not None,
            "stop_at_epsilon": largest and self.stop_at_epsilon is not None,
            f'clipping = "{self.clipping}"': largest and self.clipping != "flat",
            "a schedule of max_grad_norm": moves and self.clipping == "quantile",
            "noise_std": self.clipping == "quantile" and self.noise_std is not None,
        }
        if not largest and self.clipping == "flat":
            return
        kind = 'noise_scale = "largest_norm"' if largest else f'clipping = "{self.clipping}"'
        for name, given in others.items():
            if given:
                raise InputError(f"{kind} does not go with {name}; leave one out")


def _check_median(settings: TrainingConfig) -> None:
    """Raise InputError for what a private median as clipping norm lacks, or does not go with."""
    if settings.max_grad_norm != "median":
        if settings.median_epsilon is not None:
            raise InputError('median_epsilon is for max_grad_norm = "median" only; leave it out')
        return
    spent = settings.median_epsilon
    if spent is None:
        raise InputError(
            'max_grad_norm = "median" lacks median_epsilon, the epsilon of the private median of '
            "gradient norms, which is added to that of training; give e.g. median_epsilon = 0.1"
        )
    others = {
        f'clipping = "{settings.clipping}", whose norm moves or is not that of a gradient': (
            settings.clipping in ("quantile", "adaclip")
        ),
        "noise_std: noise that is not in proportion to the median gives no epsilon before it is "
        "drawn; give noise_multiplier": settings.noise_std is not None,
        'noise_scale = "largest_norm"': settings.noise_scale == "largest_norm",
    }
    for name, given in others.items():
        if given:
            raise InputError(f'max_grad_norm = "median" does not go with {name}')
    for name, limit in settings._epsilons.items():
        if limit is not None and limit <= spent:
            raise InputError(
                f"{name} = {limit:g} includes median_epsilon = {spent:g} and leaves nothing for "
                f"the steps; give a larger {name}, or a smaller median_epsilon"
            )
