"""Gradient norms at one checkpoint after another, in this process or in several. Sensitive."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.recording.checkpoints.audit_spec import AuditSpec, load_spec
from indpriv.recording.checkpoints.safe_files import first_line, read_content
from indpriv.recording.checkpoints.weights import fingerprint_of, fit, load_into, state_of
from indpriv.recording.norms.model_checks import check_memory
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.training_data import Measured, norms_of

AUTO = "auto"
_PROBED = 8  # examples that are read twice, to find random augmentation
_CHECKED = 256  # examples on which backends are checked and timed
_AUGMENTED = (
    "the dataset gives other inputs each time (random augmentation?), so the norms belong to other "
    "inputs than training's"
)


@dataclass(frozen=True)
class CheckpointNorms(Measured):
    """Norms (n_examples,) of all examples; the seconds include reading the checkpoint."""

    weights_fingerprint: str


class CheckpointPass:
    """Model, data and norm pass of one process, which move from checkpoint to checkpoint.

    Attributes:
        model: the model at the last checkpoint that was loaded.
        norm_pass: computes its norms.
        caveats: reasons why these norms differ from training's.
    """

    def __init__(
        self,
        spec: AuditSpec,
        first: Path,
        *,
        device: str = "cpu",
        batch_size: int | str = AUTO,
        backend: str = "auto",
    ) -> None:
        """Build the model, load a first checkpoint, and choose and check a backend at it.

        Raises:
            InputError: the checkpoint does not fit the model, the model does not accept the data,
                or its gradients mix examples.
        """
        self._spec = spec
        self._device = torch.device(device)
        self.model = spec.model().to(self._device)
        self._examples, self._test = spec.data.examples(spec.collate_fn, self._device)
        self.move_to(first)
        inputs, targets = next(self._examples.batches(_CHECKED))
        self.norm_pass = NormPass(self.model, spec.loss_fn, inputs, targets, backend=backend)
        check_memory(self.model, inputs)
        if self._test is not None:
            with self.norm_pass.evaluation() as evaluated:
                spec.data.check_test_set(evaluated, self._test)
        if isinstance(batch_size, int):
            self.norm_pass.batch_size = batch_size
        once, again = (next(self._examples.batches(_PROBED)) for _ in range(2))
        self.caveats = (*self.norm_pass.caveats, *(() if _equal(once, again) else (_AUGMENTED,)))

    def move_to(self, path: Path) -> str:
        """Load a checkpoint into the model, and return a fingerprint of its weights."""
        with naming(path):
            state = fit(state_of(read_content(path), self._spec.load), self.model)
            load_into(self.model, state)
        return fingerprint_of(state)

    def norms_at(self, path: Path) -> CheckpointNorms:
        """Every example's gradient norm at a checkpoint; InputError names it if one is NaN."""
        start = time.perf_counter()
        weights = self.move_to(path)
        with naming(path):
            try:
                taken = norms_of(self.norm_pass, self._examples, self._spec.ids)
            except RuntimeError as error:
                raise InputError(f"its norms cannot be computed: {first_line(error)}") from error
        seconds = time.perf_counter() - start
        return CheckpointNorms(taken.norms, taken.targets_fingerprint, seconds, weights)

    def example_table(self) -> ExampleTable:
        """Losses of training and test examples; InputError if one is not finite."""
        with self.norm_pass.evaluation() as model:
            table = self._spec.data.example_table(model, self._examples, self._test)
        bad = table.frame[~np.isfinite(table.frame["loss"].to_numpy(np.float64))]
        if len(bad):
            raise InputError(
                f"{len(bad)} losses are NaN or infinite at the last checkpoint, e.g. that of "
                f"{bad['split'].iloc[0]} example {bad['example_id'].iloc[0]!r}; look at these "
                "examples, and check that spec and checkpoints belong together"
            )
        return table


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the checkpoint in the message of an InputError."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: {error}") from error


def _equal(first: Any, second: Any) -> bool:
    """Whether two batches contain the same tensors."""
    leaves = [torch.utils._pytree.tree_leaves(batch) for batch in (first, second)]
    pairs = zip(*leaves, strict=True)
    return all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in pairs
        if isinstance(a, torch.Tensor)
    )


@dataclass(frozen=True)
class Workers:
    """Number of processes, and how each makes its own `CheckpointPass`, from a spec's reference."""

    processes: int
    reference: str
    device: str
    batch_size: int | str


def norms_in_order(
    checkpoint_pass: CheckpointPass, paths: Sequence[Path], workers: Workers | None
) -> Iterator[CheckpointNorms]:
    """Norms at each checkpoint, in order; only a few results are in memory at a time."""
    if workers is None or len(paths) < 2:
        yield from map(checkpoint_pass.norms_at, paths)
        return
    context = get_context("spawn")  # a forked copy of torch's threads can hang
    threads = max(1, (os.cpu_count() or 1) // workers.processes)
    with ProcessPoolExecutor(
        min(workers.processes, len(paths)), context, initializer=_start_worker, initargs=(threads,)
    ) as pool:
        waiting: deque[Future[CheckpointNorms]] = deque()
        try:
            for path in paths:
                backend = checkpoint_pass.norm_pass.backend
                waiting.append(pool.submit(_work, path, workers, backend))
                if len(waiting) > workers.processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise InputError(
                f"one of {workers.processes} processes ended unexpectedly, as happens when memory "
                "runs out; use fewer processes or a smaller batch_size. Checkpoints done so far "
                "are kept"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker_pass: CheckpointPass | None = None  # of this process, if it is a worker


def _start_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops its workers
    torch.set_num_threads(threads)


def _work(path: Path, workers: Workers, backend: str) -> CheckpointNorms:
    global _worker_pass
    if _worker_pass is None:
        _worker_pass = CheckpointPass(
            load_spec(workers.reference),
            path,
            device=workers.device,
            batch_size=workers.batch_size,
            backend=backend,
        )
    return _worker_pass.norms_at(path)
