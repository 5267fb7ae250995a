import numpy as np
import pytest

from indpriv.analysis.comparison import stability_of
from synthetic import epsilon_table, rows

GROUP = np.repeat(["a", "b", "c", "few"], [20, 20, 20, 5])
EPSILON = np.repeat([3.0, 2.0, 1.0, 9.0], [20, 20, 20, 5]) + np.linspace(0, 0.5, 65)


def stability(*epsilons, **options):
    train = rows("train", [0] * 65, group=GROUP)
    return stability_of(
        [epsilon_table(values) for values in epsilons],
        train,
        ["group"],
        **({"same_settings": True} | options),
    )


def test_the_same_run_twice_is_stable():
    found = stability(EPSILON, EPSILON)
    assert (found["mean_spearman"], found["least_spearman"]) == (pytest.approx(1), pytest.approx(1))
    assert (found["median_range"], found["p95_range"]) == (0.0, 0.0)
    order = found["groups"][0]
    assert (order["n_groups"], order["pairs"], order["pairs_kept"]) == (
        3,
        3,
        3,
    )  # four of the fourth cannot be read
    assert (order["worst"], order["best"]) == (["a", "a"], ["c", "c"])


def test_the_worst_of_three_runs_is_told():
    swapped = np.where(GROUP == "a", EPSILON - 2, np.where(GROUP == "c", EPSILON + 2, EPSILON))
    found = stability(EPSILON, EPSILON, swapped)
    order = found["groups"][0]
    assert (order["pairs_kept"], order["worst"]) == (0, ["a", "a", "c"])
    assert order["least_spearman"] == pytest.approx(-1.0)
    assert found["least_spearman"] < found["mean_spearman"] < 1
    assert found["p95_range"] == pytest.approx(2.0)


def test_equal_means_are_no_kept_order():
    found = stability(np.ones(65), np.ones(65))
    assert found["groups"][0]["pairs_kept"] == 0
    assert found["groups"][0]["worst"] == found["groups"][0]["best"] == [None, None]
    assert found["least_spearman"] is None


def test_examples_are_matched_by_id():
    order = np.random.default_rng(0).permutation(65)
    train = rows("train", [0] * 65, group=GROUP)
    tables = [epsilon_table(EPSILON), epsilon_table(EPSILON[order], ids=order)]
    assert stability_of(tables, train, [], same_settings=True)["p95_range"] == 0
