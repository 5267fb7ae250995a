import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audits.exposure.findings import (
    exposure_table,
    mean_exposure_ceiling,
    measure_exposure,
)
from audits.exposure.ranks import Exposures
from indpriv import NormLog, account
from indpriv.errors import InputError

N = 10_000


@cache
def a_table(noise=4.0):
    """Eight owners of four rows each, and one row of text."""
    owners = np.repeat([f"owner {k}" for k in range(8)], 4).tolist()
    log = NormLog.from_arrays(
        [[0.5] * 33],
        [0],
        total_steps=20,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=0.1,
        unit="user",
        unit_ids=[*owners, "text"],
    )
    return account(log, delta=1e-5)


def secrets(ranks, rows=4):
    return Exposures.from_ranks([f"owner {k}" for k in range(8)], [rows] * 8, ranks, N)


@given(st.floats(0, 20), st.sampled_from([0.0, 1e-5, 0.01]), st.sampled_from([2, 10, 1000]))
def test_the_ceiling_covers_the_worst_law_of_ranks(epsilon, delta, n):
    """Slow reference: the mean over ranks whose distribution function is as large as allowed."""
    reached = [min(1.0, math.exp(epsilon) * k / n + delta) for k in range(1, n)] + [1.0]
    chances = np.diff([0.0, *reached])
    mean = sum(chances * np.log2(n / np.arange(1, n + 1)))
    ceiling = mean_exposure_ceiling(epsilon, delta, n)
    assert mean <= ceiling + 1e-9
    assert ceiling <= mean + 1.45  # one bit of a rank, spread over its share
    assert ceiling <= math.log2(n)


def test_the_ceiling_is_tight_for_many_candidates():
    n = 200_000
    shares = np.arange(1, n + 1) / n
    reached = np.minimum(1, math.exp(2) * shares + 1e-3)
    mean = np.sum(np.diff([0, *reached]) * -np.log2(shares))
    assert mean_exposure_ceiling(2, 1e-3, n) == pytest.approx(mean, abs=0.02)


@pytest.mark.parametrize("shared", [False, True])
def test_false_alarms_are_at_most_the_level(shared):
    """Ranks as exposed as the worst case allows, of one secret or of all of a model together."""
    table, rng = a_table(), np.random.default_rng(int(shared))
    worst = float(table.details["unit_worst_case"][0])
    alarms = 0
    for _ in range(150):
        uniform = np.repeat(rng.random(), 8) if shared else rng.random(8)
        share = np.clip((uniform - 1e-5) / math.exp(worst), 1 / N, 1)
        alarms += measure_exposure(secrets(np.ceil(share * N)), table).findings
    assert alarms <= 16  # 7.5 expected at the level; beyond 16 with probability 0.002


def test_a_planted_leak_is_a_finding_and_ordinary_ranks_are_none():
    table = a_table()
    assert table.details["unit_worst_case"][0] < 3
    (leak,) = measure_exposure(secrets([1] * 8), table).rows
    assert leak.above_ceiling
    assert leak.mean > leak.ceiling
    assert leak.extracted == 8
    assert leak.p_value < 0.01
    (calm,) = measure_exposure(secrets(range(1000, 9000, 1000)), table).rows
    assert not calm.above_ceiling
    assert calm.extracted == 0
    assert calm.mean < calm.individual_ceiling < calm.ceiling


def test_the_epsilon_is_that_of_all_rows_of_the_owner():
    table = a_table()
    (row,) = measure_exposure(secrets([1] * 8), table).rows
    mine = np.char.startswith(table.example_ids.astype(str), "owner")
    assert row.worst_case_epsilon == table.details["unit_worst_case"][mine].max()
    assert row.worst_case_epsilon > 2 * table.details["unit_worst_case"][~mine].max()
    frame = exposure_table(secrets([1] * 8), table)
    assert frame["epsilon"].to_numpy() == pytest.approx(table.epsilon[mine])
    assert frame["ceiling"][0] == mean_exposure_ceiling(frame["epsilon"][0], 1e-5, N)


def test_controls_are_compared_with_chance_and_have_no_epsilon():
    ids = [*(f"owner {k}" for k in range(8)), *(f"control {k}" for k in range(40))]
    ranks = [*[1] * 8, *np.linspace(100, N, 40).astype(int)]
    found = measure_exposure(Exposures.from_ranks(ids, [4] * 8 + [0] * 40, ranks, N), a_table())
    controls, inserted = found.rows
    assert (controls.rows, inserted.rows) == (0, 4)
    assert controls.ceiling is controls.p_value is None
    assert found.control_p_value > 0.9
    low = Exposures.from_ranks([f"c{k}" for k in range(40)], [0] * 40, [50] * 40, N)
    assert measure_exposure(low).control_p_value < 1e-6


def test_owners_must_be_units_of_the_run_with_these_rows():
    with pytest.raises(InputError, match="another number of rows"):
        measure_exposure(secrets([1] * 8, rows=16), a_table())
    strange = Exposures.from_ranks(["nemo"], [4], [1], N)
    with pytest.raises(InputError, match="no unit nemo"):
        measure_exposure(strange, a_table())
