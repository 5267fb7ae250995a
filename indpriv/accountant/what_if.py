"""What the account of a run would say under other settings, and the noise that a target epsilon would need. Sensitive.

The log holds gradient norms of the run that happened. Another noise multiplier would have led training elsewhere, so
such answers hold gradients fixed and are estimates; every answer says what it assumes. What the log cannot answer
(norms of steps that were never taken, records that were never made) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from indpriv import _checks
from indpriv.accountant.claims import ESTIMATE
from indpriv.accountant.method import Method
from indpriv.accountant.per_example import table_for, worst_case_epsilon
from indpriv.accountant.units import Units, check_method, worst_cases
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.batch_norms import BatchNormsUntil
from indpriv.norm_log.norm_log import NormLog, StepSettings

FloatArray = NDArray[np.float64]

GRADIENTS_FIXED = "gradient norms are those of the run that happened; with another noise multiplier training would have gone elsewhere"
STOPPED_EARLY = "the run would have stopped at that step by plan, not because of what it showed"

_SMALLEST_SCALE, _LARGEST_SCALE = (
    1e-2,
    1e4,
)  # of the run's noise multipliers, in which calibration looks
_TOLERANCE = 1e-4  # relative, of the calibrated noise multiplier; it is rounded up


@dataclass(frozen=True)
class WhatIf:
    """An account under other settings, and what it assumes beyond the account of the run itself."""

    table: EpsilonTable
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """Noise that a target needs.

    Attributes:
        noise_multiplier: (total_steps,) the run's, times one factor; just large enough, never too small.
        scale: that factor.
        epsilon: what it reaches, at most the target.
        worst_case_epsilon: the guarantee of a run with this noise.
        assumptions: what the answer rests on.
    """

    noise_multiplier: FloatArray
    scale: float
    epsilon: float
    worst_case_epsilon: float
    assumptions: tuple[str, ...]


def account_if(
    log: NormLog,
    method: Method,
    *,
    noise_multiplier: ArrayLike | None = None,
    every: int | None = None,
    total_steps: int | None = None,
) -> WhatIf:
    """The account of a log had the run been noisier, shorter, or recorded less often, or for another delta.

    Args:
        log: of the run that happened.
        method: how to account it; any delta.
        noise_multiplier: one for all steps, or (total_steps,); default the run's. The result is an estimate.
        every: K, had records been made at steps 0, K, 2K, ... only.
        total_steps: had the run stopped there.

    Raises:
        InputError: the log cannot answer: more steps than it has, or records at steps that it lacks.

    >>> log = NormLog.from_arrays([[0.5], [0.4]], [0, 5], total_steps=10, noise_multiplier=1.0, max_grad_norm=1.0,
    ...                           sample_rate=0.1)
    >>> method = Method(delta=1e-5)
    >>> as_it_was, doubled = account_if(log, method), account_if(log, method, noise_multiplier=2.0)
    >>> bool(doubled.table.epsilon[0] < as_it_was.table.epsilon[0]), doubled.table.claim
    (True, 'estimate')
    """
    assumptions: list[str] = []
    if total_steps is not None and total_steps != log.total_steps:
        log = _stopped(log, total_steps)
        assumptions.append(STOPPED_EARLY)
    if every is not None:
        log = _recorded_every(log, every)
    if noise_multiplier is not None:
        log = _with_noise(log, _checks.check_noise_multiplier(noise_multiplier))
        assumptions.append(GRADIENTS_FIXED)
    table = table_for(log, method)
    if noise_multiplier is not None:
        reason = f"{GRADIENTS_FIXED[0].upper()}{GRADIENTS_FIXED[1:]}."
        reason = reason if table.claim != ESTIMATE else f"{reason} {table.claim_reason}"
        table = replace(table, claim=ESTIMATE, claim_reason=reason)
    return WhatIf(table, tuple(assumptions))


def noise_for_worst_case(log: NormLog, target_epsilon: float, method: Method) -> Calibration:
    """The smallest multiple of the run's noise whose worst-case epsilon is at most the target.

    This depends on the settings alone, not on norms: it is the guarantee of a run with this noise.

    Args:
        log: of a run; only its settings are read.
        target_epsilon: above 0.
        method: how to account.

    Raises:
        InputError: a bad target, or one that no noise within a factor of 10^4 reaches.
    """

    def reached(scale: float) -> float:
        return worst_case_epsilon(_scaled(log, scale), method)

    scale, epsilon = _smallest_scale(reached, _checked_target(target_epsilon))
    return Calibration(
        noise_multiplier=log.settings.noise_multiplier * scale,
        scale=scale,
        epsilon=epsilon,
        worst_case_epsilon=epsilon,
        assumptions=("the run has the number of steps and the sample rates of the log",),
    )


def noise_for_quantile(
    log: NormLog, target_epsilon: float, method: Method, *, quantile: float
) -> Calibration:
    """The smallest multiple of the run's noise at which this share of the examples has at most the target epsilon.

    An estimate: gradients are held fixed. It is no guarantee for anybody; the result's worst_case_epsilon is.

    Args:
        log: of a run that happened.
        target_epsilon: above 0.
        method: how to account.
        quantile: share of the examples, in (0, 1]; 0.5 is the median.

    Raises:
        InputError: a bad target or quantile, or a target that the examples stay below however little noise there is.
    """
    if not (isinstance(quantile, int | float | np.number) and 0 < quantile <= 1):
        raise InputError(
            f"quantile={quantile!r} is not in (0, 1]; pass the share of the examples, e.g. 0.5"
        )
    tables: dict[float, EpsilonTable] = {}

    def reached(scale: float) -> float:
        tables[scale] = table_for(_scaled(log, scale), method)
        return float(np.quantile(tables[scale].epsilon, quantile, method="higher"))

    scale, epsilon = _smallest_scale(reached, _checked_target(target_epsilon))
    return Calibration(
        noise_multiplier=log.settings.noise_multiplier * scale,
        scale=scale,
        epsilon=epsilon,
        worst_case_epsilon=tables[scale].worst_case_epsilon,
        assumptions=(GRADIENTS_FIXED, f"of the log itself: {tables[scale].claim_reason}"),
    )


def _checked_target(target_epsilon: float) -> float:
    expected = "one finite number above 0"
    found = _checks.check_row(
        "target_epsilon", target_epsilon, lambda x: np.isfinite(x) & (x > 0), expected, least=1
    )
    if len(found) > 1:
        raise InputError(f"target_epsilon={target_epsilon!r} must be {expected}")
    return float(found[0])


def _smallest_scale(reached: Callable[[float], float], target: float) -> tuple[float, float]:
    """The smallest scale at which a falling function is at most the target, rounded up, and its value there."""
    low, high, at_high = 1.0, 1.0, reached(1.0)
    while at_high > target:
        low, high = high, high * 2
        if high > _LARGEST_SCALE:
            raise InputError(
                f"target_epsilon={target} needs more than {_LARGEST_SCALE:g} times the run's noise"
            )
        at_high = reached(high)
    while low == high:  # the run itself reaches the target: look for less noise
        low = high / 2
        if low < _SMALLEST_SCALE:
            raise InputError(
                f"target_epsilon={target} is not reached even with {_SMALLEST_SCALE:g} of the run's noise; "
                "these examples stay below it: pass a smaller target"
            )
        at_low = reached(low)
        if at_low <= target:
            high, at_high = low, at_low
    while high / low > 1 + _TOLERANCE:
        middle = float(np.sqrt(low * high))
        value = reached(middle)
        if value <= target:
            high, at_high = middle, value
        else:
            low = middle
    return high, at_high


def _scaled(log: NormLog, scale: float) -> NormLog:
    noise = log.settings.noise_multiplier
    return (
        _with_noise(log, scale * (noise[0] if noise.strides == (0,) else noise))
        if scale != 1
        else log
    )


def _with_noise(log: NormLog, noise_multiplier: ArrayLike) -> NormLog:
    settings = StepSettings.from_values(
        log.total_steps, noise_multiplier, log.settings.max_grad_norm, log.settings.sample_rate
    )
    return replace(log, settings=settings)


def _recorded_every(log: NormLog, every: int) -> NormLog:
    wanted = np.arange(0, log.total_steps, _checks.check_positive_int("every", every))
    missing = np.setdiff1d(wanted, log.recorded_steps)
    if len(missing):
        raise InputError(
            f"every={every} needs a record at step {missing[0]}, which the log lacks; it can answer for multiples of the "
            "distance of its own records only"
        )
    return log.thin(every)


def _stopped(log: NormLog, total_steps: int) -> NormLog:
    _checks.check_positive_int("total_steps", total_steps)
    if total_steps > log.total_steps:
        raise InputError(
            f"total_steps={total_steps} is beyond the {log.total_steps} steps of the run; nobody knows the norms of steps "
            "that were never taken: train on and record"
        )
    settings = log.settings
    kept = int(np.searchsorted(log.recorded_steps, total_steps))
    return replace(
        log,
        settings=StepSettings(
            settings.noise_multiplier[:total_steps],
            settings.max_grad_norm[:total_steps],
            settings.sample_rate[:total_steps],
        ),
        recorded_steps=log.recorded_steps[:kept],
        rows=log.rows[:kept],
        reference_positions=None,
        reference_records=None,
        batch_norms=None
        if log.batch_norms is None
        else BatchNormsUntil(log.batch_norms, total_steps),
    )


@dataclass(frozen=True)
class RowCap:
    """A run with at most so many rows of a unit.

    Attributes:
        cap: most rows of a unit.
        rows_kept, rows_dropped: of all units together, with the first `cap` rows of each kept.
        units_affected: units that lose rows.
        worst_case_epsilon: what the run would guarantee to every unit.
    """

    cap: int
    rows_kept: int
    rows_dropped: int
    units_affected: int
    worst_case_epsilon: float


def cap_rows(log: NormLog, method: Method, caps: Sequence[int]) -> tuple[RowCap, ...]:
    """What caps on the rows of a unit would cost in data, and what they would buy in the guarantee.

    The sample rate stays that of the run. How many rows units have is itself private: a cap is chosen without it.

    Args:
        log: of a run whose unit is not the example, with unit_ids.
        method: how to account; "rdp".
        caps: each at least 1.

    Raises:
        InputError: a bad cap, or a log in which each row is its own unit.

    >>> log = NormLog.from_arrays([[0.5] * 4], [0], total_steps=10, noise_multiplier=1.0, max_grad_norm=1.0,
    ...                           sample_rate=0.1, unit="user", unit_ids=["a", "a", "a", "b"])
    >>> (half,) = cap_rows(log, Method(delta=1e-5), [2])
    >>> half.rows_dropped, half.units_affected
    (1, 1)
    """
    units = Units.of(log)
    if units is None:
        raise InputError(
            'rows have no units to cap: the log needs unit_ids and a unit such as "user"'
        )
    check_method(method, log.unit)
    wanted = np.array([_checks.check_positive_int("cap", cap) for cap in caps], dtype=np.int64)
    most, place = np.unique(np.minimum(wanted, units.n_rows.max()), return_inverse=True)
    epsilon = worst_cases(log, method, most)[place]
    kept = [int(np.minimum(units.n_rows, cap).sum()) for cap in wanted.tolist()]
    return tuple(
        RowCap(
            cap=cap,
            rows_kept=rows,
            rows_dropped=log.n_examples - rows,
            units_affected=int((units.n_rows > cap).sum()),
            worst_case_epsilon=float(worst),
        )
        for cap, rows, worst in zip(wanted.tolist(), kept, epsilon, strict=True)
    )
