import mpmath
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from indpriv.accountant.laws import (
    GAUSSIAN_ERROR,
    gaussian_delta,
    gaussian_epsilons,
    gaussian_mu,
)


def delta_of(epsilon, mu):
    """delta by its definition, in 60 digits."""
    with mpmath.workdps(60):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        near, far = (mpmath.erfc((epsilon / mu + side * mu / 2) / mpmath.sqrt(2)) / 2
                     for side in (-1, 1))  # fmt: skip
        return near - mpmath.exp(epsilon) * far


def test_delta_is_that_of_its_definition():
    rng = np.random.default_rng(0)
    for mu in [1e-8, 1e-3, 0.1, 0.4999, 0.5, 1.0, 7.0, 43.0, 1000.0]:
        threshold = np.append(rng.normal(0, 8, 12), [-1.0, 0.0])
        epsilon = np.append(threshold * mu + mu**2 / 2, [0.0, 1e-9, -1e-9, -mu])
        for value, found in zip(epsilon.tolist(), gaussian_delta(epsilon, mu), strict=True):
            truth = delta_of(value, mu)
            assert abs(found - truth) <= 0.1 * GAUSSIAN_ERROR * truth + 1e-280, (mu, value)


def test_deltas_without_noise_or_without_a_contribution():
    ends = gaussian_delta(
        np.array([np.inf, -np.inf, 1e3, 0.0]), np.array([2.0, 2.0, 1e-300, 1e300])
    )
    assert ends.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert gaussian_delta(np.array([1.0, 0.0, -1.0]), 0.0) == pytest.approx([0, 0, 1 - np.exp(-1)])


def test_mu_is_the_smallest_whose_delta_is_no_less():
    rng = np.random.default_rng(1)
    epsilon = np.append(0.0, np.exp(rng.uniform(-6, 5, 60)))
    delta = np.exp(rng.uniform(-30, -0.1, 61))
    for value, target, mu in zip(epsilon, delta, gaussian_mu(epsilon, delta), strict=True):
        assert delta_of(value, mu) >= target > delta_of(value, mu * (1 - 1e-9))
    assert gaussian_mu(np.ones(1), np.zeros(1)) == 0.0


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


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.5])
@pytest.mark.parametrize(("low", "high"), [(1e-3, 30.0), (1.0, 2.0), (1.3, 1.4), (3.0, 3.0)])
def test_many_values_are_read_between_nodes_and_never_too_small(delta, low, high):
    mu = np.append(0.0, np.geomspace(low, high, 9000))
    parts = [gaussian_epsilons(part, delta) for part in np.array_split(mu, 3)]
    exact_lower, exact_upper = (np.concatenate(ends) for ends in zip(*parts, strict=True))
    lower, upper = gaussian_epsilons(mu, delta)
    assert upper[0] == lower[0] == 0.0
    assert np.all(upper >= exact_lower * (1 - 1e-12))
    assert np.all(lower <= exact_upper * (1 + 1e-12))
    within = 1e-6 * np.maximum(exact_upper, mu)
    assert np.all(upper <= exact_upper + within)
    assert np.all(lower >= exact_lower - within)


def test_many_values_do_not_depend_on_who_is_accounted_together():
    mu = np.random.default_rng(2).uniform(0, 3, 30_000)
    whole, part = (gaussian_epsilons(some, 1e-6) for some in (mu, mu[:10_000]))
    np.testing.assert_array_equal(np.array(whole)[:, :10_000], part)
    assert not np.any(gaussian_epsilons(np.zeros(10_000), 1e-6))  # they took no part
