"""The non-private baseline: the same model trained without DP, to compare attacks.

Its output is sensitive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from numpy.typing import ArrayLike
from torch import nn
from torch.utils.data import DataLoader

from audits.training.config import AuditConfig
from audits.training.datasets import Dataset
from audits.training.models import LOSSES, first_parameters
from audits.training.randomness import Randomness, generator
from audits.training.tensors import tensor_set, whole_batch
from indpriv._types import StageProgress, silent
from indpriv.example_table import ExampleTable
from indpriv.recording.training_data import TrainingData


def fit_without_dp(
    config: AuditConfig,
    dataset: Dataset,
    *,
    seed: int | None = None,
    progress: StageProgress = silent,
    device: str = "cpu",
    after_step: Callable[[nn.Module, int, int], None] | None = None,
) -> nn.Module:
    """Train an audit's model by SGD on shuffled batches, without clipping and without noise.

    Args:
        config: the audit.
        dataset: the audit's data.
        seed: makes the training reproducible.
        progress: called as progress(stage, done, total) after each step.
        device: device to train on.
        after_step: called with the model, the number of steps so far and that of an epoch.

    Returns:
        the final model.
    """
    randomness = Randomness.from_seed(seed)
    settings = config.training
    module = first_parameters(
        config.model, dataset.input_shape, dataset.n_classes, randomness.first_parameters
    ).to(device)
    rate = settings.non_private_learning_rate or settings.learning_rate
    decay = settings.non_private_weight_decay
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay if decay is None else decay,
    )
    loader = DataLoader(
        tensor_set(dataset.train),
        batch_size=settings.batch_size,
        shuffle=True,
        collate_fn=whole_batch,
        generator=generator(randomness.shuffling),
    )
    criterion = LOSSES[settings.loss]()
    longer = settings.non_private_epochs
    total_steps = longer * len(loader) if longer else settings.total_steps(len(loader))
    step = 0
    while step < total_steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * settings.learning_rate_factor(step, total_steps)
            criterion(module(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            step += 1
            if after_step is not None:
                after_step(module, step, len(loader))
            progress("training without DP", step, total_steps)
            if step == total_steps:
                break
    return module


def example_table(
    module: nn.Module,
    dataset: Dataset,
    device: str = "cpu",
    *,
    loss: str = "cross_entropy",
    unit_ids: ArrayLike | None = None,
) -> ExampleTable:
    """Losses and predictions of a model on every training and test example; ids are positions.

    loss: one of `LOSSES`. unit_ids: (n_train,) the unit of each training row.
    """
    module.eval()
    data = TrainingData(
        tensor_set(dataset.train),
        LOSSES[loss](reduction="none"),
        unit_ids=unit_ids,
        metadata=dataset.train.metadata,
        test_set=tensor_set(dataset.test),
        test_metadata=dataset.test.metadata,
    )
    return data.example_table(module, *data.examples(whole_batch, torch.device(device)))
