"""Norms of the hold-out: what the test examples would have contributed on the same trajectory. Sensitive.

They were never trained on; an account of them says what their epsilon would have been, which is what the epsilons of the
training examples are compared with where an attack is judged by epsilon.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.recording.clipping.individual import with_headroom
from indpriv.recording.data_passes import Examples, norms_of
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.opacus.tally import StepSetting

HOLDOUT = "holdout"  # folder of the log, inside the run directory


class HoldoutLog:
    """A log of the test examples beside that of the training examples, with the same records and steps."""

    def __init__(
        self, run_dir: Path, header: LogHeader, norm_pass: NormPass, examples: Examples
    ) -> None:
        """Start or continue RUN/holdout; errors as for NormLogWriter."""
        self._ids: NDArray[np.generic] = np.arange(len(examples))
        self._norm_pass, self._examples = norm_pass, examples
        self._headroom = float(header.run.get("clip_headroom", 0.0))
        self._taken: tuple[NDArray[np.float64], str, float] | None = None
        folder = run_dir / HOLDOUT
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        everybody_only = {
            **header.policy,
            "free_records": False,
            "exact_examples": 0,
        }  # no test example is ever sampled
        own = replace(header, policy=everybody_only, privacy_filter={})
        self._writer = NormLogWriter(folder, own, self._ids, None, np.zeros(0, dtype=np.int64))

    def take(self) -> None:
        """Take the norms that the step about to start depends on."""
        start = time.perf_counter()
        norms, targets = norms_of(self._norm_pass, self._examples, self._ids)
        self._taken = norms, targets, time.perf_counter() - start

    def write(self, step: int, setting: StepSetting) -> None:
        """Write what was taken for a step, once its settings are known."""
        if self._taken is not None:
            norms, targets, seconds = self._taken
            norms = with_headroom(norms, self._headroom, setting.max_grad_norm)
            self._writer.record(
                step,
                norms,
                max_grad_norm=setting.max_grad_norm,
                targets_fingerprint=targets,
                seconds=seconds,
            )
            self._taken = None

    def steps(
        self, first: int, count: int, setting: StepSetting, evidence: Mapping[str, Any]
    ) -> None:
        """Write equal steps."""
        self._writer.steps(first, count, **vars(setting), evidence=evidence)

    def truncate(self, step: int) -> None:
        """Declare void what was logged from this step on."""
        self._writer.truncate(step)

    def finish(self, evidence: Mapping[str, Any]) -> None:
        """Say that the run is complete."""
        self._writer.finish(evidence)

    def close(self) -> None:
        """Let others write."""
        self._writer.close()
