"""Individual clipping (Yu et al. 2023, Algorithm 3): each example is clipped at its last recorded level. Sensitive.

An example's contribution to a step is then at most what the account of its last record says, so that the account is
exact with between_records="last". The noise stays at noise_multiplier * max_grad_norm. Levels come from full records
only: they are functions of the trajectory and of the example, never of who was sampled, and so never of batch norms.

A level is the norm of its record plus a headroom, a fixed part of max_grad_norm, rounded up: norms grow until the next
record, above all where an example that was easy no longer is, and clipping just those would hold training back. The log
records levels, so that whoever reads it counts what training clipped at, whatever the headroom was. The paper has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indpriv.errors import InputError
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import NormLog

DEFAULT_HEADROOM = (
    0.1  # benchmarks/individual_clipping.py: with a tenth of it, levels an epoch old cost accuracy
)
_FLOAT32 = 1 - 2**-23  # this part of a level is not above it once rounded to float32


def with_headroom(
    norms: NDArray[np.float64], headroom: float, max_grad_norm: float
) -> NDArray[np.float64]:
    """What the log records of these norms, before rounding: headroom is a fraction of max_grad_norm."""
    return norms + headroom * max_grad_norm


def check_headroom(
    value: float | None, *, individually: bool, logged: float | None = None
) -> float:
    """The headroom of a run: as given; else that of the log it goes on with, else the default. 0 for ordinary clipping.

    Raises:
        InputError: it is out of [0, 1], not that of the log, or given without individual clipping.
    """
    if not individually:
        if value is not None:
            raise InputError(
                f"clip_headroom={value!r} is for individual clipping; pass individual_clipping=True, or leave it out"
            )
        return 0.0
    if value is None:
        return DEFAULT_HEADROOM if logged is None else logged
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(
            f"clip_headroom={value!r} is not in [0, 1]; it is a fraction of max_grad_norm, e.g. 0.1"
        )
    if logged not in (None, value):
        raise InputError(
            f"clip_headroom={value:g}, but the log to continue has {logged:g}; pass that, or leave it out"
        )
    return float(value)


class ClipLevels:
    """The level that each example is clipped at: max_grad_norm until a record is taken, then that record's."""

    def __init__(self, levels: Levels | None, headroom: float = 0.0) -> None:
        """Clip at max_grad_norm for now.

        Args:
            levels: the log's rounding, upwards; None where it keeps norms in full.
            headroom: as of `with_headroom`.
        """
        self._levels, self._headroom = levels, headroom
        self._norms: NDArray[np.float64] | None = None  # of a record whose step is under way
        self._bounds: NDArray[np.float64] | None = None  # of the last record whose step was taken
        self.version = 0  # how often the levels have changed

    def take(self, norms: NDArray[np.float64]) -> None:
        """Begin a record: norms (n_examples,) of the step about to start, which are rounded at its max_grad_norm."""
        self._norms = norms
        self.version += 1

    def settle(self, max_grad_norm: float) -> None:
        """End the record that was begun last: its step ran at max_grad_norm."""
        if self._norms is not None:
            self._bounds, self._norms = self._rounded(self._norms, max_grad_norm), None

    def restore(self, run_dir: Path) -> None:
        """Go on where the log of a run ends: at the levels of its last record."""
        log = NormLog.open(run_dir)
        if log.n_records:
            last = log.records.read(log.rows[-1:], 0, log.n_examples)[0]
            self._bounds = self._stood_for(
                last, float(log.settings.max_grad_norm[log.recorded_steps[-1]])
            )

    def thresholds(self, positions: NDArray[np.int64], max_grad_norm: float) -> Tensor:
        """Clip thresholds (n,) float64 of the examples at these positions, at most max_grad_norm of the step under way."""
        limits = self.bounds(positions, max_grad_norm)
        held = (limits * _FLOAT32).astype(np.float32)
        # Below the normal range of float32 its steps are wider than that.
        held = np.where(held > limits, np.nextafter(held, np.float32(0)), held)
        return torch.as_tensor(held.astype(np.float64))

    def bounds(self, positions: NDArray[np.int64], max_grad_norm: float) -> NDArray[np.float64]:
        """(n,) what the account takes for the contributions of these examples to the step under way."""
        if self._norms is not None:
            bounds = self._rounded(self._norms[positions], max_grad_norm)
        elif self._bounds is not None:
            bounds = self._bounds[positions]
        else:
            bounds = np.full(len(positions), np.inf)
        return np.minimum(bounds, max_grad_norm)

    def _rounded(self, norms: NDArray[np.float64], max_grad_norm: float) -> NDArray[np.float64]:
        """What the log will say that these norms are at most."""
        asked = with_headroom(norms, self._headroom, max_grad_norm)
        kept = asked if self._levels is None else self._levels.encode(asked, max_grad_norm)
        return self._stood_for(kept, max_grad_norm)

    def _stood_for(self, kept: NDArray[Any], max_grad_norm: float) -> NDArray[np.float64]:
        """What a row of the log says, as accounting reads it: a clipped norm counts as max_grad_norm of any step."""
        if self._levels is None:
            return kept
        return np.where(
            kept > self._levels.top, np.inf, self._levels.relative(kept) * max_grad_norm
        )
