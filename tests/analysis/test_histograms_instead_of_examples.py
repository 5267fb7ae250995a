"""The figures of large audits, which come from histograms, beside those of all examples."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from indpriv import EpsilonTable
from indpriv._columns import as_rows
from indpriv._plain import to_json
from indpriv.analysis import statistics
from indpriv.analysis.distribution import relate_to_loss
from indpriv.analysis.groups import group_table
from indpriv.analysis.statistics import PAIR_BITS, bin_width
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
        monkeypatch.setattr(statistics, "MOST_EXACT", 100)
        return exact, function()

    return run


def test_group_tables_are_those_of_all_examples(both):
    epsilon, loss, label, group = drawn()
    table = epsilon_table(epsilon, worst_case=0.22)
    train = rows("train", label, group=group, loss=loss)
    test = rows("test", label[:300], group=group[:300])
    exact, binned = both(lambda: group_table(table, train, test, "group"))
    tables = [(exact, binned), *zip(exact.within_label, binned.within_label, strict=True)]
    for one, two in tables:
        mine, other = one.rows, two.rows
        means = ["mean", "standardised_mean"]
        drawn_or_near = ["ratio_to_best", "median", "p95", "p99", "mean_interval", "p_value"]
        drawn_or_near += ["standardised_interval", "p_value_within_label"]
        same = mine.columns.difference([*means, *drawn_or_near])
        assert mine[same].equals(other[same])
        for name in means:
            assert other[name].to_numpy() == pytest.approx(mine[name], rel=1e-12, nan_ok=True)
        for name in ("median", "p95", "p99"):
            assert other[name].to_numpy() == pytest.approx(mine[name], rel=WIDTH)
        for first, second in zip(mine["mean_interval"], other["mean_interval"], strict=True):
            half = (first.high - first.low) / 2
            apart = max(abs(first.low - second.low), abs(first.high - second.high))
            assert apart < 0.01 * half
    assert exact.rows["smallest_label_count"].equals(binned.rows["smallest_label_count"])
    for name in ("ratio", "standardised_ratio"):
        ratios = [getattr(table, name).value for table in (exact, binned)]
        assert ratios[1] == pytest.approx(ratios[0], rel=1e-12)
    assert binned.spread.p_value == pytest.approx(exact.spread.p_value, abs=0.06)


def test_the_relation_to_loss_is_that_of_all_examples(both):
    epsilon, loss, _, _ = drawn()
    table = epsilon_table(epsilon, worst_case=0.22)
    exact, binned = both(lambda: relate_to_loss(table, as_rows(pd.DataFrame({"loss": loss}))))
    for name in ("floored", "floor", "left_out", "undefined_reason"):
        assert getattr(binned, name) == getattr(exact, name)
    assert (binned.n, binned.n_below_worst_case) == (exact.n, exact.n_below_worst_case)
    for name, error in (
        ("pearson_log_loss", 1e-4),
        ("pearson_below_worst_case", 1e-4),
        ("spearman", 2e-3),
    ):
        assert getattr(binned, name) == pytest.approx(getattr(exact, name), abs=error)
    for name in ("pearson", "spearman", "pearson_below"):
        found = [getattr(each, f"{name}_interval") for each in (exact, binned)]
        ends = [(each.low, each.high) for each in found]
        assert ends[1] == pytest.approx(ends[0], abs=3e-3)
    errors = binned.pearson_error, binned.spearman_error
    assert (exact.pearson_error, exact.spearman_error) == (0.0, 0.0)
    assert 0 < errors[0] < 1e-3
    assert 0 < errors[1] < 0.02
    assert abs(binned.pearson_log_loss - exact.pearson_log_loss) <= errors[0]
    assert abs(binned.spearman - exact.spearman) <= errors[1]
    assert binned.pearson_with_floor == pytest.approx(exact.pearson_with_floor, abs=1e-4)
    for name in ("intercept", "slope"):
        assert getattr(binned, name) == pytest.approx(getattr(exact, name), rel=1e-3)
    for name in ("median_loss_at_worst_case", "median_loss_below_worst_case"):
        assert getattr(binned, name) == pytest.approx(getattr(exact, name), rel=WIDTH)
    assert np.sum(binned.bins.counts) == np.sum(exact.bins.counts)
    widest = bin_width(PAIR_BITS)
    assert binned.bins.loss_edges == pytest.approx(exact.bins.loss_edges, rel=widest)


def test_the_relation_to_loss_in_parts_of_any_order_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_EXACT", 100)
    epsilon, loss, _, _ = drawn()
    frame = epsilon_table(epsilon, worst_case=0.22).to_frame().assign(loss=loss)
    other = frame.iloc[np.random.default_rng(1).permutation(N)]
    found = []
    for each, starts in ((frame, [0, N]), (other, [0, 17, N // 2, N])):
        rows_of = replace(as_rows(each), starts=starts)
        found.append(relate_to_loss(EpsilonTable.of_rows(rows_of), rows_of))
    assert found[0] == found[1]


def test_group_tables_of_bins_are_those_of_any_order(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_EXACT", 100)
    epsilon, loss, label, group = drawn()
    test = rows("test", label[:300], group=group[:300])

    def table(order):
        train = rows("train", label[order], group=group[order], loss=loss[order])
        content = to_json(
            group_table(epsilon_table(epsilon[order], worst_case=0.22), train, test, "group")
        )
        each = content["rows"] + [row for one in content["within_label"] for row in one["rows"]]
        return content, [row.pop("mean_loss") for row in each]

    (first, losses), (second, again) = (
        table(np.arange(N)),
        table(np.random.default_rng(1).permutation(N)),
    )
    assert first == second  # to the same bits, of every interval and p-value too
    assert again == pytest.approx(losses, rel=1e-12)
