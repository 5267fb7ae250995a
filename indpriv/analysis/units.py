"""How many rows people have: what that costs them, and what a cap on rows would cost in data and buy. Sensitive."""

from dataclasses import dataclass

import numpy as np

from indpriv.accountant import Method, cap_rows
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.norm_log import NormLog

_CAPS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
)  # public numbers, so that a cap chosen here is one


@dataclass(frozen=True)
class UnitSizes:
    """Units of `least` to `most` rows, and the run had `most` been a cap.

    Attributes:
        least, most: rows of a unit.
        n_units: units of so many rows.
        median, max: of their individual epsilon; None where there are none.
        worst_case_epsilon: of `most` rows, all clipped in every step, or at the cap of the run's
            privacy filter where that is less: what the run would guarantee everybody under that cap
            on rows.
        rows_dropped: rows that the cap would leave out, of n_rows in all.
        n_rows: rows of all units.
    """

    least: int
    most: int
    n_units: int
    median: float | None
    max: float | None
    worst_case_epsilon: float
    rows_dropped: int
    n_rows: int


def unit_sizes(log: NormLog, table: EpsilonTable) -> tuple[UnitSizes, ...]:
    """The units of a table by their number of rows, fewest first; empty where each has one row.

    Args:
        log: what the table was made of.
        table: epsilons of units.
    """
    largest = table.account.rows_per_unit
    if largest is None or largest == 1:
        return ()
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
                worst_case_epsilon=min(
                    cap.worst_case_epsilon, table.worst_case_epsilon
                ),  # a privacy filter may cap it
                rows_dropped=cap.rows_dropped,
                n_rows=log.n_examples,
            )
        )
        least = cap.cap + 1
    return tuple(found)
