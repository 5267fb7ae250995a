import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv.analysis import statistics
from indpriv.analysis.statistics import holm, permutation_test
from oracles import maxt_p_values

RNG = np.random.default_rng


@pytest.mark.parametrize("seed", range(8))
def test_p_values_are_those_of_every_shuffle(seed):
    rng = RNG(seed)
    n = 12
    values, groups, strata = (
        rng.exponential(1.0, n),
        rng.permutation(np.repeat([0, 1, 2], 4)),
        np.repeat([0, 1], 6),
    )
    found = permutation_test(values, groups, strata, tested=np.ones(3, bool), rng=rng)
    expected = maxt_p_values(values, groups, strata, rng, 400)
    # Two Monte Carlo estimates, of 999 and 400 permutations: four standard deviations apart at most.
    for mine, other in zip(found.adjusted, expected, strict=True):
        assert abs(mine - other) <= 0.004 + 4 * np.sqrt(
            max(other * (1 - other), 0.01) * (1 / 999 + 1 / 400)
        )


@pytest.mark.parametrize("n", [60, 2200])
def test_false_alarms_are_at_their_rate(n, monkeypatch):
    """The second size is drawn from the hypergeometric distribution instead of shuffled."""
    monkeypatch.setattr(statistics, "_MOST_PERMUTATIONS", 199)
    alarms = 0
    for seed in range(200):
        rng = RNG(seed)
        groups, strata = rng.integers(0, 2 + 3 * (n < 100), n), rng.integers(0, 1 + (n < 100), n)
        tested = np.bincount(groups) >= 10
        resampling_test = permutation_test(
            rng.exponential(1.0, n) + strata, groups, strata, tested=tested, rng=rng
        )
        alarms += resampling_test.p_value <= 0.05
    assert alarms <= 18  # 10 expected; more than 18 has probability 0.005


def test_runs_and_shuffles_agree(monkeypatch):
    rng = RNG(3)
    values, groups = rng.exponential(1.0, 4000), rng.integers(0, 3, 4000)
    values[groups == 1] += 0.06
    found = [permutation_test(values, groups, groups * 0, tested=np.ones(3, bool), rng=RNG(0))]
    monkeypatch.setattr(statistics, "_DRAW_COST", 1000)
    found.append(permutation_test(values, groups, groups * 0, tested=np.ones(3, bool), rng=RNG(0)))
    assert found[0].adjusted == pytest.approx(found[1].adjusted, abs=0.06)


def test_nothing_to_test():
    constant = np.full(30, 0.1)
    groups = np.arange(30) % 3
    assert (
        permutation_test(constant, groups, groups * 0, tested=np.ones(3, bool), rng=RNG(0)) is None
    )
    assert (
        permutation_test(RNG(0).random(30), groups, groups, tested=np.ones(3, bool), rng=RNG(0))
        is None
    )
    one = np.array([True, False, False])
    assert permutation_test(RNG(0).random(30), groups, groups * 0, tested=one, rng=RNG(0)) is None


def test_a_group_alone_in_its_strata_has_no_p_value():
    groups, strata = np.repeat([0, 1, 2], 20), np.repeat([0, 0, 1], 20)
    found = permutation_test(RNG(0).random(60), groups, strata, tested=np.ones(3, bool), rng=RNG(1))
    assert found.adjusted[2] is None
    assert found.adjusted[0] is not None


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_is_scipys_bonferroni_in_steps(p_values):
    corrected = holm(p_values)
    ordered = sorted(p_values)
    for p_value, found in zip(p_values, corrected, strict=True):
        stepped = [
            min(1.0, other * (len(ordered) - rank))
            for rank, other in enumerate(ordered)
            if other <= p_value
        ]
        assert found == pytest.approx(max(stepped))
