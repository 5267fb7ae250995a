"""Figures of settings over seeds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from audits.intervals import student_interval
from audits.sweep.findings import OverSeeds

VALUES = st.lists(st.floats(0, 100), min_size=2, max_size=8)


@given(VALUES)
def test_an_interval_is_that_of_scipy(values):
    spread, found = np.std(values, ddof=1), student_interval(np.array(values))
    if spread > 1e-6:
        low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
    cut = student_interval(np.array(values), 20.0, 80.0)
    assert cut.low == max(found.low, 20.0)
    assert cut.high == min(found.high, 80.0)


@given(VALUES, st.data())
def test_a_figure_that_a_seed_lacks_has_no_mean(values, data):
    assert OverSeeds.of(values).mean == pytest.approx(np.mean(values))
    lacking = [*values]
    lacking[data.draw(st.integers(0, len(values) - 1))] = None
    assert OverSeeds.of(lacking) == OverSeeds(None, None, len(values) - 1)


def test_one_seed_has_no_interval():
    assert OverSeeds.of([0.5]) == OverSeeds(0.5, None, 1)
