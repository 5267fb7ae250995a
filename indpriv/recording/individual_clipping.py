"""Individual clipping (Yu et al. 2023, Algorithm 3): each example is clipped at its last recorded level. Sensitive.

An example's contribution to a step is then at most what the account of its last record says, so that the account is
exact with between_records="last". The noise stays at noise_multiplier * max_grad_norm. Levels come from full records
only: they are functions of the trajectory and of the example, never of who was sampled, and so never of free records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indpriv.levels import Levels
from indpriv.norm_log import NormLog

_FLOAT32 = 1 - 2**-23  # this part of a level is not above it once rounded to float32


class ClipLevels:
    """The level that each example is clipped at: max_grad_norm until a record is taken, then that record's."""

    def __init__(self, levels: Levels | None) -> None:
        """Clip at max_grad_norm for now.

        Args:
            levels: the log's rounding, upwards; None where it keeps norms in full.
        """
        self._levels = levels
        self._norms: NDArray[np.float64] | None = None  # of a record whose step is under way
        self._bounds: NDArray[np.float64] | None = None  # of the last record whose step was taken

    def take(self, norms: NDArray[np.float64]) -> None:
        """Begin a record: norms (n_examples,) of the step about to start, which are rounded at its max_grad_norm."""
        self._norms = norms

    def settle(self, max_grad_norm: float) -> None:
        """End the record that was begun last: its step ran at max_grad_norm."""
        if self._norms is not None:
            self._bounds, self._norms = self._rounded(self._norms, max_grad_norm), None

    def restore(self, run_dir: Path) -> None:
        """Go on where the log of a run ends: at the levels of its last record."""
        log = NormLog.open(run_dir)
        if log.n_records:
            last = log.records.read(log.rows[-1:], 0, log.n_examples)[0]
            self._bounds = self._stood_for(last, float(log.settings.max_grad_norm[log.recorded_steps[-1]]))

    def thresholds(self, positions: NDArray[np.int64], max_grad_norm: float) -> Tensor:
        """Clip thresholds (n,) float64 of the examples at these positions, at most max_grad_norm of the step under way."""
        if self._norms is not None:
            bounds = self._rounded(self._norms[positions], max_grad_norm)
        elif self._bounds is not None:
            bounds = self._bounds[positions]
        else:
            bounds = np.full(len(positions), np.inf)
        return torch.as_tensor(np.minimum(bounds, max_grad_norm) * _FLOAT32)

    def _rounded(self, norms: NDArray[np.float64], max_grad_norm: float) -> NDArray[np.float64]:
        """What the log will say that these norms are at most."""
        kept = norms if self._levels is None else self._levels.encode(norms, max_grad_norm)
        return self._stood_for(kept, max_grad_norm)

    def _stood_for(self, kept: NDArray[Any], max_grad_norm: float) -> NDArray[np.float64]:
        """What a row of the log says, as accounting reads it: a clipped norm counts as max_grad_norm of any step."""
        if self._levels is None:
            return kept
        return np.where(kept > self._levels.top, np.inf, self._levels.relative(kept) * max_grad_norm)
