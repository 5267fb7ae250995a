"""Advantage, true-positive rates and mu, compared with closed forms, brute force and bounds."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import oracles
from delta_bounds import delta_bounds
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld import curves
from indpriv.accountant.pld.curves import (
    delta_curve,
    gaussian_approximation,
    membership_advantage,
    true_positive_rates,
)

RATES = np.array([1e-6, 1e-3, 0.1, 0.95])
ROUNDING = 1e-9  # relative, of the references
COMPOSED = [
    [(1.0, 1.0, 0.2, 12)],
    [(0.5, 0.7, 0.05, 20), (1.0, 1.5, 0.3, 6)],
    pytest.param([(1.0, 0.6, 0.01, 25)], marks=pytest.mark.slow),  # rare participation
    [(1.0, 2.0, 1.0, 3), (1.0, 1.0, 0.1, 8)],
]


def run_of(*steps):
    """One example that took `count` steps of each (relative_norm, noise_multiplier, sample_rate, count)."""
    columns = np.array(steps, float).T
    return Participations(columns[0], columns[1], columns[2], columns[3:])


def rates_of(run, rates=RATES):
    found = true_positive_rates(run, np.asarray(rates), membership_advantage(run))
    return found.lower[0], found.upper[0]


def encloses(lower, truth, upper, tight):
    """The truth lies between, and the bracket is no wider than `tight`, relative."""
    assert np.all(lower * (1 - ROUNDING) <= truth)
    assert np.all(truth <= upper * (1 + ROUNDING))
    assert np.all(upper - lower <= tight * upper)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 4.0])
def test_a_run_without_sampling_is_the_gaussian_trade_off(mu):
    run = run_of((1.0, 2.0 / mu, 1.0, 4))
    encloses(rates_of(run)[0], norm.cdf(norm.ppf(RATES) + mu), rates_of(run)[1], 2e-6)
    advantage = membership_advantage(run)
    encloses(advantage.lower, 2 * norm.cdf(mu / 2) - 1, advantage.upper, 1e-9)
    found = gaussian_approximation(run, run, delta=1e-5, limit=50.0)
    assert found.mu[0] == pytest.approx(mu, rel=1e-9)
    assert found.error[0] <= 1e-9


@pytest.mark.parametrize(("shift", "rate"), [(1.0, 0.01), (0.2, 0.5), (3.0, 0.1)])
def test_one_sampled_step_is_the_attack_on_its_outcome(shift, rate):
    """The best attack says "present" of large outcomes: without the example it sees N(0, 1), with it the mixture."""
    run = run_of((1.0, 1 / shift, rate, 1))
    truth = (1 - rate) * RATES + rate * norm.cdf(norm.ppf(RATES) + shift)
    encloses(*np.insert(np.stack(rates_of(run)), 1, truth, axis=0), 2e-6)
    advantage = membership_advantage(run)
    encloses(advantage.lower, rate * (2 * norm.cdf(shift / 2) - 1), advantage.upper, 1e-9)


@pytest.mark.parametrize("steps", COMPOSED)
def test_no_attack_on_rounded_losses_does_better_and_fine_ones_do_as_well(steps):
    run, width = run_of(*steps), 2e-3
    lower, upper = rates_of(run)
    laws = oracles.laws_of_rounded_losses(steps, width)
    finer = oracles.laws_of_rounded_losses(steps, width / 2)
    for k, rate in enumerate(RATES):
        attacks = [oracles.best_true_positive_rate(*law, rate) for law in (laws, finer)]
        assert max(attacks) <= upper[k] * (1 + ROUNDING)
        limit = attacks[1] + (attacks[1] - attacks[0]) / 3  # rounding costs the square of its width
        assert lower[k] <= limit * (1 + 1e-5)
        assert upper[k] == pytest.approx(limit, rel=1e-5)
    advantage = membership_advantage(run)
    coarse, best = (np.maximum(with_ - without, 0).sum() for with_, without in (laws, finer))
    assert best <= advantage.upper[0] * (1 + ROUNDING)
    assert advantage.lower[0] == pytest.approx(best + (best - coarse) / 3, rel=1e-5)


@pytest.mark.parametrize("steps", COMPOSED[:2])
def test_the_curve_lies_between_proven_bounds(steps):
    epsilons = np.array([0.0, 0.5, 2.0])
    found = delta_curve(run_of(*steps), epsilons)
    for k, epsilon in enumerate(epsilons):
        least, most = delta_bounds(steps, epsilon, precision=1e-4)
        assert most - least <= 1e-4 * most  # else the reference would show nothing
        assert found.lower[0, k] <= most
        assert least <= found.upper[0, k]


@pytest.mark.slow
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([0.3, 1.0]),
            st.sampled_from([1.0, 10.0]),
            st.sampled_from([0.1, 1.0]),
            st.integers(1, 50),
        ),
        min_size=1,
        max_size=2,
    )
)
def test_curves_of_any_run_are_consistent(steps):
    run = run_of(*steps)
    advantage, (lower, upper) = membership_advantage(run), rates_of(run)
    assert np.all((lower <= upper) & (upper <= 1))
    assert np.all(upper >= RATES)
    assert np.all(
        lower <= (RATES + advantage.upper) * (1 + ROUNDING)
    )  # no attack has more than the advantage
    assert np.all(np.diff(upper) >= -1e-9)  # more false positives, no fewer true ones
    from_origin = upper[:-1] / RATES[:-1]
    assert np.all(np.diff(lower) / np.diff(RATES) <= from_origin * (1 + 1e-5))  # concave
    found = gaussian_approximation(run, run, delta=1e-5, limit=1e4)
    assert np.all((found.mu >= 0) & np.isfinite(found.mu) & (found.error >= 0) & (found.error <= 1))


def test_the_gaussian_lies_above_the_curve_and_names_its_error():
    run = run_of((1.0, 1.5, 0.03, 680))
    found = gaussian_approximation(run, run, delta=1e-5, limit=10.0)
    epsilon = np.linspace(0, 2.5, 9)
    curve = delta_curve(run, epsilon)
    gaussian = np.array(
        [oracles.one_step_delta(float(found.mu[0]), 1.0, 1.0, e, "remove") for e in epsilon]
    )
    assert np.all(gaussian >= curve.lower[0] - 1e-5)
    assert 1e-3 < found.error[0] < 0.05
    assert np.all(
        gaussian - curve.lower[0] <= found.error[0] * 1.05
    )  # between the points that were looked at


def test_a_free_example_has_no_advantage():
    run = run_of((0.0, 1.0, 0.1, 30))
    assert membership_advantage(run).upper[0] == 0
    np.testing.assert_allclose(rates_of(run)[1], RATES, rtol=1e-13)
    assert gaussian_approximation(run, run, delta=1e-5, limit=1.0).mu[0] == 0


def test_many_examples_are_as_each_alone():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 200, (6, 3)).astype(float)
    several = Participations(np.array([0.1, 0.5, 1.0]), np.ones(3), np.full(3, 0.05), counts)
    together = true_positive_rates(several, np.array([1e-3]), membership_advantage(several)).upper[
        :, 0
    ]
    for example in range(6):
        lower, upper = rates_of(several.select(np.array([example])), [1e-3])
        assert lower[0] * (1 - 1e-6) <= together[example] <= upper[0] * (1 + 2e-6)


@pytest.mark.parametrize("low", [0.0, 0.5])
def test_a_convex_function_is_never_below_what_its_points_prove(low):
    def function(x):
        return (x - low) ** 2 + np.exp(x) / 10 + 1

    x = np.linspace(-1.3, 1.7, 9)[None]
    y = function(x)
    best = y.argmin(axis=1)
    proven = curves._least_between(x, y - 1e-3, y + 1e-3, best)[0]
    truth = function(np.linspace(-2, 2, 100_001)).min()
    assert truth - 0.2 < proven <= truth
