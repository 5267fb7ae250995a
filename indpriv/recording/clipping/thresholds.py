"""Clip thresholds of single examples: their recorded levels, and a privacy filter's. Sensitive.

Individual clipping (Yu et al. 2023, Algorithm 3) clips each example at its last recorded level. It
then contributes to a step at most what its last record says, so the account with
between_records="last" is exact. The noise stays at noise_multiplier * max_grad_norm. Levels come
from full records only: they depend on the trajectory and on the example, never on which examples
were sampled, and so never on batch norms. A level is the recorded norm plus a headroom, which the
paper has not, rounded up: norms grow until the next record, most of all for examples that become
hard, and clipping exactly these would slow down learning. The log records levels, so accounting
needs no knowledge of the headroom.

Under a privacy filter an example that would exceed the cap is left out, by clipping it at 0 from
then on. Before each step, every example that is not yet left out is charged for its clip threshold
of that step, whether it is drawn or not. Rows of one unit are charged, and left out, together.
`indpriv.PrivacyFilter` says what this guarantees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indpriv._arrays import FloatArray, IntArray
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import Levels

# With a tenth of it, levels an epoch old cost accuracy (benchmarks/individual_clipping.py).
DEFAULT_HEADROOM = 0.1
_FLOAT32 = 1 - 2**-23  # a level times this is not above the level once it is rounded to float32


def with_headroom(norms: FloatArray, headroom: float, max_grad_norm: float) -> FloatArray:
    """What the log records before rounding; headroom is a fraction of max_grad_norm."""
    return norms + headroom * max_grad_norm


def check_headroom(
    value: float | None, *, individually: bool, logged: float | None = None
) -> float:
    """The headroom of a run: the given one; else that of the log to continue, else the default.

    It is 0 without individual clipping. InputError if it is not in [0, 1], differs from the log's,
    or is given without individual clipping.
    """
    if not individually:
        if value is not None:
            raise InputError(
                f"clip_headroom={value!r} is for individual clipping; pass "
                "individual_clipping=True, or leave it out"
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
            f"clip_headroom={value:g}, but the log to continue has {logged:g}; pass that, or leave "
            "it out"
        )
    return float(value)


class ClipLevels:
    """Each example's clip level: max_grad_norm before the first record, then the last record's."""

    def __init__(self, levels: Levels | None, headroom: float = 0.0) -> None:
        """Clip at max_grad_norm for now; levels is None if the log keeps norms in full."""
        self._levels, self._headroom = levels, headroom
        self._norms: FloatArray | None = None  # of a record whose step is not over
        self._bounds: FloatArray | None = None  # of the last record whose step is over
        self.version = 0  # number of times that the levels have changed

    def begin_record(self, norms: FloatArray) -> None:
        """Use norms (n_examples,) of the coming step; they are rounded at its max_grad_norm."""
        self._norms = norms
        self.version += 1

    def end_record(self, max_grad_norm: float) -> None:
        """Fix the levels of the record begun last, if any: its step ran at max_grad_norm."""
        if self._norms is not None:
            self._bounds, self._norms = self._rounded(self._norms, max_grad_norm), None

    def restore(self, run_dir: Path) -> None:
        """Continue at the levels of the last record in a log."""
        log = NormLog.open(run_dir)
        if log.n_records:
            last = log.records.read(log.rows[-1:], 0, log.n_examples)[0]
            clip = float(log.settings.max_grad_norm[log.recorded_steps[-1]])
            self._bounds = self._bounds_in_log(last, clip)

    def thresholds(self, positions: IntArray, max_grad_norm: float) -> Tensor:
        """Clip thresholds (n,) float64 at these positions, at most max_grad_norm of this step."""
        limits = self.bounds(positions, max_grad_norm)
        held = (limits * _FLOAT32).astype(np.float32)
        # Below the normal range of float32, its steps are wider than that.
        held = np.where(held > limits, np.nextafter(held, np.float32(0)), held)
        return torch.as_tensor(held.astype(np.float64))

    def bounds(self, positions: IntArray, max_grad_norm: float) -> FloatArray:
        """(n,) contributions of these examples to the current step, as the account counts them."""
        if self._norms is not None:
            bounds = self._rounded(self._norms[positions], max_grad_norm)
        elif self._bounds is not None:
            bounds = self._bounds[positions]
        else:
            bounds = np.full(len(positions), np.inf)
        return np.minimum(bounds, max_grad_norm)

    def _rounded(self, norms: FloatArray, max_grad_norm: float) -> FloatArray:
        """The bounds that the log will give for these norms."""
        exact = with_headroom(norms, self._headroom, max_grad_norm)
        row = exact if self._levels is None else self._levels.encode(exact, max_grad_norm)
        return self._bounds_in_log(row, max_grad_norm)

    def _bounds_in_log(self, row: NDArray[Any], max_grad_norm: float) -> FloatArray:
        """Bounds that a row of the log gives; a clipped norm counts as any step's max_grad_norm."""
        if self._levels is None:
            return row
        bounds = self._levels.relative(row) * max_grad_norm
        return np.where(row > self._levels.top, np.inf, bounds)


