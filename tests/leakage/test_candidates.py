"""Who an example is told from, and chance against every rule that does not look."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from indpriv.errors import InputError
from indpriv.leakage.leak import Candidates


def candidates(values, targets=None, *, labels_known=False, known_with=1):
    """Of these values, which are the examples too."""
    inputs = torch.tensor(values, dtype=torch.float32).reshape(-1, 1)
    targets = torch.zeros(len(values)) if targets is None else torch.tensor(targets)
    return Candidates(inputs, targets, inputs, targets, labels_known, known_with)


@given(values=st.lists(st.integers(0, 4), min_size=2, max_size=4), size=st.sampled_from([1, 2, 3]))
def test_no_rule_that_does_not_look_names_more_than_chance(values, size):
    """The best one names the most frequent of what is left when the rest of a batch is known."""
    values = values * size  # whole batches
    rests = [set(rest) for rest in combinations(range(len(values)), size - 1)]
    left = [[v for at, v in enumerate(values) if at not in rest] for rest in rests]
    best = np.mean([max(Counter(part).values()) / len(part) for part in left])
    chance = candidates(values, known_with=size).chance(0, 1)
    assert best <= chance + 1e-12
    if size == 1 or len(set(values)) == 1:
        assert chance == pytest.approx(min(1, best * len(values) / (len(values) - size + 1)))


def test_copies_of_the_rest_of_a_batch_may_still_be_the_example():
    found = candidates([5, 5, 7, 8], known_with=2)
    assert found.others(2).tolist() == [True, True, False, False]  # 8 is known to be the other
    assert found.others(0).tolist() == [False, False, True, True]
    assert candidates([5, 6, 5, 8], known_with=2).others(1).tolist() == [False, False, True, True]


def test_an_example_is_told_from_its_label_where_that_is_known():
    found = candidates([1, 2, 3, 4], [0, 0, 1, 1], labels_known=True)
    assert found.others(0).tolist() == [False, True, False, False]
    assert found.chance(0, 1) == 0.5
    with pytest.raises(InputError, match="of its label"):
        candidates([1, 2, 3], [0, 0, 1], labels_known=True).others(2)


def test_more_guesses_have_more_chance_up_to_certainty():
    found = candidates([1, 2, 3, 4, 4])
    assert [found.chance(0, n) for n in (1, 2, 3)] == pytest.approx([0.4, 0.8, 1.0])
