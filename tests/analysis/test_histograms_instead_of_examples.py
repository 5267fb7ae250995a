"""The figures of large audits, which come from histograms, beside those of all examples."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from indpriv._columns import FrameRows
from indpriv.analysis.groups import CellCounts, Values, group_table
from indpriv.analysis.loss.pairs import LossCounts
from indpriv.analysis.loss.relation import relate_to_loss
from indpriv.analysis.statistics import histogram
from indpriv.analysis.statistics.histogram import PAIR_BITS, bin_width
from synthetic import epsilon_table, rows

N = 3000
WIDTH = bin_width()


def drawn(seed=0):
    """Epsilons up to a worst case that a tenth reaches, losses, labels and groups."""
    rng = np.random.default_rng(seed)
    loss = rng.gamma(2.0, 0.3, N)
    loss[:5], loss[5:9] = 0.0, np.nan
    epsilon = np.minimum(0.2 * np.nan_to_num(loss, nan=0.3) ** 0.3 * rng.uniform(0.8, 1.2, N), 0.22)
    return epsilon, loss, rng.integers(0, 2, N), rng.choice(list("abc"), N, p=[0.6, 0.3, 0.1])


@pytest.fixture
def both(monkeypatch):
    """Calls a function on all examples, and again with the limit below their number."""

    def run(function):
        exact = function()
        monkeypatch.setattr(histogram, "MOST_EXACT", 100)
        return exact, function()

    return run


def test_group_tables_are_those_of_all_examples(both):
    epsilon, loss, label, group = drawn()
    table = epsilon_table(epsilon, worst_case=0.22)
    train = rows("train", label, group=group, loss=loss)
    test = rows("test", label[:300], group=group[:300])
    exact, binned = both(lambda: group_table(table, train, test, "group"))
    pairs = list(zip(exact.rows, binned.rows, strict=True))
    for one, two in zip(exact.within_label, binned.within_label, strict=True):
        pairs += list(zip(one.rows, two.rows, strict=True))
    for mine, other in pairs:
        counted = ("name", "n", "n_test", "train_accuracy", "test_accuracy", "losses_left_out")
        for name in (*counted, "mean_loss", "test_rates"):
            assert getattr(mine, name) == getattr(other, name), name
        assert other.epsilon.share_at_worst_case == mine.epsilon.share_at_worst_case
        assert other.epsilon.max == mine.epsilon.max
        assert other.epsilon.mean == pytest.approx(mine.epsilon.mean, rel=1e-12)
        for name in ("median", "p95", "p99"):
            assert getattr(other.epsilon, name) == pytest.approx(
                getattr(mine.epsilon, name), rel=WIDTH
            )
        ends = [
            (row.epsilon.mean_interval.low, row.epsilon.mean_interval.high) for row in (mine, other)
        ]
        half = (ends[0][1] - ends[0][0]) / 2
        assert np.abs(np.subtract(*ends)).max() < 0.2 * half  # a bootstrap of 1,000 draws each
    assert binned.ratios.raw.value == pytest.approx(exact.ratios.raw.value, rel=1e-12)
    assert binned.ratios.standardised.value == pytest.approx(
        exact.ratios.standardised.value, rel=1e-12
    )
    assert binned.tests.spread.p_value == pytest.approx(exact.tests.spread.p_value, abs=0.06)
    standardised = [[row.standardised for row in found.rows] for found in (exact, binned)]
    for mine, other in zip(*standardised, strict=True):
        assert other.smallest_label_count == mine.smallest_label_count
        assert other.mean == pytest.approx(mine.mean, rel=1e-12)


def test_the_relation_to_loss_is_that_of_all_examples(both):
    epsilon, loss, _, _ = drawn()
    table = epsilon_table(epsilon, worst_case=0.22)
    exact, binned = both(lambda: relate_to_loss(table, FrameRows(pd.DataFrame({"loss": loss}))))
    for name in ("floored", "floor", "left_out", "undefined_reason"):
        assert getattr(binned, name) == getattr(exact, name)
    for part in ("every", "below"):
        mine, other = getattr(exact, part), getattr(binned, part)
        assert other.n == mine.n
        assert other.pearson == pytest.approx(mine.pearson, abs=1e-4)
        assert other.spearman == pytest.approx(mine.spearman, abs=2e-3)
        for name in ("pearson_interval", "spearman_interval"):
            ends = [
                (found.low, found.high) for found in (getattr(mine, name), getattr(other, name))
            ]
            assert ends[1] == pytest.approx(ends[0], abs=3e-3)
    errors = binned.pearson_error, binned.spearman_error
    assert (exact.pearson_error, exact.spearman_error) == (0.0, 0.0)
    assert 0 < errors[0] < 1e-3
    assert 0 < errors[1] < 0.02
    assert abs(binned.every.pearson - exact.every.pearson) <= errors[0]
    assert abs(binned.every.spearman - exact.every.spearman) <= errors[1]
    assert binned.pearson_with_floor == pytest.approx(exact.pearson_with_floor, abs=1e-4)
    for name in ("intercept", "slope"):
        assert getattr(binned.line, name) == pytest.approx(getattr(exact.line, name), rel=1e-3)
    for name in ("median_loss_at_worst_case", "median_loss_below_worst_case"):
        assert getattr(binned, name) == pytest.approx(getattr(exact, name), rel=WIDTH)
    assert np.sum(binned.bins.counts) == np.sum(exact.bins.counts)
    widest = bin_width(PAIR_BITS)
    assert binned.bins.loss_edges == pytest.approx(exact.bins.loss_edges, rel=widest)


def test_parts_of_the_data_add_up_to_the_same_bits():
    epsilon, loss, label, group = drawn()
    codes = np.unique(group, return_inverse=True)[1]
    worst = epsilon >= 0.22
    parts = np.array_split(np.random.default_rng(1).permutation(N), 7)
    whole = LossCounts.of(epsilon, worst, loss)
    added = LossCounts.of(epsilon[:0], worst[:0], loss[:0])
    for part in parts:
        added = added + LossCounts.of(epsilon[part], worst[part], loss[part])
    for name in ("epsilon", "loss", "below", "weights"):
        assert np.array_equal(getattr(whole.pairs(), name), getattr(added.pairs(), name)), name
    assert whole.pairs().medians == added.pairs().medians

    def counted(part):
        known = np.ones(len(part))
        values = Values(epsilon[part], worst[part], loss[part], known, codes[part], label[part])
        return CellCounts.of(values, (3, 2))

    every = counted(np.arange(N))
    added = sum((counted(part) for part in reversed(parts[1:])), counted(parts[0]))
    for field in dataclasses.fields(added.sums):
        mine, other = getattr(added.sums, field.name), getattr(every.sums, field.name)
        if mine.dtype.kind == "f":
            assert mine == pytest.approx(other, rel=1e-12), field.name
        else:
            assert np.array_equal(mine, other), field.name
    for name in ("epsilon", "weights", "groups", "labels"):
        assert np.array_equal(getattr(added.cells(), name), getattr(every.cells(), name)), name
