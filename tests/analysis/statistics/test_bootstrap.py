import numpy as np
import pytest
from scipy import stats

from indpriv.analysis import statistics
from indpriv.analysis.statistics import resample_means

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
    monkeypatch.setattr(statistics, "_MOST_DRAWS", 400)
    for n in (12, 40, 600):  # the last is resampled in runs
        assert 0.90 <= coverage(lambda rng, n: rng.exponential(1.0, n), 1.0, n) <= 0.99


def test_standardised_means_and_ratios_are_covered(monkeypatch):
    monkeypatch.setattr(statistics, "_MOST_DRAWS", 400)
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
