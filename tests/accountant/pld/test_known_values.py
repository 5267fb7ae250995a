"""The tight accountant against values known otherwise: closed forms, quadrature, and dp_accounting's discretisation."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import optimize, stats

import indpriv


def tight(total_steps, sample_rate, noise_multiplier, relative_norm=1.0, delta=1e-5):
    log = indpriv.NormLog.from_arrays(
        [[relative_norm]],
        [0],
        total_steps=total_steps,
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        sample_rate=sample_rate,
    )
    return indpriv.account(log, delta=delta, accountant="pld").to_frame().iloc[0]


def gaussian_epsilon(mu, delta):
    """Balle and Wang 2018, Theorem 8."""

    def excess(epsilon):
        tail = math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2) if epsilon < 700 else 0.0
        return stats.norm.cdf(-epsilon / mu + mu / 2) - tail - delta

    return optimize.brentq(excess, 0, 1e4, xtol=1e-12) if excess(0) > 0 else 0.0


def one_step_epsilon(rate, sigma, delta):
    """Hockey-stick divergence of one sampled step, the larger of both directions, by its one threshold on z."""

    def excess(epsilon):
        ratio = (math.exp(epsilon) - 1 + rate) / rate
        z = sigma * math.log(ratio) + 0.5 / sigma
        with_, without = stats.norm.sf(z - 1 / sigma), stats.norm.sf(z)
        return (1 - rate) * without + rate * with_ - math.exp(epsilon) * without - delta

    return optimize.brentq(excess, 0, 100, xtol=1e-13) if excess(0) > 0 else 0.0


def assert_contains(row, truth, rel):
    assert row.epsilon_lower <= truth * (1 + 1e-9)
    assert row.epsilon_upper >= truth * (1 - 1e-9)
    assert row.epsilon == pytest.approx(truth, rel=rel, abs=1e-9)
    assert row.epsilon_lower <= row.epsilon <= row.epsilon_upper <= row.rdp_epsilon


@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (1.0, 1), (1.0, 10), (5.0, 100)])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_without_sampling_it_is_the_exact_gaussian(sigma, steps, delta):
    assert_contains(
        tight(steps, 1.0, sigma, delta=delta),
        gaussian_epsilon(math.sqrt(steps) / sigma, delta),
        rel=1e-6,
    )


@pytest.mark.parametrize(
    ("rate", "sigma", "delta"),
    [(0.01, 1.0, 1e-5), (0.01, 0.5, 1e-6), (0.5, 0.5, 1e-9), (0.05, 5.0, 1e-5)],
)
def test_one_step_is_its_closed_form(rate, sigma, delta):
    assert_contains(
        tight(1, rate, sigma, delta=delta), one_step_epsilon(rate, sigma, delta), rel=1e-6
    )


@pytest.mark.parametrize(
    ("steps", "rate", "sigma", "truth"),
    [
        (3660, 4096 / 50000, 3.0, 8.249377),
        (100, 0.01, 0.5, 6.4762),
        (1, 1, 1.0, 4.377178),
        (1, 0.01, 1.0, 0.19945),
    ],
)
def test_values_computed_before(steps, rate, sigma, truth):
    row = tight(steps, rate, sigma)
    assert row.epsilon == pytest.approx(truth, rel=3e-5)
    assert row.epsilon_upper - row.epsilon_lower <= 1e-4 * truth


def test_mixed_levels():
    norms = np.repeat([[0.2], [0.5], [1.0]], 1, axis=1)
    log = indpriv.NormLog.from_arrays(
        norms,
        [0, 1220, 2440],
        total_steps=3660,
        noise_multiplier=3.0,
        max_grad_norm=1.0,
        sample_rate=4096 / 50000,
    )
    row = indpriv.account(log, delta=1e-5, accountant="pld", tolerance=1e-9).to_frame().iloc[0]
    assert row.epsilon == pytest.approx(4.988295, rel=1e-6)
    assert row.bracket == "certified"


@pytest.mark.parametrize(
    ("steps", "rate", "sigma", "relative_norm"),
    [(200, 0.05, 1.0, 1.0), (200, 0.05, 1.0, 0.5), (1000, 0.01, 0.8, 1.0)],
)
def test_dp_accounting_lies_above_by_its_discretisation_only(steps, rate, sigma, relative_norm):
    row = tight(steps, rate, sigma, relative_norm)
    peer = privacy_loss_distribution.from_gaussian_mechanism(
        sigma / relative_norm, sampling_prob=rate, value_discretization_interval=1e-4
    ).self_compose(steps)
    pessimistic = peer.get_epsilon_for_delta(1e-5)
    assert row.epsilon_lower <= pessimistic
    assert pessimistic == pytest.approx(row.epsilon, rel=2e-3)


def test_epsilon_is_zero_where_delta_alone_suffices():
    assert tight(1, 1e-5, 5.0, 0.1).epsilon == 0.0
    assert tight(10, 1e-3, 1.0, 0.0).epsilon == 0.0
