import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from indpriv.analysis.attacks.rates import ALL, best_threshold, threshold_attack
from indpriv.analysis.statistics import clopper_pearson
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from synthetic import parts


def scores(members, nonmembers, groups=None):
    values = np.array([*members, *nonmembers], dtype=np.float64)
    member = np.arange(len(values)) < len(members)
    return AttackScores(
        values, member, "test", None if groups is None else np.array(groups, dtype=object)
    )


def success(members, nonmembers, groups=None, seed=0):
    """Row of each group, or of all examples, by name."""
    of = scores(members, nonmembers, groups)
    rates, _ = threshold_attack(of, by="" if groups is None else "kind", seed=seed)
    return {name: row["success"] for name, row in parts(rates).items()}


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
)
def test_no_threshold_does_better(members, nonmembers):
    members, nonmembers = np.array(members, float), np.array(nonmembers, float)

    def right(threshold):
        return (members >= threshold).sum() + (nonmembers < threshold).sum()

    found = best_threshold(members, nonmembers)
    assert right(found) == max(map(right, [-np.inf, *range(8), np.inf]))


@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 1), (1, 1), (0, 20), (7, 20), (20, 20), (5020, 10000)]
)
def test_the_interval_is_scipys(successes, trials):
    expected = stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
    found = clopper_pearson(successes, trials)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_an_impossible_outcome_is_refused():
    for successes, trials in ((3, 2), (-1, 4)):
        with pytest.raises(InputError, match="not a possible outcome"):
            clopper_pearson(successes, trials)


def test_members_by_heart_are_found():
    overall = success(np.full(50, -0.01), np.full(50, -2.0))[ALL]
    assert (overall.value, overall.n) == (1.0, 50)
    assert overall.low > 0.9


def test_under_the_null_the_interval_holds_chance():
    rng = np.random.default_rng(0)
    found = [success(*rng.normal(size=(2, 60)), seed=seed)[ALL] for seed in range(200)]
    covered = sum(row.low <= 0.5 <= row.high for row in found)
    assert covered >= 183  # 95 % of 200 is 190; below 183 has probability under 0.002
    # Chosen and reported on one half it would be 0.57; the mean of 200 rates of 60 guesses has deviation 0.005.
    assert abs(np.mean([row.value for row in found]) - 0.5) < 0.02


def test_the_same_number_of_each_and_half_to_report():
    rng = np.random.default_rng(1)
    overall = success(rng.random(1000), rng.random(101))[ALL]
    assert (overall.n_members, overall.n_others, overall.n) == (1000, 101, 102)


def test_groups_are_attacked_alone():
    members, nonmembers = [1.0] * 20 + [0.0] * 20, [0.0] * 20 + [0.0] * 20
    groups = ["leaky"] * 20 + ["safe"] * 20
    found = success(members, nonmembers, groups * 2)
    assert {name: row.value for name, row in found.items()} == {"leaky": 1.0, "safe": 0.5}
    assert {row.by for row in found.values()} == {"kind"}


def test_a_baseline_is_attacked_on_the_same_examples():
    rng = np.random.default_rng(2)
    values, groups = rng.random(80), ["a", "b"] * 40
    attacked = scores(values[:40], values[40:], groups)
    first, second = (
        threshold_attack(attacked, by="kind", model=model, seed=3)[0].drop(columns="model")
        for model in ("dp", "non_dp")
    )
    assert first.equals(second)
    others = (threshold_attack(attacked, by="kind", seed=seed)[0] for seed in range(5))
    assert any(not other.drop(columns="model").equals(first) for other in others)


def test_another_group_changes_no_choice():
    rng = np.random.default_rng(4)
    values = rng.random(40)
    alone = success(values[:20], values[20:], ["a"] * 40)
    beside = success([*values[:20], 9.0], values[20:], [*["a"] * 20, "z", *["a"] * 20])
    assert alone["a"] == beside["a"]


@pytest.mark.parametrize(("members", "nonmembers"), [*itertools.product([0, 1], [0, 1, 5])])
def test_too_few_scores_have_no_rate(members, nonmembers):
    overall = success([0.0] * members, [0.0] * nonmembers)[ALL]
    assert (overall.n, overall.value, overall.low, overall.high) == (0, None, None, None)


def test_infinite_scores_are_scores():
    assert success([np.inf] * 8, [-np.inf] * 8)[ALL].value == 1.0


def test_a_bad_seed_is_refused():
    with pytest.raises(InputError, match="seed=-1"):
        threshold_attack(scores([0.0], [0.0]), seed=-1)


def p_values(sizes, rates, runs):
    """(runs, 2): Fisher's and chi-squared p of attacks with these best success rates by group."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        shifts = [2 * stats.norm.ppf(rate) for rate in rates]
        members = [rng.normal(d, 1, n) for d, n in zip(shifts, sizes, strict=True)]
        others = [rng.normal(0, 1, n) for n in sizes]
        names = np.repeat(list("abcd"), sizes)
        attacked = scores(np.concatenate(members), np.concatenate(others), [*names, *names])
        _, test = threshold_attack(attacked, by="group", by_epsilon=["a", "b"], seed=seed)
        found.append((test.p_value, test.chi_squared_p))
    return np.array(found)


@pytest.mark.parametrize("sizes", [[1200] * 4, [300, 900, 900, 900], [900, 200, 200, 200]])
def test_the_test_of_the_most_exposed_group_keeps_its_level(sizes):
    rejected = (p_values(sizes, [0.57] * 4, 200)[:, 0] <= 0.05).sum()
    assert rejected <= stats.binom.ppf(0.999, 200, 0.05)


def test_the_test_of_the_most_exposed_group_has_power_where_chi_squared_has_little():
    power = (p_values([1200] * 4, [0.60, 0.57, 0.57, 0.57], 200) <= 0.05).mean(axis=0)
    assert power[0] > 0.7
    assert power[1] < 0.5


def test_the_most_exposed_group_is_the_first_with_enough_scores():
    rng = np.random.default_rng(0)
    names = ["few"] * 3 + ["a"] * 101 + ["b"] * 40
    attacked = scores(rng.normal(1, 1, 144), rng.normal(0, 1, 144), names * 2)
    _, test = threshold_attack(attacked, by="group", by_epsilon=["few", "b", "a"])
    assert (test.exposed, test.trials, test.rest_trials) == ("b", 80, 208)
    table = [
        [test.successes, 80 - test.successes],
        [test.rest_successes, 208 - test.rest_successes],
    ]
    # The upper tail of the hypergeometric law, whose margins are fixed.
    right = test.successes + test.rest_successes
    expected = stats.hypergeom.sf(test.successes - 1, 288, 80, right)
    assert np.sum(table) == 288
    assert test.p_value == pytest.approx(expected)
    assert threshold_attack(attacked, by="group")[1] is None
