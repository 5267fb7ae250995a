"""What a cap on the rows of a unit would cost in data, and what it would change in the guarantee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indpriv import _checks
from indpriv.accountant.method import Method
from indpriv.accountant.units import Units, check_method, worst_cases
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog


@dataclass(frozen=True)
class RowCap:
    """A run in which no unit has more than `cap` rows.

    Attributes:
        cap: the largest number of rows of a unit.
        rows_kept, rows_dropped: rows of all units together if each unit keeps its first `cap` rows.
        units_affected: the number of units that lose rows.
        worst_case_epsilon: the guarantee that the run would give to every unit.
    """

    cap: int
    rows_kept: int
    rows_dropped: int
    units_affected: int
    worst_case_epsilon: float


def cap_rows(log: NormLog, method: Method, caps: Sequence[int]) -> tuple[RowCap, ...]:
    """For each cap: how many rows it would drop, and the worst-case epsilon with it.

    The sample rate stays that of the run. The numbers of rows of the units are private themselves,
    so choose a cap without looking at them.

    Args:
        log: the norm log of a run whose unit is not the example; it needs unit_ids.
        method: how to account; its accountant must take units of several rows.
        caps: numbers of rows, each at least 1.

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
            'this log has no units to cap: it needs unit_ids and a unit such as "user"'
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
