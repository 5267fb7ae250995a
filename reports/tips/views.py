"""Augmentations of a picture in one batch: gradients of its views are averaged before they are clipped (De et al. 2022, arXiv:2204.13650)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from audits.training.config.sections import ModelConfig
from audits.training.datasets import load_dataset
from audits.training.models import first_parameters
from audits.training.randomness import Randomness
from audits.training.tensors import Batch, BatchedTensorDataset, tensor_set, whole_batch
from indpriv._files import read_json, write_json
from indpriv.norm_log.run_files import RUN_JSON, seal
from indpriv.recording import Recorder, private_generator
from reports.tips.page import DELTA, EPSILON, ROWS_OF_MNIST, VIEWS

MODEL = ModelConfig("tanh_cnn")
EPOCHS, BATCH, RATE, CLIP, PIXELS = 5, 250, 0.5, 1.0, 2


class Shifted(BatchedTensorDataset):
    """Views (batch, views, ...) of pictures: as they are, then shifted by up to PIXELS, anew each time."""

    def __init__(self, pictures: Tensor, labels: Tensor, plain: int, shifted: int) -> None:
        super().__init__(pictures, labels)
        self.plain, self.shifted = plain, shifted

    def __getitems__(self, indices: list[int]) -> Batch:
        """Of the pictures at these indices."""
        pictures, labels = super().__getitems__(indices)
        side = pictures.shape[-1]
        padded = functional.pad(pictures, [PIXELS] * 4, value=float(pictures.min()))
        windows = padded.unfold(2, side, 1).unfold(3, side, 1)
        places = torch.arange(len(pictures))
        views = [pictures] * self.plain
        for _ in range(self.shifted):
            down, right = torch.randint(0, 2 * PIXELS + 1, (2, len(pictures)))
            views.append(windows[places, :, down, right])
        return torch.stack(views, 1), labels

    def __getitem__(self, index: int) -> Batch:
        """One picture's views and label."""
        views, labels = self.__getitems__([index])
        return views[0], labels[0]


class OfViews(nn.Module):
    """A model of several views (batch, views, ...) of each example."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, views: Tensor) -> Tensor:
        """(batch, views, classes)."""
        flat: Tensor = self.inner(views.flatten(0, 1))
        return flat.unflatten(0, views.shape[:2])


def mean_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """(batch,) means over the views."""
    every = labels.repeat_interleave(outputs.shape[1])
    losses = functional.cross_entropy(outputs.flatten(0, 1), every, reduction="none")
    return losses.view(len(labels), -1).mean(1)


def train_on_views(name: str, path: Path) -> None:
    """Train and record a run with one of `VIEWS`."""
    data, views = load_dataset("mnist"), sum(VIEWS[name])
    chosen = tensor_set(data.train.take(np.arange(len(data.train)) < ROWS_OF_MNIST))
    pictures, labels = chosen.tensors
    items = Shifted(pictures, labels, *VIEWS[name])
    seed = Randomness.from_seed(None).first_parameters
    inner = first_parameters(MODEL, data.input_shape, data.n_classes, seed)
    module = OfViews(inner)
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=RATE),
        data_loader=DataLoader(
            items, batch_size=BATCH, generator=private_generator(), collate_fn=whole_batch
        ),
        noise_generator=private_generator(),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=CLIP,
    )
    recorder = Recorder(
        path,
        dataset=items,
        loss_fn=mean_losses,
        views=views,
        every="once",
        batch_norms=True,
        start="random",
    )
    with recorder.attach(model, optimizer, loader):
        for _ in range(EPOCHS):
            for inputs, labels in loader:
                optimizer.zero_grad()
                mean_losses(model(inputs), labels).mean().backward()
                for p in optimizer.params:
                    p.grad_sample = p.grad_sample.unflatten(0, (-1, views)).mean(1)
                optimizer.step()
    with torch.no_grad():
        found = inner(torch.from_numpy(data.test.inputs)).argmax(1).numpy()
    reached = {"status": "finished", "test_accuracy": float(np.mean(found == data.test.targets))}
    write_json(path / RUN_JSON, {**read_json(path / RUN_JSON), **reached})
    seal(path)
