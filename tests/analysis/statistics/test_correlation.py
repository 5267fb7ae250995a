import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from indpriv.analysis.statistics import correlation
from indpriv.analysis.statistics.correlation import (
    RelationIntervals,
    is_constant,
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


def test_intervals_of_correlations_and_lines_are_covered(monkeypatch):
    """95 % of 200 is 190; a percentile interval of 80 pairs is a little short: fewer than 176 would be another matter."""
    monkeypatch.setattr(correlation, "_DRAWS", 400)
    inside = np.zeros(4)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x, noise = rng.normal(2.0, 1.0, 80), rng.normal(0.0, 1.0, 80)
        found = relation_intervals(x, 1.0 + 0.75 * x + noise, rng)
        truth = (
            0.6,
            6 / np.pi * np.arcsin(0.3),
            1.0,
            0.75,
        )  # Spearman's of a normal pair: Pearson 1907
        for index, (name, value) in enumerate(
            zip(("pearson", "spearman", "intercept", "slope"), truth, strict=True)
        ):
            interval = getattr(found, name)
            inside[index] += interval.low <= value <= interval.high
    assert np.all((inside >= 176) & (inside <= 199)), inside


def test_a_grid_of_quantiles_says_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.exponential(1.0, 4000)
    y = np.minimum(x + rng.normal(0, 1, 4000), 2.0)
    single = relation_intervals(x, y, np.random.default_rng(1))
    monkeypatch.setattr(correlation, "_EXACT", 0)
    grid = relation_intervals(x, y, np.random.default_rng(1))
    for name, estimate in (("pearson", pearson(x, y)), ("spearman", spearman(x, y))):
        mine, other = getattr(single, name), getattr(grid, name)
        assert mine.low < estimate < mine.high
        assert (other.low, other.high) == (
            pytest.approx(mine.low, abs=0.004),
            pytest.approx(mine.high, abs=0.004),
        )


def test_nothing_to_resample():
    x = np.arange(20.0)
    assert relation_intervals(x[:9], x[:9], np.random.default_rng(0)) == RelationIntervals()
    assert relation_intervals(x, np.ones(20), np.random.default_rng(0)) == RelationIntervals()
