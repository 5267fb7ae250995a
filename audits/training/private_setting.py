"""An audit's model, optimizer and loader made private by Opacus."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants import IAccountant
from opacus.data_loader import DPDataLoader
from torch import nn

from audits.training.config import AuditConfig, TrainingConfig
from audits.training.datasets import Dataset
from audits.training.largest_norm import LargestNormNoise
from audits.training.models import LOSSES, first_parameters
from audits.training.randomness import Randomness, generator
from audits.training.step_plan import (
    plan_of,
    with_noise,
    worst_case_epsilon,
)
from audits.training.tensors import BatchedTensorDataset, tensor_set, whole_batch
from indpriv.norm_log.fields import StepSettings
from indpriv.recording.attacks import PlannedLoader
from indpriv.recording.clipping import AdaClip, QuantileClipping
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.training_data import Examples, norms_of

_CHECKED = 64  # number of examples that the norm pass is checked on


@dataclass(frozen=True)
class PrivateSetting:
    """What `PrivacyEngine.make_private` makes of a model, an optimizer and a loader.

    Attributes:
        module: the model itself; `model` wraps it.
        train_set: the data that the loader draws from.
        settings: of the training, with its noise.
        planned: settings of every step.
        clipping_norm_epsilon: what the private median cost that the clipping norm is; 0 if it was
            given.
    """

    module: nn.Module
    train_set: BatchedTensorDataset
    model: nn.Module
    optimizer: Any
    criterion: Callable[..., Any]
    loader: DPDataLoader
    accountant: IAccountant
    settings: TrainingConfig
    planned: StepSettings
    clipping_norm_epsilon: float = 0.0

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return len(self.planned)

    @property
    def steps_taken(self) -> int:
        """Number of updates so far, as the accountant counts them."""
        return sum(steps for _, _, steps in self.accountant.history)

    def worst_case_epsilon(self, delta: float, lost: int = 0) -> float:
        """Epsilon of the clipping norm and the steps taken, these by Opacus's RDP accountant.

        lost: number of steps besides these, which count at the least noise of the run.
        """
        return self.clipping_norm_epsilon + self._epsilon_of_steps(delta, lost)

    def _epsilon_of_steps(self, delta: float, lost: int) -> float:
        history = self.accountant.history
        if len(history) <= 1 and not lost:
            return float(self.accountant.get_epsilon(delta))
        noise, rates, steps = np.array(history).reshape(-1, 3).T
        by_step = np.repeat(noise, steps.astype(np.int64))
        least = np.full(lost, self.planned.noise_multiplier.min())
        rate = max(self.planned.at(0).sample_rate, *rates)
        return worst_case_epsilon(np.concatenate([by_step, least]), rate, delta)

    def set_step(self, step: int) -> None:
        """Give Opacus the learning rate, noise and clipping norm of a step that comes next."""
        law, config = self.law(step), self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = law["lr"]
        self.optimizer.noise_multiplier = law["noise_multiplier"]
        if (clip := law.get("max_grad_norm")) is None:
            return
        self.optimizer.max_grad_norm = clip
        if config.clipping == "per_layer":
            n_layers = len(self.optimizer.params)
            self.optimizer.max_grad_norms = [clip / math.sqrt(n_layers)] * n_layers
        if config.grad_sample_mode == "ghost":  # the model clips, the optimizer adds noise
            cast(Any, self.model).max_grad_norm = clip

    def law(self, step: int) -> dict[str, float]:
        """Settings of a step by the public plan; a quantile moves the clipping norm by itself."""
        setting, config = self.planned.at(step), self.settings
        rate = config.learning_rate * config.learning_rate_factor(step, self.total_steps)
        law = {"lr": rate, "noise_multiplier": setting.noise_multiplier}
        if config.clipping != "quantile":
            law["max_grad_norm"] = setting.max_grad_norm
        return law

    def public_law(self, step: int) -> dict[str, float]:
        """The law at an update, before which the step hook has moved the learning rate on."""
        following = min(step + 1, self.total_steps - 1)
        return self.law(step) | {"lr": self.law(following)["lr"]}


def make_private(
    config: AuditConfig,
    dataset: Dataset,
    randomness: Randomness,
    device: str,
    n_planned: int | None = None,
    clipping_norm: float | None = None,
) -> PrivateSetting:
    """Build an audit's model and let Opacus make its training private.

    Sampling rate, noise and the divisor of gradients follow from n_planned examples; default those
    of the data set. clipping_norm is the private median that a resumed run drew when it was begun.

    Raises:
        InputError: the model does not take the data, or no noise reaches the target epsilon.
    """
    settings = config.training
    module = first_parameters(
        config.model, dataset.input_shape, dataset.n_classes, randomness.first_parameters
    ).to(device)
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    criterion, train_set = LOSSES[settings.loss](), tensor_set(dataset.train)
    spent = settings.median_epsilon or 0.0
    if spent:
        norm = clipping_norm or _median_norm(module, train_set, settings, randomness)
        settings = settings.with_clipping_norm(norm)
    return made_private(
        module, optimizer, criterion, train_set, settings, randomness, n_planned, spent
    )


def _median_norm(
    module: nn.Module,
    train_set: BatchedTensorDataset,
    settings: TrainingConfig,
    randomness: Randomness,
) -> float:
    """The private median of the norms of all examples at the model's parameters.

    A seeded run draws it by its seed, from the same law.
    """
    from indpriv.release.mechanisms import private_median_norm  # OpenDP takes time to import

    examples = Examples(train_set, whole_batch, next(module.parameters()).device)
    loss_fn, first = LOSSES[settings.loss](reduction="none"), next(examples.batches(_CHECKED))
    with NormPass(module, loss_fn, *first) as norm_pass:
        taken = norms_of(norm_pass, examples, np.arange(len(train_set)))
    seed = randomness.clipping_norm if randomness.seeded else None
    return private_median_norm(taken.norms, epsilon=settings.median_epsilon or 0.0, seed=seed)


def made_private(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: nn.Module,
    train_set: BatchedTensorDataset,
    settings: TrainingConfig,
    randomness: Randomness,
    n_planned: int | None = None,
    clipping_norm_epsilon: float = 0.0,
) -> PrivateSetting:
    """Let Opacus make the training of a model private.

    Args:
        module: the model, on its device.
        optimizer: of its parameters.
        criterion: mean loss of a batch.
        train_set: what it is trained on.
        settings: noise, clipping and batches.
        randomness: seeds of sampling and noise.
        n_planned: examples behind sampling rate, noise and divisor; default those of train_set.
        clipping_norm_epsilon: what the clipping norm cost, if it was drawn from train_set.

    Raises:
        InputError: no noise reaches the target epsilon.
    """
    n_planned = n_planned or len(train_set)
    _warn_of_delta(settings.delta, len(train_set))
    loader = _loader(train_set, n_planned, settings.batch_size, randomness)
    settings = with_noise(settings, n_planned)
    planned = plan_of(settings, n_planned)
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=module,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=planned.at(0).noise_multiplier,
        max_grad_norm=_first_clipping_norm(module, settings, planned),
        clipping="per_layer" if settings.clipping == "per_layer" else "flat",
        noise_generator=generator(
            randomness.noise, next(module.parameters()).device, private=not randomness.seeded
        ),
        grad_sample_mode=settings.grad_sample_mode,
    )
    model, made_optimizer, *criteria, private_loader = made  # ghost mode has its own criterion
    made_optimizer.expected_batch_size = int(n_planned * (1 / len(loader)))
    private_optimizer = _with_rule(made_optimizer, settings)
    private = PrivateSetting(
        module=module,
        train_set=train_set,
        model=model,
        optimizer=private_optimizer,
        criterion=criteria[0] if criteria else criterion,
        loader=private_loader,
        accountant=engine.accountant,
        settings=settings,
        planned=planned,
        clipping_norm_epsilon=clipping_norm_epsilon,
    )
    private_optimizer.attach_step_hook(_moving(private, private_optimizer.step_hook))
    private.set_step(0)  # in full precision: Opacus adds up the norms of layers in float32
    return private


def _loader(
    train_set: BatchedTensorDataset, n_planned: int, batch_size: int, randomness: Randomness
) -> PlannedLoader:
    return PlannedLoader(
        train_set,
        n_planned=n_planned,
        batch_size=batch_size,
        collate_fn=whole_batch,
        generator=generator(randomness.sampling, private=not randomness.seeded),
    )


def _first_clipping_norm(
    module: nn.Module, settings: TrainingConfig, planned: StepSettings
) -> float | list[float]:
    """Of the first step; per layer, equal ones that make up the whole."""
    whole = planned.at(0).max_grad_norm
    if settings.clipping != "per_layer":
        return whole
    n_layers = sum(p.requires_grad for p in module.parameters())
    return [whole / math.sqrt(n_layers)] * n_layers


def _moving(
    private: PrivateSetting, accountant_hook: Callable[[Any], None]
) -> Callable[[Any], None]:
    """A step hook that counts the step, then moves noise and clipping to those of the next one."""

    def hook(optimizer: Any) -> None:
        accountant_hook(optimizer)
        if private.steps_taken < private.total_steps:
            private.set_step(private.steps_taken)

    return hook


def _with_rule(optimizer: Any, settings: TrainingConfig) -> Any:
    """The optimizer with the clipping and the noise that Opacus does not have."""
    if settings.noise_scale == "largest_norm":
        return LargestNormNoise.of(optimizer)
    if settings.clipping == "adaclip":
        return AdaClip.of(optimizer)
    if settings.clipping != "quantile":
        return optimizer
    count_noise = (settings.quantile_noise or 0.05) * optimizer.expected_batch_size
    options = {"quantile": settings.quantile, "rate": settings.quantile_rate}
    given = {name: value for name, value in options.items() if value is not None}
    return QuantileClipping.of(optimizer, count_noise=count_noise, **given)


def _warn_of_delta(delta: float, n_examples: int) -> None:
    if delta >= 1 / n_examples:
        warnings.warn(
            f"delta={delta:g} is not below 1/n={1 / n_examples:.2g}: such a delta allows "
            "publishing a whole example; choose it well below 1/n",
            stacklevel=5,
        )


@contextmanager
def quiet_opacus() -> Iterator[None]:
    """Ignore warnings that Opacus and torch give in every private run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")  # run.json says so
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # inputs have no grad
        # The best order is at an end of Opacus's grid: epsilon is then larger than necessary, and
        # never too small.
        warnings.filterwarnings("ignore", "Optimal order is the")
        yield
