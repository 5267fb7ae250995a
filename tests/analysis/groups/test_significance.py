import numpy as np
import pytest

from indpriv.analysis.groups import find_reversals


@pytest.mark.slow
def test_groups_that_do_not_differ_are_rarely_called_reversed():
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(400):
        groups, labels = rng.integers(0, 2, 400), rng.integers(0, 4, 400)
        epsilon = rng.gamma(1.5, 1.0, 400)
        worst = int(
            epsilon[groups == 1].mean() > epsilon[groups == 0].mean()
        )  # picked from the data, as a table does
        made = find_reversals(
            epsilon,
            groups,
            labels,
            names=tuple("abcd"),
            worst=worst,
            best=1 - worst,
            min_size=10,
            rng=rng,
        )
        found += any(each.beyond_chance for each in made)
    assert found <= 0.05 * 400 + 2 * (400 * 0.05 * 0.95) ** 0.5


def test_small_groups_are_not_read():
    epsilon = np.array([5.0] * 9 + [6.0] * 9 + [1.0] * 20 + [2.0] * 20)
    groups = np.array([0] * 9 + [1] * 9 + [0] * 20 + [1] * 20)
    labels = np.array([0] * 18 + [1] * 40)
    made = find_reversals(
        epsilon,
        groups,
        labels,
        names=("a", "b"),
        worst=0,
        best=1,
        min_size=10,
        rng=np.random.default_rng(0),
    )
    assert [each.label for each in made] == ["b"]
    assert made[0].beyond_chance
