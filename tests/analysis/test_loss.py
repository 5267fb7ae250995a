import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from indpriv._columns import as_rows
from indpriv.analysis.distribution import relate_to_loss
from synthetic import epsilon_table


def related(table, loss):
    return relate_to_loss(table, as_rows(pd.DataFrame({"loss": loss})))


def test_a_logarithm_is_found():
    loss = np.geomspace(0.01, 10, 200)
    epsilon = 2.0 + 0.3 * np.log(loss)
    found = related(epsilon_table(epsilon), loss)
    assert found.pearson_log_loss == pytest.approx(1.0)
    assert found.spearman == pytest.approx(1.0)
    assert (found.intercept, found.slope) == (pytest.approx(2.0), pytest.approx(0.3))
    assert (found.n, found.floored, found.left_out) == (200, 0, 0)


def test_it_is_scipys_regression():
    rng = np.random.default_rng(0)
    loss, epsilon = rng.gamma(1.0, 1.0, 300), rng.random(300)
    found = related(epsilon_table(epsilon), loss)
    line = stats.linregress(np.log(loss), epsilon)
    assert found.pearson_log_loss == pytest.approx(line.rvalue)
    assert (found.slope, found.intercept) == (
        pytest.approx(line.slope),
        pytest.approx(line.intercept),
    )


def test_small_losses_can_be_raised_to_a_stated_floor():
    rng = np.random.default_rng(0)
    loss = np.concatenate([np.geomspace(1e-9, 5e-4, 100), rng.gamma(1.0, 1.0, 100) + 0.01, [0.0]])
    epsilon = np.maximum(loss, 1e-3) ** 0.2 + 0.01 * rng.random(201)
    found = related(epsilon_table(epsilon), loss)
    expected = stats.pearsonr(epsilon, np.log(np.maximum(loss, 1e-3))).statistic
    assert found.pearson_with_floor == pytest.approx(expected)
    interval = found.pearson_with_floor_interval
    assert found.pearson_interval.high < interval.low
    assert interval.low < expected < interval.high
    large = related(epsilon_table(epsilon), loss + 0.01)
    assert large.pearson_with_floor == large.pearson_log_loss
    tiny = related(epsilon_table(epsilon[:100]), loss[:100])
    assert tiny.pearson_log_loss is not None
    assert tiny.pearson_with_floor is None


def test_examples_at_the_worst_case_are_told_apart():
    loss = np.array([0.1, 0.2, 0.4, 0.8, 5.0, 0.01])
    epsilon = np.array([1.0, 1.5, 2.0, 2.5, 3.0, 3.0])
    found = related(epsilon_table(epsilon, worst_case=3.0), loss)
    assert found.n_below_worst_case == 4
    assert found.pearson_below_worst_case == pytest.approx(1.0)
    assert found.pearson_log_loss < 0.9
    assert (found.median_loss_at_worst_case, found.median_loss_below_worst_case) == (
        2.505,
        pytest.approx(0.3),
    )
    assert (found.pearson_interval, found.pearson_below_interval) == (
        None,
        None,
    )  # fewer than ten examples
    capped = related(epsilon_table([3.0] * 4, worst_case=3.0), np.arange(1.0, 5.0))
    assert (capped.n_below_worst_case, capped.median_loss_below_worst_case) == (0, None)


def test_every_figure_has_an_interval():
    rng = np.random.default_rng(0)
    loss = rng.gamma(1.0, 1.0, 300)
    found = related(
        epsilon_table(np.minimum(2.0 + 0.3 * np.log(loss) + rng.random(300), 3.0).clip(0)), loss
    )
    for value, interval in (
        (found.pearson_log_loss, found.pearson_interval),
        (found.spearman, found.spearman_interval),
        (found.intercept, found.intercept_interval),
        (found.slope, found.slope_interval),
    ):
        assert interval.low < value < interval.high
    assert (
        found.pearson_below_interval.low
        < found.pearson_below_worst_case
        < found.pearson_below_interval.high
    )


def test_odd_losses_are_counted():
    loss = np.array([0.0, 0.5, 1.0, 2.0, np.inf, np.nan, -1.0])
    found = related(epsilon_table(np.arange(1.0, 8.0)), loss)
    assert (found.n, found.floored, found.floor, found.left_out) == (4, 1, 0.5, 3)


def test_a_denormal_loss_does_not_rule():
    found = related(epsilon_table([1.0, 2.0, 3.0]), np.array([1e-310, 1.0, 2.0]))
    assert (found.floor, found.floored) == (1e-12, 1)


@pytest.mark.parametrize(
    ("epsilon", "loss", "reason"),
    [
        ([1.0, 2.0, 3.0], [0.5, 0.5, 0.5], "the same loss"),
        ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], "the same loss"),
        ([1.0, 2.0, 3.0], [1.0, 1 + 2.3e-16, 1 + 4.5e-16], "the same loss"),
        ([1.0, 1.0, 1.0], [0.5, 1.5, 2.5], "the same epsilon"),
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], "loss and epsilon"),
        ([1.0, 2.0], [0.5, 1.5], "only 2 examples"),
        ([1.0], [np.inf], "only 0 examples"),
    ],
)
def test_undefined_says_why(epsilon, loss, reason):
    found = related(epsilon_table(epsilon), np.array(loss))
    assert found.pearson_log_loss is None
    assert found.slope is None
    assert found.bins is None
    assert reason in found.undefined_reason


def test_epsilons_of_next_to_nothing():
    found = related(epsilon_table([5e-324, 1e-323, 5e-323]), np.array([1.0, 2.0, 3.0]))
    assert np.array(found.bins.counts).sum() == 3


@given(arrays(np.float64, (2, 40), elements=st.floats(0, 1e6)))
def test_every_example_is_in_one_bin(pair):
    epsilon, loss = pair
    found = related(epsilon_table(epsilon), loss)
    if found.bins is None:
        assert found.undefined_reason
        return
    counts = np.array(found.bins.counts)
    assert counts.sum() == 40
    for row, low, middle, high in zip(
        counts, found.bins.p25, found.bins.median, found.bins.p75, strict=True
    ):
        assert (row.sum() == 0) == (middle is None)
        assert middle is None or low <= middle <= high
