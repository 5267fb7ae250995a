"""Gradient norms at one checkpoint after another, in this process or several. Sensitive."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.recording.checkpoints.audit_spec import AuditSpec, load_spec
from indpriv.recording.checkpoints.safe_files import read_content
from indpriv.recording.checkpoints.weights import fingerprint_of, fit, load_into, state_of
from indpriv.recording.data_passes import Examples, example_table, norms_of
from indpriv.recording.norms.model_checks import check_buffers
from indpriv.recording.norms.norm_pass import NormPass

AUTO = "auto"
_PROBED = 8  # examples that are read twice
_CHECKED = 256  # examples that backends are checked and timed on
_MODEL_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
)  # of a model on data it was not made for
_MEMORY = (
    "out of memory",
    "allocate memory",
    "alloc_cpu",
)  # what torch says where memory does not suffice


@dataclass(frozen=True)
class Measured:
    """Norms (n_examples,) float64 before clipping, a fingerprint of the targets, one of the weights, and the time."""

    norms: NDArray[np.float64]
    targets_fingerprint: str
    weights_fingerprint: str
    seconds: float


class Measuring:
    """Model, data and norm pass of one process, moved from checkpoint to checkpoint."""

    def __init__(
        self,
        spec: AuditSpec,
        first: Path,
        *,
        device: str = "cpu",
        batch_size: int | str = AUTO,
        backend: str = "auto",
    ) -> None:
        """Build the model and choose the norm pass at a first checkpoint; backends are checked on 8 real examples there.

        Raises:
            InputError: the checkpoint does not fit, the model does not take the data, or its gradients mix examples.
        """
        self._spec = spec
        self._device = torch.device(device)
        self._model = spec.model().to(self._device)
        self._examples = Examples(spec.dataset, spec.collate_fn, self._device)
        self._batch_size = batch_size
        self.move_to(first)
        try:
            inputs, targets = next(self._examples.batches(_CHECKED))
            self._norm_pass = NormPass(self._model, spec.loss_fn, inputs, targets, backend=backend)
            check_buffers(self._model, inputs)
        except InputError:
            raise
        except _MODEL_ERRORS as error:
            raise InputError(
                f"the spec's model and loss_fn do not take its dataset: {_first_line(error)}"
            ) from error
        self._augmented = not _equal(
            next(self._examples.batches(_PROBED)), next(self._examples.batches(_PROBED))
        )
        if isinstance(batch_size, int):
            self._norm_pass.batch_size = batch_size

    @property
    def model(self) -> nn.Module:
        """The model, at the checkpoint that it was last moved to."""
        return self._model

    @property
    def norm_pass(self) -> NormPass:
        """How norms are taken."""
        return self._norm_pass

    @property
    def caveats(self) -> tuple[str, ...]:
        """Reasons why these norms are not those of training, besides that they are taken again."""
        augmented = (
            "the dataset gives other inputs each time (augmentation?): the norms are of another view",
        )
        return (*self._norm_pass.caveats, *(augmented if self._augmented else ()))

    def move_to(self, path: Path) -> str:
        """Load a checkpoint into the model, and return a fingerprint of its weights."""
        try:
            state = fit(state_of(read_content(path), self._spec.load), self._model)
            load_into(self._model, state)
        except InputError as error:
            raise InputError(naming(path, error)) from error
        return fingerprint_of(state)

    def norms_at(self, path: Path) -> Measured:
        """Every example's gradient norm at a checkpoint; InputError names it where one is NaN."""
        start = time.perf_counter()
        weights = self.move_to(path)
        try:
            norms, targets = self._norms()
        except InputError as error:
            raise InputError(naming(path, error)) from error
        return Measured(norms, targets, weights, time.perf_counter() - start)

    def _norms(self) -> tuple[NDArray[np.float64], str]:
        """All norms, in smaller batches where memory does not suffice and nobody chose their size."""
        while True:
            try:
                return norms_of(self._norm_pass, self._examples, self._spec.ids)
            except RuntimeError as error:
                size = self._norm_pass.batch_size
                if self._batch_size != AUTO or size == 1 or not _is_memory(error):
                    raise InputError(
                        f"a norm pass in batches of {size} failed: {_first_line(error)}"
                    ) from error
                self._norm_pass.batch_size = size // 2
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def example_table(self) -> ExampleTable:
        """Losses of training and test examples at the current checkpoint; InputError where one is not finite."""
        spec = self._spec
        test = (
            None
            if spec.test_set is None
            else Examples(spec.test_set, spec.collate_fn, self._device)
        )
        try:
            with self._norm_pass.evaluation() as model:
                table = example_table(
                    model,
                    spec.loss_fn,
                    self._examples,
                    test,
                    ids=spec.ids,
                    unit_ids=None if spec.unit_ids is None else np.asarray(spec.unit_ids),
                    metadata=spec.metadata,
                    test_metadata=spec.test_metadata,
                )
        except InputError:
            raise
        except _MODEL_ERRORS as error:
            raise InputError(
                f"the spec's model and loss_fn do not take its data: {_first_line(error)}"
            ) from error
        bad = table.frame[~np.isfinite(table.frame["loss"].to_numpy(np.float64))]
        if len(bad):
            raise InputError(
                f"{len(bad)} losses are NaN or infinite at the last checkpoint, e.g. of {bad['split'].iloc[0]} example "
                f"{bad['example_id'].iloc[0]!r}; look at these examples, and at whether spec and checkpoints belong together"
            )
        return table

    def close(self) -> None:
        """Let go of the norm pass."""
        self._norm_pass.close()


