"""What an account predicts of the strongest attack, beside other ways to the same numbers."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indpriv import NormLog
from indpriv.accountant.rdp import compute_rdp, kl_divergences
from indpriv.accountant.risk import predicted_evidence
from indpriv.accountant.steps import StepKinds


def kl_of(shift: float, rate: float) -> np.ndarray:
    one = np.ones(1)
    return kl_divergences(shift * one, rate * one)[:, 0]


@pytest.mark.parametrize(
    ("shift", "rate"), [(0.7, 1 / 34), (1.5, 0.3), (0.05, 0.01), (4.0, 0.5), (2.0, 1.0)]
)
def test_divergences_equal_integrals_in_fifty_digits(shift, rate):
    with mpmath.workdps(50):
        s, q = mpmath.mpf(shift), mpmath.mpf(rate)

        def ratio(z):
            return 1 - q + q * mpmath.exp(z * s - s**2 / 2)

        points = [-15, -5, 0, s, 2 * s, s + 5, s + 15]
        inside = mpmath.quad(lambda z: mpmath.npdf(z) * ratio(z) * mpmath.log(ratio(z)), points)
        outside = -mpmath.quad(lambda z: mpmath.npdf(z) * mpmath.log(ratio(z)), points)
    np.testing.assert_allclose(
        kl_of(shift, rate), [float(inside), float(outside)], rtol=1e-10, atol=1e-17
    )


@given(st.floats(0.01, 4.0), st.floats(0.01, 1.0))
@settings(max_examples=30, deadline=None)
def test_the_divergence_is_the_limit_of_those_that_rdp_adds_up(shift, rate):
    orders = np.array([1.0001, 1.0002])
    near, next_to = compute_rdp(
        sample_rate=rate, noise_multiplier=1 / shift, relative_norms=[1.0], orders=orders
    )[0]
    assert kl_of(shift, rate)[0] == pytest.approx(2 * near - next_to, rel=1e-5)


def test_sums_over_a_log_step_by_step():
    rng = np.random.default_rng(0)
    norms, noise = rng.uniform(0.0, 1.4, (6, 5)), np.repeat([0.8, 1.3], 6)
    log = NormLog.from_arrays(
        norms, np.arange(0, 12, 2), total_steps=12, noise_multiplier=noise, max_grad_norm=1.2,
        sample_rate=0.2, rounding=0,
    )  # fmt: skip
    found = predicted_evidence(log, orders=(2.0,))
    for i in range(5):
        relative = np.repeat(np.minimum(norms[:, i], 1.2) / 1.2, 2)
        steps = [kl_of(r / s, 0.2) for r, s in zip(relative, noise, strict=True)]
        inside, outside = np.sum(steps, axis=0)
        assert inside <= found.with_example[i] <= inside * (1 + 1e-3)  # norms are snapped up
        assert outside <= found.without_example[i] <= outside * (1 + 1e-3)  # norms are snapped up
        renyi = sum(
            compute_rdp(sample_rate=0.2, noise_multiplier=s, relative_norms=[r], orders=[2.0])[0, 0]
            for r, s in zip(relative, noise, strict=True)
        )
        assert renyi <= found[2.0][i] <= renyi * (1 + 1e-3)
    np.testing.assert_allclose(found.separation, found.with_example + found.without_example)


def test_a_log_of_many_distinct_norms_is_counted_within_a_tenth_of_a_percent():
    rng = np.random.default_rng(1)
    norms = rng.uniform(0.05, 1.5, (120, 300))
    log = NormLog.from_arrays(
        norms, np.arange(120), total_steps=120, noise_multiplier=1.0, max_grad_norm=1.0,
        sample_rate=0.1, rounding=0,
    )  # fmt: skip
    found = predicted_evidence(log)
    kinds = StepKinds(np.minimum(norms, 1).ravel(), np.full(36_000, 0.1))
    exact = kl_divergences(kinds.shift, kinds.rate).reshape(2, 120, 300).sum(axis=1)
    assert (found.with_example >= exact[0] * (1 - 1e-9)).all()
    np.testing.assert_allclose(found.with_example, exact[0], rtol=1e-3)
    np.testing.assert_allclose(found.without_example, exact[1], rtol=1e-3)
