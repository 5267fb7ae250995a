"""One variant of computing norms: a backend, its threads and its micro-batches. Sensitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from indpriv.recording.norms.backends import Backend
from indpriv.recording.norms.batches import Batch, map_tensors
from indpriv.recording.norms.shadow_model import ModelInTraining, to_channels_last

Result = TypeVar("Result")


@dataclass
class Variant:
    """A backend that is ready to compute norms.

    Attributes:
        model: the model in training.
        name: name of the backend.
        shadows: for each thread, a shadow model and the backend attached to it.
        batch_size: largest number of examples to work on at once.
        channels_last: whether images and kernels have channels last in memory.
        seconds: per example; 0 if nothing was timed.
    """

    model: ModelInTraining
    name: str
    shadows: Sequence[tuple[nn.Module, Backend]]
    batch_size: int = 1
    channels_last: bool = False
    seconds: float = 0.0

    def update(self) -> None:
        """Bring the shadow models to the model's current parameters."""
        for shadow, _ in self.shadows:
            self.model.update(shadow, channels_last=self.channels_last)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(norms, losses) of examples that fit into memory, divided evenly among threads."""
        if self.channels_last:
            batch = Batch(map_tensors(batch.inputs, to_channels_last), batch.targets)
        shadows = self.shadows[: len(batch)]
        bounds = [len(batch) * i // len(shadows) for i in range(len(shadows) + 1)]
        parts = [
            partial(self._run, backend, batch.rows(start, stop))
            for (_, backend), start, stop in zip(shadows, bounds, bounds[1:], strict=False)
        ]
        norms, losses = zip(*side_by_side(parts), strict=True)
        return torch.cat(norms), torch.cat(losses)

    def _run(self, backend: Backend, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), self.model.precision():
            return backend(batch)

    def updated_norms(self, batch: Batch) -> Tensor:
        """Norms at the model's current parameters."""
        self.update()
        return self(batch)[0]


def side_by_side(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run each task in a thread of its own; a single task runs in this thread.

    PyTorch's own threads wait for each other after every operation; whole tasks do not. Meanwhile
    `torch.set_num_threads` is set to each task's share of the threads, in the whole process.

    Returns:
        their results, in order. The first error is raised once all tasks have ended.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    threads = torch.get_num_threads()
    share = max(1, threads // len(tasks))
    torch.set_num_threads(share)
    try:
        with ThreadPoolExecutor(
            len(tasks), initializer=torch.set_num_threads, initargs=(share,)
        ) as pool:
            return [future.result() for future in [pool.submit(task) for task in tasks]]
    finally:
        torch.set_num_threads(threads)
