"""Histograms whose parts add up, and what is computed from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from indpriv.analysis.statistics.bootstrap import resample_means
from indpriv.analysis.statistics.correlation import line, pearson, relation_intervals, spearman
from indpriv.analysis.statistics.histogram import (
    Histogram,
    bin_width,
    merged,
    quantiles_by_cell,
)
from indpriv.analysis.statistics.permutation import permutation_test

RNG = np.random.default_rng
NUMBERS = st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.sampled_from([0.1, 1.0, 2.5]))


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 3)), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=4),
    st.randoms(),
)
def test_parts_in_any_order_are_the_whole_to_the_bit(rows, cuts, random):
    first, second, cells = (np.array(column) for column in zip(*rows, strict=True))
    for columns in ([first], [first, second]):
        whole = Histogram.of(columns, cells)
        parts = [
            Histogram.of([column[part] for column in columns], cells[part])
            for part in np.split(np.arange(len(rows)), sorted(cuts))
        ]
        random.shuffle(parts)
        found = merged(parts)
        for name in ("keys", "counts", "least", "largest", "rests"):
            assert np.array_equal(getattr(found, name), getattr(whole, name)), name


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 2)), min_size=1, max_size=80))
def test_bins_hold_their_examples(rows):
    values, cells = (np.array(column) for column in zip(*rows, strict=True))
    found = Histogram.of([values], cells)
    assert found.n == len(rows)
    assert np.all(found.largest <= found.least * (1 + bin_width()) + 1e-305)
    assert np.all((found.least[0] <= found.means()) & (found.means() <= found.largest[0]))
    for cell in range(3):
        mine = found.cells() == cell
        inside = values[cells == cell]
        assert found.counts[mine].sum() == len(inside)
        scale = max(inside.max(initial=0.0), 1e-300)  # sums of 1e300 would overflow
        total = (found.counts[mine] * (found.means()[mine] / scale)).sum()
        assert total == pytest.approx((inside / scale).sum(), rel=1e-12)


def test_bins_of_one_value_have_that_mean():
    values = RNG(0).gamma(1.0, 1.0, 200)
    found = Histogram.of([np.repeat(values, 7)])
    single = np.flatnonzero(found.least[0] == found.largest[0])
    assert len(single) > 100
    assert np.array_equal(found.means()[single], found.least[0][single])


@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(0, 2)), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_quantiles_are_numpys_and_those_of_bins_lie_within_a_bin(rows, probability):
    values, cells = (np.array(column) for column in zip(*rows, strict=True))
    ones = np.ones(len(values), np.int64)
    exact = quantiles_by_cell(values, ones, cells, 4, (probability,))[:, 0]
    counted = Histogram.of([values], cells)
    binned = quantiles_by_cell(counted.means(), counted.counts, counted.cells(), 4, (probability,))[
        :, 0
    ]
    for cell in range(4):
        mine = values[cells == cell]
        if not len(mine):
            assert np.isnan(exact[cell])
            assert np.isnan(binned[cell])
            continue
        assert exact[cell] == pytest.approx(np.quantile(mine, probability), rel=1e-12, abs=1e-300)
        assert abs(binned[cell] - exact[cell]) <= bin_width() * max(exact[cell], binned[cell])


def repeated(seed, n=400):
    """Distinct values, how many examples have each, and all of these examples."""
    rng = RNG(seed)
    weights = rng.integers(1, 5, n)
    return rng, weights, np.repeat(np.arange(n), weights)


def test_weighted_correlations_are_those_of_all_examples():
    rng, weights, every = repeated(0)
    x = np.round(rng.gamma(1.0, 1.0, 400), 1)
    y = x + rng.normal(0, 1, 400)
    assert pearson(x, y, weights) == pytest.approx(pearson(x[every], y[every]), rel=1e-12)
    expected = stats.spearmanr(x[every], y[every]).statistic
    assert spearman(x, y, weights) == pytest.approx(expected, rel=1e-12)
    assert line(x, y, weights) == pytest.approx(line(x[every], y[every]), rel=1e-12)
    found, plain = relation_intervals(x, y, weights), relation_intervals(x[every], y[every])
    for name in ("pearson", "spearman", "intercept", "slope"):
        mine, other = getattr(found, name), getattr(plain, name)
        assert (mine.low, mine.high) == pytest.approx((other.low, other.high), rel=1e-9)


def test_weighted_means_are_those_of_all_examples():
    rng, weights, every = repeated(1, 4000)
    values, groups, strata = rng.random(4000), rng.integers(0, 3, 4000), rng.integers(0, 2, 4000)
    options = {"n_groups": 3, "shares": np.array([0.4, 0.6]), "with_cells": True}
    found = resample_means(values, groups, strata, rng=RNG(0), weights=weights, **options)
    plain = resample_means(values[every], groups[every], strata[every], rng=RNG(0), **options)
    for name in ("groups", "standardised", "cells"):
        mine, other = getattr(found, name), getattr(plain, name)
        assert mine.estimate == pytest.approx(other.estimate, rel=1e-12)
        assert mine.error == pytest.approx(other.error, rel=1e-3)  # runs are cut elsewhere
        for one, two in zip(mine.intervals(), other.intervals(), strict=True):
            assert one.high - one.low == pytest.approx(two.high - two.low, rel=0.15)


@pytest.mark.parametrize("n", [60, 4000])  # shuffled, and drawn
def test_weighted_permutations_are_those_of_all_examples(n):
    rng, weights, every = repeated(2, n)
    values, groups, strata = rng.random(n), rng.integers(0, 3, n), rng.integers(0, 2, n)
    values[groups == 1] += 1.5 * n**-0.5
    options = {"tested": np.ones(3, bool)}
    found = permutation_test(values, groups, strata, rng=RNG(0), weights=weights, **options)
    plain = permutation_test(values[every], groups[every], strata[every], rng=RNG(0), **options)
    assert found.adjusted == pytest.approx(plain.adjusted, abs=0.06)
    assert found.permutations == plain.permutations
