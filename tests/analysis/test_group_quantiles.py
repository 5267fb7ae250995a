import numpy as np

from indpriv.analysis.advice import Group, ranks, read_quantiles
from synthetic import epsilon_table


def test_the_interval_covers_the_quantile_of_the_population():
    rng, truth, covered = np.random.default_rng(0), np.exp(0.5 * 1.6448536269514722), 0
    group = [Group(None, "all", np.arange(300))]
    for _ in range(500):
        table = epsilon_table(rng.lognormal(0.0, 0.5, 300), worst_case=50.0)
        low, middle, high = read_quantiles(table, group, 0.95)[0]
        assert low <= middle <= high
        covered += low <= truth <= high
    assert 0.94 <= covered / 500 <= 0.995  # a discrete law: at least 95 %, less chance


def test_a_small_group_is_bounded_by_the_worst_case():
    table = epsilon_table([0.1, 0.2, 0.3, 0.4], worst_case=7.0)
    groups = [Group("sex", "f", np.array([1, 3])), Group("sex", "m", np.array([0]))]
    assert ranks(1, 0.95) == (0, 1, 2)
    assert read_quantiles(table, groups, 0.95).tolist() == [[0.2, 0.4, 7.0], [0.0, 0.1, 7.0]]


def test_at_least_the_share_asked_for_is_at_or_below_the_quantile():
    for n in (1, 7, 19, 20, 21, 400, 1001):
        for quantile in (0.05, 0.5, 0.95, 0.99):
            rank = ranks(n, quantile)[1]
            assert rank / n >= quantile - 1e-12 > (rank - 1) / n - 1e-9
