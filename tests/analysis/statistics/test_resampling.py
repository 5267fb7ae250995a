import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from indpriv.analysis.statistics import resampling
from indpriv.analysis.statistics.resampling import holm, permutation_test, resample_means
from oracles import maxt_p_values

RNG = np.random.default_rng


def means_of(values, groups, strata=None, *, shares=(1.0,), seed=0):
    strata = np.zeros(len(values), dtype=int) if strata is None else strata
    return resample_means(
        np.asarray(values, float), np.asarray(groups), np.asarray(strata), n_groups=int(np.max(groups)) + 1,
        shares=np.asarray(shares), with_cells=True, rng=RNG(seed),
    )  # fmt: skip


def test_estimates_and_errors_are_the_textbooks():
    rng = RNG(0)
    values, groups, strata = rng.random(90), rng.integers(0, 3, 90), rng.integers(0, 2, 90)
    found = means_of(values, groups, strata, shares=(0.3, 0.7))
    for group in range(3):
        mine = values[groups == group]
        assert found.groups.estimate[group] == pytest.approx(mine.mean())
        assert found.groups.error[group] == pytest.approx(stats.sem(mine))
        parts = [values[(groups == group) & (strata == stratum)] for stratum in range(2)]
        assert found.cells.estimate[2 * group : 2 * group + 2] == pytest.approx(
            [part.mean() for part in parts]
        )
        assert found.standardised.estimate[group] == pytest.approx(
            0.3 * parts[0].mean() + 0.7 * parts[1].mean()
        )
        assert found.standardised.error[group] == pytest.approx(
            np.hypot(0.3 * stats.sem(parts[0]), 0.7 * stats.sem(parts[1]))
        )


def coverage(draw, truth, n, trials=200, **options):
    rng, inside = RNG(n), 0
    for seed in range(trials):
        (interval,) = means_of(
            draw(rng, n), np.zeros(n, int), seed=seed, **options
        ).groups.intervals()
        inside += interval.low <= truth <= interval.high
    return inside / trials


def test_skewed_means_are_covered(monkeypatch):
    """95 % within what 200 trials can tell: below 0.90 or above 0.99 has probability under 0.003 each at 0.95."""
    monkeypatch.setattr(resampling, "_MOST_DRAWS", 400)
    for n in (12, 40, 600):  # the last is resampled in runs
        assert 0.90 <= coverage(lambda rng, n: rng.exponential(1.0, n), 1.0, n) <= 0.99


def test_standardised_means_and_ratios_are_covered(monkeypatch):
    monkeypatch.setattr(resampling, "_MOST_DRAWS", 400)
    inside = np.zeros(2)
    for seed in range(200):
        rng = RNG(1000 + seed)
        groups, strata = np.repeat([0, 1], 60), np.tile([0, 0, 1], 40)
        values = rng.exponential(1.0, 120) * (1 + strata) * (1 + groups)
        found = means_of(values, groups, strata, shares=(0.5, 0.5), seed=seed)
        interval = found.standardised.intervals()[0]
        inside[0] += interval.low <= 1.5 <= interval.high
        ratio = found.groups.ratio(1, 0)
        inside[1] += ratio.low <= 2.0 <= ratio.high
    assert np.all((inside >= 180) & (inside <= 198)), inside


def test_undefined_means_have_no_interval():
    found = means_of([1.0, 2.0, 3.0, 5.0, 5.0, 7.0], [0, 0, 0, 1, 1, 3])
    assert [interval is None for interval in found.groups.intervals()] == [False, True, True, True]
    assert np.isnan(found.groups.estimate[2])
    assert found.groups.ratio(0, 2) is None
    assert found.groups.ratio(0, 1) is not None


def test_intervals_stay_in_range():
    (interval,) = means_of([0.0] * 19 + [1.0], [0] * 20).groups.intervals(0.0, 1.0)
    assert interval.low >= 0.0
    assert (
        interval.high == 1.0
    )  # a draw without the one nonzero value has no spread: nothing bounds the mean


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
    monkeypatch.setattr(resampling, "_MOST_PERMUTATIONS", 199)
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
    monkeypatch.setattr(resampling, "_DRAW_COST", 1000)
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
