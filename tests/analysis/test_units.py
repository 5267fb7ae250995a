from dataclasses import replace

import numpy as np
import pytest

from indpriv import NormLog, account
from indpriv.analysis.distribution import unit_sizes

DELTA = 1e-5
RUN = {"total_steps": 20, "noise_multiplier": 2.0, "max_grad_norm": 1.0, "sample_rate": 0.1}
UNITS = [*"aaaaaaabbbc", "d"]


def log_of(unit, units):
    return NormLog.from_arrays(np.full((1, len(UNITS)), 0.4), [0], unit=unit, unit_ids=units, **RUN)


def test_units_by_their_number_of_rows_and_what_a_cap_there_costs():
    log = log_of("user", UNITS)
    table = account(log, delta=DELTA)
    found = unit_sizes(log, table)
    assert [(row.least, row.most, row.n_units, row.rows_dropped) for row in found] == [
        (1, 1, 2, 8),
        (2, 2, 0, 6),
        (3, 5, 1, 2),
        (6, 7, 1, 0),
    ]
    epsilon = dict(zip(table.example_ids.tolist(), table.epsilon.tolist(), strict=True))
    assert found[0].median == found[0].max == epsilon["c"] == epsilon["d"]
    assert found[1].median is found[1].max is None
    assert (found[2].max, found[3].max) == (epsilon["b"], epsilon["a"])
    worst = [row.worst_case_epsilon for row in found]
    assert worst == sorted(worst)
    assert worst[-1] == table.worst_case_epsilon
    assert worst[0] == pytest.approx(
        account(log_of("example", None), delta=DELTA).worst_case_epsilon, rel=1e-5
    )
    assert all(row.max is None or row.max <= row.worst_case_epsilon for row in found)


def test_a_privacy_filter_caps_the_worst_case_of_many_rows():
    log = log_of("user", UNITS)
    table = account(log, delta=DELTA)
    free = [row.worst_case_epsilon for row in unit_sizes(log, table)]
    cap = (free[0] + free[1]) / 2
    capped = [
        row.worst_case_epsilon for row in unit_sizes(log, replace(table, worst_case_epsilon=cap))
    ]
    assert capped == [free[0], cap, cap, cap]


@pytest.mark.parametrize(("unit", "units"), [("example", None), ("user", list(range(len(UNITS))))])
def test_nothing_where_each_unit_has_one_row(unit, units):
    log = log_of(unit, units)
    assert unit_sizes(log, account(log, delta=DELTA)) == ()
