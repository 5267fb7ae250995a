"""Processes that tests start: none outlives its test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command, and kill it at the end of the block if it still runs."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
