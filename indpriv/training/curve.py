"""RUN/curve.parquet: what a run has learned and spent at each checkpoint.

It depends on the training data through the models only, and on the test data.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from indpriv._files import write_private_parquet
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.run_files import CURVE
from indpriv.recording.norms.shadow_model import make_shadow
from indpriv.training.datasets.base import Split
from indpriv.training.private_setting import PrivateSetting
from indpriv.training.step_plan import epsilons_after

_BATCH = 4096


class Curve:
    """Test accuracy and seconds at each checkpoint, with the settings and the epsilon there."""

    def __init__(self, private: PrivateSetting, test: Split, device: str) -> None:
        """Begin before the first step; the clock starts now, and runs while models are tested."""
        self._private, self._device, self._started = private, device, time.monotonic()
        self._inputs, self._targets = torch.from_numpy(test.inputs), torch.from_numpy(test.targets)
        self._rows: list[dict[str, float]] = []

    def add(self, step: int) -> None:
        """Measure the model after this number of steps."""
        seconds = time.monotonic() - self._started
        self._rows.append(
            {
                "step": step,
                "epoch": step / len(self._private.loader),
                "test_accuracy": self._accuracy(),
                "seconds": seconds,
            }
        )

    def write(self, run_dir: Path, delta: float) -> None:
        """Write the rows, with what the log of the run says of the step before each.

        The worst-case epsilon is at delta; NaN if the run has no privacy, whatever its noise.
        """
        table, used = pd.DataFrame(self._rows), read_state(run_dir).settings()
        steps = table["step"].to_numpy()
        before = np.maximum(steps - 1, 0)
        table["max_grad_norm"] = used.max_grad_norm[before]
        table["noise_multiplier"] = used.noise_multiplier[before]
        table["noise_std"] = table["noise_multiplier"] * table["max_grad_norm"]
        void = getattr(self._private.optimizer, "no_privacy", "")
        table["worst_case_epsilon"] = np.nan if void else epsilons_after(steps, used, delta)
        write_private_parquet(table, run_dir / CURVE)

    @torch.no_grad()
    def _accuracy(self) -> float:
        model, right = make_shadow(self._private.module).eval(), 0
        for inputs, targets in zip(
            self._inputs.split(_BATCH), self._targets.split(_BATCH), strict=True
        ):
            found = model(inputs.to(self._device)).argmax(1).cpu()
            right += int((found == targets).sum())
        return right / len(self._targets)
