"""An audit's model, optimizer and loader made private by Opacus."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants import IAccountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.data_loader import DPDataLoader
from torch import nn

from indpriv.errors import InputError
from indpriv.recording.attacks.mislabelled_canaries import PlannedLoader
from indpriv.training.config import AuditConfig, TrainingConfig
from indpriv.training.datasets import Dataset
from indpriv.training.models import first_parameters
from indpriv.training.randomness import Randomness, generator
from indpriv.training.tensors import BatchedTensorDataset, tensor_set, whole_batch

_EPSILON_TOLERANCE = 1e-3  # the noise gives an epsilon below the target by at most this


@dataclass(frozen=True)
class PrivateSetting:
    """What `PrivacyEngine.make_private` makes of a model, an optimizer and a loader.

    Attributes:
        module: the model itself; `model` wraps it.
        train_set: the data that the loader draws from.
        total_steps: number of steps of the whole run.
    """

    module: nn.Module
    train_set: BatchedTensorDataset
    model: nn.Module
    optimizer: Any
    criterion: Callable[..., Any]
    loader: DPDataLoader
    accountant: IAccountant
    noise_multiplier: float
    total_steps: int

    @property
    def steps_taken(self) -> int:
        """Number of updates so far, as the accountant counts them."""
        return sum(steps for _, _, steps in self.accountant.history)


def make_private(
    config: AuditConfig,
    dataset: Dataset,
    randomness: Randomness,
    device: str,
    n_planned: int | None = None,
) -> PrivateSetting:
    """Build an audit's model and let Opacus make its training private.

    Sampling rate, noise and the divisor of gradients follow from n_planned examples; default those
    of the data set.

    Raises:
        InputError: the model does not take the data, or no noise reaches the target epsilon.
    """
    settings = config.training
    module = first_parameters(
        config.model, dataset.input_shape, dataset.n_classes, randomness.first_parameters
    ).to(device)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=settings.learning_rate, momentum=settings.momentum
    )
    criterion = nn.CrossEntropyLoss()
    return made_private(
        module, optimizer, criterion, tensor_set(dataset.train), settings, randomness, n_planned
    )


def made_private(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: nn.Module,
    train_set: BatchedTensorDataset,
    settings: TrainingConfig,
    randomness: Randomness,
    n_planned: int | None = None,
) -> PrivateSetting:
    """Let Opacus make the training of a model private.

    Args:
        module: the model, on its device.
        optimizer: of its parameters.
        criterion: mean loss of a batch.
        train_set: what it is trained on.
        settings: noise, clipping and batches.
        randomness: seeds of sampling and noise.
        n_planned: number of examples that sampling rate, noise and the divisor of gradients follow
            from; default those of train_set.

    Raises:
        InputError: no noise reaches the target epsilon.
    """
    n_planned = n_planned or len(train_set)
    _warn_of_delta(settings.delta, len(train_set))
    loader = PlannedLoader(
        train_set,
        n_planned=n_planned,
        batch_size=settings.batch_size,
        collate_fn=whole_batch,
        generator=generator(randomness.sampling),
    )
    noise_multiplier = noise_multiplier_of(settings, n_planned)
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=module,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=settings.max_grad_norm,
        noise_generator=generator(randomness.noise, next(module.parameters()).device),
        grad_sample_mode=settings.grad_sample_mode,
    )
    if settings.grad_sample_mode == "ghost":
        model, optimizer, criterion, private_loader = made
    else:
        model, optimizer, private_loader = made
    made[1].expected_batch_size = int(n_planned * (1 / len(loader)))
    return PrivateSetting(
        module=module,
        train_set=train_set,
        model=model,
        optimizer=optimizer,
        criterion=criterion,
        loader=private_loader,
        accountant=engine.accountant,
        noise_multiplier=noise_multiplier,
        total_steps=settings.epochs * len(private_loader),
    )


def noise_multiplier_of(settings: TrainingConfig, n_examples: int) -> float:
    """The noise multiplier of an audit with this number of training examples."""
    return settings.noise_multiplier or _noise_for(settings, _steps_per_epoch(settings, n_examples))


def _steps_per_epoch(settings: TrainingConfig, n_examples: int) -> int:
    """Steps that Opacus takes in an epoch.

    It samples at 1 / ceil(n / batch_size). For some lengths, float division makes it take one step
    fewer.
    """
    return int(1 / (1 / math.ceil(n_examples / settings.batch_size)))


def _warn_of_delta(delta: float, n_examples: int) -> None:
    if delta >= 1 / n_examples:
        warnings.warn(
            f"delta={delta:g} is not below 1/n={1 / n_examples:.2g}: such a delta allows "
            "publishing a whole example; choose it well below 1/n",
            stacklevel=5,
        )


def _noise_for(settings: TrainingConfig, steps_per_epoch: int) -> float:
    """The noise multiplier that reaches the target epsilon."""
    try:
        noise_multiplier: float = get_noise_multiplier(
            target_epsilon=settings.target_epsilon,
            target_delta=settings.delta,
            sample_rate=1 / steps_per_epoch,
            steps=settings.epochs * steps_per_epoch,
            accountant="rdp",
            epsilon_tolerance=_EPSILON_TOLERANCE,
        )
    except ValueError as error:
        raise InputError(
            f"target_epsilon={settings.target_epsilon} cannot be reached at delta="
            f"{settings.delta:g} with any noise; choose a larger one, or give noise_multiplier"
        ) from error
    return noise_multiplier


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
