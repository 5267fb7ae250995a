"""Processes that tests start: none outlives its test."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command, and kill it at the end of the block if it still runs."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_records(process: subprocess.Popen[Any], run_dir: Path, count: int) -> None:
    """Wait until a training process has written full records; fail if it ends before."""
    deadline = time.monotonic() + 240  # a busy machine takes a minute to import torch
    while len(list((run_dir / "records").glob("0*.parquet"))) < count:
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"training ended, or took too long, before it had {count} records")
        time.sleep(0.005)
