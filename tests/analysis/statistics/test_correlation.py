import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from indpriv.analysis.statistics import (
    Interval,
    is_constant,
    line,
    pearson,
    relation_intervals,
    spearman,
)

VALUES = st.floats(-1e6, 1e6, width=32)


@given(arrays(np.float64, (2, 12), elements=st.integers(-1000, 1000).map(float)))
def test_it_is_scipys_where_scipy_has_one(pair):
    x, y = pair
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert pearson(x, y) is None
        assert spearman(x, y) is None
        return
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


@given(arrays(np.float64, st.integers(0, 2), elements=VALUES))
def test_two_points_prove_nothing(x):
    assert pearson(x, x) is None


def test_rounding_noise_is_no_signal():
    noisy = np.full(100, 0.1) * np.where(np.arange(100) % 2, 1.0, 1 + 2e-16)
    assert is_constant(noisy)
    assert pearson(noisy, np.arange(100.0)) is None
    assert is_constant(np.zeros(5))
    assert not is_constant(np.array([0.0, 1e-300, 0.0]))


def test_huge_values_do_not_overflow():
    x = np.array([1e300, 2e300, 4e300])
    assert pearson(x, x) == pytest.approx(1.0)


@pytest.mark.parametrize("n", [12, 80])
def test_intervals_of_correlations_and_lines_are_covered(n):
    """95 % of 400 is 380; fewer than 360 would be under 90 %."""
    inside = dict.fromkeys(("pearson", "spearman", "intercept", "slope"), 0)
    truth = {
        "pearson": 0.6,
        "spearman": 6 / np.pi * np.arcsin(0.3),  # of a normal pair: Pearson 1907
        "intercept": 1.0,
        "slope": 0.75,
    }
    for seed in range(400):
        rng = np.random.default_rng(seed)
        x, noise = rng.normal(2.0, 1.0, n), rng.normal(0.0, 1.0, n)
        found = relation_intervals(x, 1.0 + 0.75 * x + noise)
        for name, value in truth.items():
            interval = found[name]
            inside[name] += interval.low <= value <= interval.high
    assert all(360 <= count <= 397 for count in inside.values()), inside


def test_intervals_agree_with_a_bootstrap_of_skewed_and_tied_pairs():
    rng = np.random.default_rng(0)
    x = rng.exponential(1.0, 1000).round(1)
    y = np.minimum(x + rng.normal(0, 1, 1000), 2.0)
    found = relation_intervals(x, y)
    draws = []
    for _ in range(1000):
        drawn = rng.integers(0, 1000, 1000)
        intercept, slope = line(x[drawn], y[drawn])
        draws.append((pearson(x[drawn], y[drawn]), spearman(x[drawn], y[drawn]), intercept, slope))
    columns = np.transpose(draws)
    for name, column in zip(("pearson", "spearman", "intercept", "slope"), columns, strict=True):
        low, high = np.quantile(column, (0.025, 0.975))
        interval = found[name]
        assert interval.low == pytest.approx(low, abs=0.2 * (high - low))
        assert interval.high == pytest.approx(high, abs=0.2 * (high - low))


def test_a_perfect_correlation_has_no_width():
    x = np.arange(20.0)
    assert relation_intervals(x, 2 * x)["spearman"] == Interval(1.0, 1.0)
    assert relation_intervals(x, -(x**3))["spearman"] == Interval(-1.0, -1.0)


def test_too_few_or_constant_values_have_no_interval():
    x = np.arange(20.0)
    assert relation_intervals(x[:9], x[:9]) == {}
    assert relation_intervals(x, np.ones(20)) == {}
