import numpy as np
import pytest

from indpriv.analysis.groups import group_table
from synthetic import epsilon_table, rows


def reversals_of(epsilon, groups, labels):
    train = rows("train", labels, group=np.asarray(groups).astype(str))
    return group_table(epsilon_table(epsilon), train, rows("test", []), "group").reversals


@pytest.mark.slow
def test_groups_that_do_not_differ_are_rarely_called_reversed():
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(400):
        groups, labels = rng.integers(0, 2, 400), rng.integers(0, 4, 400)
        made = reversals_of(rng.gamma(1.5, 1.0, 400), groups, labels)
        found += any(each.beyond_chance for each in made)
    assert found <= 0.05 * 400 + 2 * (400 * 0.05 * 0.95) ** 0.5


def test_small_groups_are_not_read():
    epsilon = np.array([5.0] * 9 + [6.0] * 9 + [5.0] * 40 + [1.0] * 20 + [2.0] * 40)
    groups = np.array([0] * 9 + [1] * 9 + [0] * 40 + [0] * 20 + [1] * 40)
    labels = np.array([0] * 18 + [2] * 40 + [1] * 60)
    made = reversals_of(epsilon, groups, labels)  # group 0 has the larger mean over all labels
    assert [each.label for each in made] == ["1"]
    assert made[0].beyond_chance
