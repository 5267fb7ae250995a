"""Examples condensed into bins whose parts add up, and what is computed from values and weights."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv.analysis import statistics
from indpriv.analysis.statistics import (
    BIN_WIDTH,
    Condensed,
    means_by_cell,
    permutation_test,
    quantiles_by_cell,
)

RNG = np.random.default_rng
NUMBERS = st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.sampled_from([0.1, 1.0, 2.5]))


def condensed(parts):
    """The frame of parts (cells, values), counted in bins."""
    found = Condensed("value", n=statistics.MOST_EXACT + 1)
    for part in parts:
        found.add(*part)
    return found.frame()


@given(
    st.lists(st.tuples(st.integers(0, 3), NUMBERS), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=4),
    st.randoms(),
)
def test_parts_in_any_order_are_the_whole_to_the_bit(rows, cuts, random):
    whole = [np.array(column) for column in zip(*rows, strict=True)]
    parts = [
        [column[part] for column in whole] for part in np.split(np.arange(len(rows)), sorted(cuts))
    ]
    random.shuffle(parts)
    pd.testing.assert_frame_equal(condensed(parts), condensed([whole]), check_exact=True)


@given(st.lists(st.tuples(st.integers(0, 2), NUMBERS), min_size=1, max_size=80))
def test_bins_hold_their_examples(rows):
    cells, values = (np.array(column) for column in zip(*rows, strict=True))
    found = condensed([(cells, values)])
    assert found["weight"].sum() == len(rows)
    assert found["value"].between(0, found["largest_value"]).all()
    assert (found["largest_value"] <= found["value"] * (1 + BIN_WIDTH) + 1e-305).all()
    for cell in range(3):
        mine = found[found["cell"] == cell]
        inside = values[cells == cell]
        assert mine["weight"].sum() == len(inside)
        scale = max(inside.max(initial=0.0), 1e-300)  # sums of 1e300 would overflow
        total = (mine["weight"] * (mine["value"] / scale)).sum()
        assert total == pytest.approx((inside / scale).sum(), rel=1e-12)


def test_bins_of_one_value_have_that_mean():
    values = np.repeat(RNG(0).gamma(1.0, 1.0, 200), 7)
    found = condensed([(np.zeros(len(values), np.int64), values)])
    single = found[found["weight"] == 7]
    assert len(single) > 100
    assert (single["value"] == single["largest_value"]).all()


def test_few_examples_stay_single_and_in_order():
    found = Condensed("value", n=5)
    found.add(np.array([1, 0]), np.array([2.0, 1.0]))
    found.add(np.array([1, 1, 0]), np.array([1.0, 2.0, 0.0]))
    frame = found.frame()
    assert frame["cell"].tolist() == [1, 0, 1, 1, 0]
    assert frame["weight"].tolist() == [1] * 5
    for name in ("value", "largest_value"):
        assert frame[name].tolist() == [2.0, 1.0, 1.0, 2.0, 0.0]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 9)), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_quantiles_are_numpys_and_those_of_bins_lie_within_a_bin(rows, probability):
    cells, values = (np.array(column) for column in zip(*rows, strict=True))
    exact = quantiles_by_cell(values, np.ones(len(values), np.int64), cells, 4, (probability,))[
        :, 0
    ]
    counted = condensed([(cells, values)])
    columns = (counted[name].to_numpy() for name in ("value", "weight", "cell"))
    binned = quantiles_by_cell(*columns, 4, (probability,))[:, 0]
    for cell in range(4):
        mine = values[cells == cell]
        if not len(mine):
            assert np.isnan(exact[cell])
            assert np.isnan(binned[cell])
            continue
        if probability < 0.5:
            assert exact[cell] == pytest.approx(np.quantile(mine, probability), rel=1e-14)
        else:
            how = "higher" if probability > 0.5 else "linear"
            assert exact[cell] == np.quantile(mine, probability, method=how)
            assert np.mean(mine <= exact[cell]) >= probability - 1e-12
        assert abs(binned[cell] - exact[cell]) <= BIN_WIDTH * max(exact[cell], binned[cell])


def repeated(seed, n=400):
    """Distinct values, how many examples have each, and all of these examples."""
    rng = RNG(seed)
    weights = rng.integers(1, 5, n)
    return rng, weights, np.repeat(np.arange(n), weights)


def test_weighted_means_are_those_of_all_examples():
    rng, weights, every = repeated(1, 4000)
    values, groups, strata = rng.random(4000), rng.integers(0, 3, 4000), rng.integers(0, 2, 4000)
    cells = 2 * groups + strata
    found = means_by_cell(values, weights, cells, 6)
    plain = means_by_cell(values[every], np.ones(len(every), np.int64), cells[every], 6)
    shares = np.array([0.4, 0.6])
    for mine, other in ((found, plain), (found.summed(shares), plain.summed(shares))):
        for one, two in zip(mine, other, strict=True):
            assert one == pytest.approx(two, rel=1e-9)


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
