import numpy as np
import pytest
from dp_accounting import gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from indpriv.accountant import gaussian
from indpriv.accountant.gaussian import gaussian_epsilons


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.0, 40.0), min_size=1, max_size=8), st.sampled_from([1e-9, 1e-5, 0.1, 0.5])
)
def test_equals_the_exact_epsilon_and_is_never_below_it(mu, delta):
    lower, upper = gaussian_epsilons(np.array(mu), delta)
    for index, value in enumerate(mu):
        truth = oracles.gaussian_epsilon(value, delta)
        assert lower[index] <= truth * (1 + 1e-9) + 1e-12
        assert truth * (1 - 1e-11) - 1e-12 <= upper[index] <= truth * (1 + 1e-7) + 1e-10


def test_equals_dp_accounting():
    for sigma in np.geomspace(0.05, 50, 15):
        theirs = gaussian_mechanism.get_epsilon_gaussian(sigma, 1e-5)
        lower, upper = gaussian_epsilons(np.array([1 / sigma]), 1e-5)
        assert upper[0] == pytest.approx(theirs, rel=1e-6)
        assert lower[0] == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(("low", "high"), [(1e-3, 30.0), (1.0, 2.0), (3.0, 3.0)])
def test_many_values_are_read_between_nodes_and_never_too_small(monkeypatch, low, high):
    mu = np.append(0.0, np.geomspace(low, high, 400))
    exact_lower, exact_upper = gaussian_epsilons(mu, 1e-6)
    monkeypatch.setattr(gaussian, "_MOST_EXACT", 10)
    lower, upper = gaussian_epsilons(mu, 1e-6)
    assert upper[0] == lower[0] == 0.0
    assert np.all(upper >= exact_lower * (1 - 1e-12))
    assert np.all(lower <= exact_upper * (1 + 1e-12))
    assert np.all(upper <= exact_upper * (1 + 1e-5) + 1e-9)
    assert np.all(lower >= exact_lower * (1 - 1e-5) - 1e-9)
    assert not np.any(gaussian_epsilons(np.zeros(20), 1e-6))  # they took no part
