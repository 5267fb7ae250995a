import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv.analysis.distribution import describe
from synthetic import epsilon_table


@given(st.lists(st.floats(0, 50), min_size=1, max_size=60))
def test_bins_hold_all_examples_and_the_tail_is_shown(values):
    found = describe(epsilon_table(values, worst_case=max(values) * 1.5))
    assert sum(found.counts) == found.n == len(values)
    assert found.median <= found.p75 <= found.p95 <= found.p99 <= found.max == max(values)
    assert len(found.edges) == len(found.counts) + 1
    assert found.edges[0] == 0
    assert found.edges[-1] >= found.max
    assert found.median == pytest.approx(np.median(values), rel=1e-12, abs=1e-300)
    for name, share in (("median", 0.5), ("p75", 0.75), ("p95", 0.95), ("p99", 0.99)):
        assert np.mean(np.array(values) <= getattr(found, name) + 1e-12) >= share - 1e-12


def test_an_epsilon_of_next_to_nothing():
    assert sum(describe(epsilon_table([5e-324, 0.0])).counts) == 2


def test_share_at_the_worst_case():
    found = describe(epsilon_table([1.0, 3.0, 3.0, 2.0], worst_case=3.0))
    assert found.share_at_worst_case == 0.5
    assert found.counts[-1] == 2


def test_a_run_that_nobody_took_part_in():
    found = describe(epsilon_table([0.0, 0.0]))
    assert found.max == 0.0
    assert sum(found.counts) == 2
