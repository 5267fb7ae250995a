"""The figures of large audits, which come from histograms, beside those of all examples."""

from dataclasses import replace

import numpy as np
import pytest

from indpriv import EpsilonTable
from indpriv._columns import as_rows
from indpriv._plain import to_json
from indpriv.analysis import statistics
from indpriv.analysis.distribution import relate_to_loss
from indpriv.analysis.groups import group_table
from indpriv.analysis.statistics import BIN_WIDTH as WIDTH
from synthetic import epsilon_table, rows

N = 3000


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


def test_the_relation_to_loss_is_that_of_a_random_million(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_EXACT", 2000)
    epsilon, loss, _, _ = drawn()
    frame = epsilon_table(epsilon, worst_case=0.22).to_frame().assign(loss=loss)
    positions = statistics.sample(N, 2000, statistics.generator_of(0, "loss"))
    assert len(positions) == len(np.unique(positions)) == 2000
    found = []
    for each, starts in (
        (frame, [0, N]),
        (frame, [0, 17, N // 2, N]),
        (frame.iloc[positions], [0, 2000]),
    ):
        rows_of = replace(as_rows(each.reset_index(drop=True)), starts=starts)
        found.append(relate_to_loss(EpsilonTable.of_rows(rows_of), rows_of))
    assert found[0] == found[1] == found[2]
    assert found[0].n + found[0].left_out == 2000
    monkeypatch.undo()
    whole = relate_to_loss(epsilon_table(epsilon, worst_case=0.22), as_rows(frame))
    assert found[0].pearson_log_loss == pytest.approx(whole.pearson_log_loss, abs=0.02)
    assert found[0].spearman == pytest.approx(whole.spearman, abs=0.05)


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
