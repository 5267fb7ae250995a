"""RUN/curve.parquet: what a run has learned and spent at each checkpoint.

It depends on the training data through the models only, and on the test data.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from audits.training.datasets.base import Split
from indpriv._files import write_private_parquet
from indpriv._types import FloatArray, IntArray
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.run_files import CURVE
from indpriv.recording.clipping import ClippingRule
from indpriv.recording.norms.shadow_model import make_shadow

_BATCH = 4096


class Curve:
    """Test accuracy and seconds at each checkpoint, with the settings and the epsilon there."""

    def __init__(
        self,
        module: nn.Module,
        steps_per_epoch: float,
        test: Split,
        device: str,
        begun: pd.DataFrame | None = None,
    ) -> None:
        """Begin before the first step; the clock starts now, and runs while models are tested.

        begun: rows of the run that is resumed; its clock goes on.
        """
        self._module, self._device, self._started = module, device, time.monotonic()
        self._steps_per_epoch = steps_per_epoch
        self._inputs, self._targets = torch.from_numpy(test.inputs), torch.from_numpy(test.targets)
        self._rows: list[dict[str, float]] = []
        if begun is not None and len(begun):
            self._rows = begun.to_dict("records")  # type: ignore[assignment]
            self._started -= self._rows[-1]["seconds"]

    def add(self, step: int) -> None:
        """Measure the model after this number of steps."""
        seconds = time.monotonic() - self._started
        self._rows.append(
            {
                "step": step,
                "epoch": step / self._steps_per_epoch,
                "test_accuracy": self._accuracy(),
                "seconds": seconds,
            }
        )

    @property
    def rows(self) -> pd.DataFrame:
        """What was measured so far."""
        return pd.DataFrame(self._rows)

    @property
    def steps(self) -> IntArray:
        """(n,) number of steps at each measurement."""
        return np.array([row["step"] for row in self._rows], dtype=np.int64)

    def write(
        self,
        run_dir: Path,
        used: StepSettings,
        epsilons: FloatArray,
        rule: ClippingRule | None = None,
    ) -> None:
        """Write the rows, with the settings of the step before each.

        Args:
            run_dir: directory of the run.
            used: settings of all steps.
            epsilons: (n,) worst case at each of `steps`; NaN without privacy.
            rule: clips and adds noise, where that is not Opacus.
        """
        table = self.rows
        before = np.maximum(self.steps - 1, 0)
        table["max_grad_norm"] = used.max_grad_norm[before]
        table["noise_multiplier"] = used.noise_multiplier[before]
        noise = table["noise_multiplier"]
        added = noise if rule is None else noise.map(rule.gradient_multiplier)
        table["noise_std"] = added * table["max_grad_norm"]
        table["worst_case_epsilon"] = epsilons
        write_private_parquet(table, run_dir / CURVE)

    @torch.no_grad()
    def _accuracy(self) -> float:
        model, right = make_shadow(self._module).eval(), 0
        for inputs, targets in zip(
            self._inputs.split(_BATCH), self._targets.split(_BATCH), strict=True
        ):
            found = model(inputs.to(self._device)).argmax(1).cpu()
            right += int((found == targets).sum())
        return right / len(self._targets)
