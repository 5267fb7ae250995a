"""Ctrl-C and SIGTERM wait while the log is written: half a step would contradict itself.

Ignored signals stay ignored: scripts start background jobs with SIGINT ignored, and `nohup` starts
programs with SIGHUP ignored, so that the terminal does not stop them. Stop such a run with SIGTERM.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def heard_signals() -> list[signal.Signals]:
    """SIGINT and SIGTERM unless they are ignored; none outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Deliver interrupts that arrive inside the block when it ends."""
    arrived: list[int] = []

    def keep(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    previous = {number: signal.signal(number, keep) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)
