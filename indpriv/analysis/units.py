"""How many rows units have, what that costs them, and what a cap would cost. Sensitive."""

from dataclasses import dataclass

import numpy as np

from indpriv.accountant import Method, cap_rows
from indpriv.epsilon_table import Epsilons, EpsilonTable
from indpriv.norm_log.norm_log import NormLog

# Public numbers, so that choosing one of them reveals nothing.
_CAPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True)
class UnitSizes:
    """Units of `least` to `most` rows, and what a cap of `most` would have meant.

    Attributes:
        least, most: number of rows of a unit.
        n_units: number of such units.
        median, max: of their individual epsilon; None without such units.
        worst_case_epsilon: of `most` rows, all clipped in every step, or at the cap of the run's
            privacy filter if that is smaller: what the run would guarantee every unit under that
            cap.
        rows_dropped: number of rows that the cap would leave out.
        n_rows: number of rows of all units.
    """

    least: int
    most: int
    n_units: int
    median: float | None
    max: float | None
    worst_case_epsilon: float
    rows_dropped: int
    n_rows: int


def unit_sizes(log: NormLog, epsilons: Epsilons) -> tuple[UnitSizes, ...]:
    """The units of epsilons by their number of rows, fewest first; empty where each has one row.

    Empty too with known participation, where the worst case depends on who took part when.
    """
    account = epsilons.account
    largest = account.rows_per_unit
    if largest is None or largest == 1 or account.participation == "known":
        return ()
    table = epsilons if isinstance(epsilons, EpsilonTable) else epsilons.table()
    most = [*(cap for cap in _CAPS if cap < largest), largest]
    method = Method(delta=table.account.delta, conversion=table.account.conversion)
    n_rows, found, least = table.details["n_rows"].astype(np.int64), [], 1
    for cap in cap_rows(log, method, most):
        epsilon = table.epsilon[(n_rows >= least) & (n_rows <= cap.cap)]
        found.append(
            UnitSizes(
                least=least,
                most=cap.cap,
                n_units=len(epsilon),
                median=float(np.median(epsilon)) if len(epsilon) else None,
                max=float(epsilon.max()) if len(epsilon) else None,
                # A privacy filter may cap it.
                worst_case_epsilon=min(cap.worst_case_epsilon, table.worst_case_epsilon),
                rows_dropped=cap.rows_dropped,
                n_rows=log.n_examples,
            )
        )
        least = cap.cap + 1
    return tuple(found)
