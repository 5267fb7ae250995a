"""Mislabelled canaries in the user's own loop: examples with a wrong label, in or out by a coin.

After Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846). They cost some accuracy. Sensitive.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from indpriv._checks import check_positive_int
from indpriv._facts import refused
from indpriv._types import BoolArray, IntArray
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.norm_log.run_files import CANARIES
from indpriv.recording.norms.batches import call, precise_losses
from indpriv.recording.training_data import Examples, length
from indpriv.recording.watch import AttackedRun

METHOD = "final loss of mislabelled canaries"


def draw_canaries(
    rng: np.random.Generator, n_examples: int, count: int, n_classes: int
) -> tuple[IntArray, BoolArray, IntArray]:
    """Random positions in ascending order, whether each is trained on, and shifts of its class.

    Coins are fair and independent, and no shift gives the right class.
    """
    positions = np.sort(rng.choice(n_examples, count, replace=False))
    return positions, rng.integers(0, 2, count) == 1, rng.integers(1, n_classes, count)


class MislabelledCanaries:
    """Mislabel some examples of a data set, and keep each in it only if a fair coin says so.

    Make the loader with `loader`, which fixes the sampling rate from all examples, so that only
    sums of gradients depend on the coins. Pass this object to the Recorder of the run:

    >>> from indpriv.recording import MislabelledCanaries, Recorder
    >>> canaries = MislabelledCanaries(data, 1000, n_classes=10)               # doctest: +SKIP
    >>> loader = canaries.loader(batch_size=256)                               # doctest: +SKIP
    >>> recorder = Recorder("runs/mine", dataset=canaries.train_set,           # doctest: +SKIP
    ...                     loss_fn=loss_fn, attack=canaries)

    Attributes:
        train_set: what to train on: all examples but the canaries that were left out.
    """

    file_name = CANARIES
    n_canaries = 0  # the sampler draws them as the examples that they are

    def __init__(
        self, dataset: Dataset[Any], count: int, *, n_classes: int, seed: int | None = None
    ) -> None:
        """Choose canaries, wrong labels and coins.

        Args:
            dataset: map-style, of (inputs, class).
            count: number of canaries.
            n_classes: at least 2; classes are 0, 1, ..., n_classes - 1.
            seed: makes the choices reproducible; None draws them from the operating system.

        Raises:
            InputError: more canaries than examples, or one class.
        """
        n = length(dataset, "dataset")
        check_positive_int("count", count)
        check_positive_int("n_classes", n_classes, minimum=2)
        if count > n:
            raise InputError(f"{count} canaries are more than the {n} examples; insert fewer")
        rng = np.random.default_rng(seed)
        positions, self._member, shifts = draw_canaries(rng, n, count, n_classes)
        shift_of = dict(zip(positions.tolist(), shifts.tolist(), strict=True))
        mislabelled = _Mislabelled(dataset, shift_of, n_classes)
        self._canaries: Dataset[Any] = Subset(mislabelled, positions.tolist())
        kept = np.setdiff1d(np.arange(n), positions[~self._member])
        self.train_set: Dataset[Any] = Subset(mislabelled, kept.tolist())
        self._n = n
        self._loader: PlannedLoader | None = None

    def loader(self, batch_size: int, **options: Any) -> DataLoader[Any]:
        """A loader of train_set, for make_private; options as of a DataLoader.

        Its number of batches is that of all examples, so that neither the sampling rate nor the
        divisor of gradients tells how many canaries were left out.
        """
        self._loader = PlannedLoader(
            self.train_set, n_planned=self._n, batch_size=batch_size, **options
        )
        return self._loader

    def start(self, attacked: AttackedRun) -> MislabelledCanaries:
        """Check that the run trains on the canaries, at a rate that no coin decided.

        Averages are over the planned number of examples.
        """
        if attacked.data.dataset is not self.train_set:
            raise refused("refusal.attacks", "train_set")
        run = attacked.run
        planned = None if self._loader is None else 1 / len(self._loader)
        if planned is None or not math.isclose(run.sample_rate, planned, rel_tol=1e-9):
            raise refused("refusal.attacks", "sample_rate")
        ranks = getattr(run.optimizer, "world_size", 1)
        run.optimizer.expected_batch_size = int(self._n * planned) / ranks
        self._loss_fn = attacked.data.loss_fn
        device = next(run.module.parameters()).device
        collate, unpack = run.loader.collate_fn, attacked.data.unpack
        self._examples = Examples(self._canaries, collate, device, unpack)
        return self

    def before_noise(self, *step: object) -> None:
        """Nothing: the final model is attacked."""

    after_noise = before_noise

    def scores(self, model: nn.Module) -> AttackScores:
        """Minus the final loss of every canary."""
        losses = [
            precise_losses(self._loss_fn, call(model, inputs), targets)
            for inputs, targets in self._examples.batches(1024)
        ]
        return AttackScores(
            scores=-torch.cat(losses).cpu().numpy(),
            member=self._member.copy(),
            method=METHOD,
            fair_coins=True,
        )


class PlannedLoader(DataLoader[Any]):
    """A DataLoader with the number of batches of n_planned examples, not of those that it has.

    Opacus samples at one over the number of batches of the loader that make_private is given.
    """

    def __init__(self, dataset: Dataset[Any], *, n_planned: int, batch_size: int, **options: Any):
        super().__init__(dataset, batch_size=batch_size, **options)
        self._planned = math.ceil(n_planned / batch_size)

    def __len__(self) -> int:
        return self._planned


class _Mislabelled(Dataset[Any]):
    """A data set in which some classes (position -> shift) are shifted."""

    def __init__(self, dataset: Dataset[Any], shifts: dict[int, int], n_classes: int) -> None:
        self._dataset, self._shifts, self._n_classes = dataset, shifts, n_classes

    def __len__(self) -> int:
        return length(self._dataset, "dataset")

    def __getitem__(self, position: int) -> tuple[Any, Any]:
        inputs, target = self._dataset[position]
        wrong: int | Tensor = (target + self._shifts.get(position, 0)) % self._n_classes
        return inputs, wrong