class Filter(Protocol):
    """What a privacy filter charges; `indpriv.PrivacyFilter` says it in full."""

    @property
    def order(self) -> float: ...  # noqa: D102
    @property
    def rdp_cap(self) -> float: ...  # noqa: D102
    def charges(  # noqa: D102
        self,
        relative_norms: FloatArray,
        *,
        noise_multiplier: float,
        sample_rate: float,
        units: IntArray | None = None,
    ) -> FloatArray: ...
    def spent(self, log: NormLog, left_out_at: IntArray) -> FloatArray: ...  # noqa: D102


class FilteredClipping:
    """What each example has spent, and which examples are still present."""

    def __init__(
        self,
        policy: Filter,
        levels: ClipLevels | None,
        n_examples: int,
        units: IntArray | None = None,
    ) -> None:
        """Begin with all examples present and nothing spent.

        Without levels (of individual clipping), all examples are clipped at max_grad_norm. units
        (n_examples,) numbers the unit of each row from 0; None if each row is a unit.
        """
        self._policy, self._levels, self._units = policy, levels, units
        self._positions = np.arange(n_examples)
        self.spent = np.zeros(n_examples)
        self.present = np.ones(n_examples, dtype=bool)
        self._charged: tuple[int, StepSetting] | None = None  # the step that was charged last
        # Of one step, and what they depend on: its setting and the version of the levels.
        self._charges: tuple[StepSetting, int, FloatArray] | None = None
        self._unlogged: list[tuple[int, IntArray]] = []  # steps, and positions left out

    def restore(self, log: NormLog, left_out_at: IntArray) -> None:
        """Continue where a log ends; left_out_at (n_examples,) as `read_left_out` returns it."""
        self.spent = self._policy.spent(log, left_out_at)
        self.present = left_out_at >= log.total_steps

    def charge(self, step: int, setting: StepSetting) -> None:
        """Charge present examples for the coming step; leave out those that would exceed the cap.

        A step is charged once, however many micro-batches it has; EvidenceError if it was charged
        under other settings.
        """
        if self._charged is not None and self._charged[0] == step:
            if self._charged[1] != setting:
                raise EvidenceError(
                    f"the settings of step {step} changed from {self._charged[1]} to {setting} "
                    "after the privacy filter had charged for it; change noise, clipping and "
                    "sampling between steps only"
                )
            return
        charges = self._charges_of(setting)
        beyond = self.present & (self.spent + charges > self._policy.rdp_cap)
        if beyond.any():
            self.present = self.present & ~beyond
            self._unlogged.append((step, np.flatnonzero(beyond)))
        self.spent += np.where(self.present, charges, 0.0)
        self._charged = step, setting

    def thresholds(self, positions: IntArray, max_grad_norm: float) -> Tensor:
        """Clip thresholds (n,) float64 at these positions, for the step that was charged last."""
        present = torch.as_tensor(self.present[positions])
        if self._levels is None:
            return present * max_grad_norm
        return present * self._levels.thresholds(positions, max_grad_norm)

    def newly_left_out(self) -> tuple[IntArray, IntArray]:
        """Positions (n,) left out but not logged yet, and the steps (n,) that left them out."""
        none = self._positions[:0]
        positions = [found for _, found in self._unlogged]
        steps = [np.full(len(found), step) for step, found in self._unlogged]
        return np.concatenate([*positions, none]), np.concatenate([*steps, none])

    def logged(self) -> None:
        """All examples that were left out so far are in the log."""
        self._unlogged = []

    def _charges_of(self, setting: StepSetting) -> FloatArray:
        """(n_examples,) of one step; computed again only if setting or levels have changed."""
        version = 0 if self._levels is None else self._levels.version
        if self._charges is None or self._charges[:2] != (setting, version):
            clip = setting.max_grad_norm
            relative = np.ones(len(self._positions))
            if self._levels is not None:
                relative = self._levels.bounds(self._positions, clip) / clip
            charges = self._policy.charges(
                relative,
                noise_multiplier=setting.noise_multiplier,
                sample_rate=setting.sample_rate,
                units=self._units,
            )
            self._charges = setting, version, charges
        return self._charges[2]