def _equal(first: Any, second: Any) -> bool:
    """Whether two batches hold the same tensors."""
    leaves = [torch.utils._pytree.tree_leaves(batch) for batch in (first, second)]
    pairs = zip(*leaves, strict=True)
    return all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in pairs
        if isinstance(a, torch.Tensor)
    )


def naming(path: Path, error: InputError) -> str:
    """The message of an error, with the checkpoint that it is about."""
    return str(error) if str(path) in str(error) else f"{path}: {error}"


def _is_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in _MEMORY
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@dataclass(frozen=True)
class Workers:
    """How many processes work on checkpoints at a time, and how each makes its own `Measuring`.

    reference: of the spec, see `load_spec`; every process imports it. backend: the one that this process has chosen.
    """

    processes: int
    reference: str
    device: str
    batch_size: int | str
    backend: str


def norms_in_order(
    measuring: Measuring, paths: Sequence[Path], workers: Workers | None
) -> Iterator[Measured]:
    """Norms at each checkpoint, in their order; only a few are in memory at a time."""
    if workers is None or len(paths) < 2:
        for path in paths:
            yield measuring.norms_at(path)
        return
    context = get_context("spawn")  # a forked copy of torch's threads can hang
    threads = max(1, (os.cpu_count() or 1) // workers.processes)
    with ProcessPoolExecutor(
        min(workers.processes, len(paths)), context, initializer=_start_worker, initargs=(threads,)
    ) as pool:
        waiting: deque[Future[Measured]] = deque()
        rest = iter(paths)
        try:
            while True:
                while (
                    len(waiting) <= workers.processes
                    and (following := next(rest, None)) is not None
                ):
                    waiting.append(pool.submit(_work, following, workers))
                if not waiting:
                    return
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise InputError(
                f"one of {workers.processes} processes ended without a word, as they do where memory runs out; use fewer "
                "processes or a smaller batch_size. Checkpoints done so far are kept"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_measuring: Measuring | None = None  # of a worker process


def _start_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and stops its workers
    torch.set_num_threads(threads)


def _work(path: Path, workers: Workers) -> Measured:
    global _measuring
    if _measuring is None:
        _measuring = Measuring(
            load_spec(workers.reference),
            path,
            device=workers.device,
            batch_size=workers.batch_size,
            backend=workers.backend,
        )
    return _measuring.norms_at(path)
