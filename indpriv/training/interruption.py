"""Stop between two steps, not within one: a step that changed the model must be in the log."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from indpriv.recording.interrupts import heard_signals


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
