"""The training loop. It stops between two steps, so that each step that counts is in the log."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pandas as pd
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

from audits.training.checkpoints import TrainingState, save_checkpoint
from audits.training.config import AuditConfig, TrainingConfig
from audits.training.curve import Curve
from audits.training.datasets.base import Split
from audits.training.private_setting import PrivateSetting
from audits.training.step_plan import epsilons_after, with_lost
from indpriv._types import StageProgress
from indpriv.norm_log.journal_state import read_state
from indpriv.recording import Recorder
from indpriv.recording.clipping import ClippingRule
from indpriv.recording.process import heard_signals


class RecordedSteps:
    """The steps of a run, with its recorder attached, and what is kept at its checkpoints.

    Attributes:
        seed: of the run; None if it is not seeded.
        lost: the most steps that crashes of the run may have lost.
        seconds_before: that the run took until it was resumed.
    """

    def __init__(
        self,
        run_dir: Path,
        config: AuditConfig,
        private: PrivateSetting,
        test: Split,
        seed: int | None,
        begun: TrainingState | None,
    ) -> None:
        """Prepare the first step, or the one after those of a run that is resumed."""
        self._run_dir, self._config, self._private, self.seed = run_dir, config, private, seed
        self.lost, rows = 0, None
        if begun is not None:
            begun.restore(private)
            self.lost, rows = begun.lost, pd.DataFrame(dict(begun.curve))
        self.seconds_before = 0.0 if rows is None else float(rows["seconds"].iloc[-1])
        self._device = str(next(private.module.parameters()).device)
        self._curve = Curve(private.module, len(private.loader), test, self._device, rows)

    def take(self, recorder: Recorder, progress: StageProgress) -> None:
        """Train, saving the first, the last and every k-th model."""
        private, every = self._private, self._config.checkpoints.every
        gap = len(private.loader) if isinstance(every, str) else every

        def after_step(step: int) -> None:
            if step % gap == 0 or step == private.total_steps:
                self._save(step, recorder)
            progress("training", step, private.total_steps)

        with (
            recorder.attach(private.model, private.optimizer, private.loader),
            stop_requests() as stop_asked,
        ):
            # Also where the run is resumed: its model may not be written, nor what was lost.
            self._save(private.steps_taken, recorder)
            take_steps(private, self._config.training, after_step, stop_asked, self._device)
            if private.steps_taken not in self._curve.steps:
                self._save(private.steps_taken, recorder)
        self._write_curve()

    def _save(self, step: int, recorder: Recorder) -> None:
        """Save the model, after what resumes the run there: no model is of a step that was lost."""
        if step not in self._curve.steps:
            self._curve.add(step)
        if not self._config.attacks.in_run:
            found = self._private, recorder.state_dict(), self._curve.rows
            TrainingState.of(*found, lost=self.lost, seed=self.seed).write(self._run_dir)
        history = self._private.accountant.history
        save_checkpoint(self._run_dir, self._private.module, step, history)

    def _write_curve(self) -> None:
        """Write accuracy and epsilon of all checkpoints."""
        used, private = read_state(self._run_dir).settings(), self._private
        optimizer = private.optimizer
        epsilons = np.full(len(self._curve.steps), np.nan)
        if not hasattr(optimizer, "no_privacy"):
            steps, delta = self._curve.steps, self._config.training.delta
            counted = np.where(steps > 0, steps + self.lost, 0)
            epsilons = epsilons_after(counted, with_lost(used, self.lost), delta)
            epsilons += private.clipping_norm_epsilon
        rule = optimizer if isinstance(optimizer, ClippingRule) else None
        self._curve.write(self._run_dir, used, epsilons, rule)


def take_steps(
    private: PrivateSetting,
    settings: TrainingConfig,
    after_step: Callable[[int], None],
    stop_asked: Callable[[], bool],
    device: str,
) -> None:
    """Train until the last step, or until a stop is asked for.

    A run that is resumed within a pass over the data first takes the rest of that pass.
    """
    step, per_pass = private.steps_taken, len(private.loader)
    while step < private.total_steps:
        taken = step % per_pass  # of this pass, by the run that is resumed
        with _physical_batches(private, settings.max_physical_batch_size) as batches:
            for inputs, targets in _iterated(batches, private.loader.generator, begun=taken > 0):
                private.optimizer.zero_grad()
                private.criterion(private.model(inputs.to(device)), targets.to(device)).backward()
                private.optimizer.step()
                if private.steps_taken > step:  # this was the last physical batch of a step
                    step = private.steps_taken
                    after_step(step)
                    if stop_asked() or step == private.total_steps:
                        return
                    if taken and step % per_pass == 0:
                        break


def _iterated(batches: DataLoader[Any], draws: torch.Generator, *, begun: bool) -> Iterator[Any]:
    """An iterator over batches. A new one draws a number first; for a pass that begun has it."""
    state = draws.get_state()
    iterator = iter(batches)
    if begun:
        draws.set_state(state)
    return iterator


def _physical_batches(
    private: PrivateSetting, max_physical_batch_size: int | None
) -> AbstractContextManager[DataLoader[Any]]:
    """The loader, with its Poisson batches split if their size is limited."""
    if max_physical_batch_size is None:
        return nullcontext(private.loader)
    manager: AbstractContextManager[DataLoader[Any]] = BatchMemoryManager(
        data_loader=private.loader,
        max_physical_batch_size=max_physical_batch_size,
        optimizer=private.optimizer,
    )
    return manager


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one acts at once, as usual.

    Yields:
        a function that says whether a stop was requested. It always says no outside the main
        thread, which signals do not reach; a signal that the process ignores is no request.
    """
    requests: list[int] = []
    previous = {number: signal.getsignal(number) for number in heard_signals()}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        restore()

    for number in previous:
        signal.signal(number, request)
    try:
        yield lambda: bool(requests)
    finally:
        restore()
