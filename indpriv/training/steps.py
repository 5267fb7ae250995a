"""The training loop. It stops between two steps, so that each step that counts is in the log."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

from indpriv.recording.interrupts import heard_signals
from indpriv.training.config import TrainingConfig
from indpriv.training.private_setting import PrivateSetting


def take_steps(
    private: PrivateSetting,
    settings: TrainingConfig,
    after_step: Callable[[int], None],
    stop_asked: Callable[[], bool],
    device: str,
) -> None:
    """Train until the last step, or until a stop is asked for."""
    step = 0
    while step < private.total_steps:
        with _physical_batches(private, settings.max_physical_batch_size) as batches:
            for inputs, targets in batches:
                private.optimizer.zero_grad()
                private.criterion(private.model(inputs.to(device)), targets.to(device)).backward()
                private.optimizer.step()
                if private.steps_taken > step:  # this was the last physical batch of a step
                    step = private.steps_taken
                    after_step(step)
                    if stop_asked() or step == private.total_steps:
                        return


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
