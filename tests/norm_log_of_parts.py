"""A log that several processes write, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from indpriv.norm_log.writer import LogHeader, NormLogWriter
from synthetic import session_counts

HEADER = LogHeader(0.01, "up", "example", "add_remove", "poisson", False, {"backend": "none"})


def append(run_dir: str | Path, norms: Any, first: int) -> None:
    """Record norms (n_steps, n_examples) of each step from `first` on."""
    n = norms.shape[1]
    writer = NormLogWriter(Path(run_dir), HEADER, np.arange(n), None, np.zeros(0, np.int64))
    for step in range(first, len(norms)):
        writer.record(step, norms[step], max_grad_norm=1.0, targets_fingerprint="", seconds=0.1)
        writer.steps(
            step,
            1,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=0.1,
            counts=session_counts(step + 1, n, 0.1),
        )
    writer.close()
