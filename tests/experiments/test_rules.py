import math

import numpy as np
import pytest

import indpriv
from audits.rules import composed_epsilons
from indpriv import InputError

PUBLISHED = {  # q = 0.01, noise 6, delta 1e-5
    10_000: (123.354, 7.450, 6.740, 1.159, 0.823),
    6_000: (74.024, 5.503, 5.037, 0.893, 0.636),
    5_000: (61.689, 4.952, 4.546, 0.814, 0.580),
}


@pytest.mark.parametrize("total_steps", PUBLISHED)
def test_reproduces_the_published_tables(total_steps):
    ours = composed_epsilons(6.0, 0.01, total_steps=total_steps, delta=1e-5)
    values = (ours.basic, ours.advanced, ours.optimal, ours.zcdp, ours.moments)
    # The authors' per-step epsilon differs from the formula by 0.1 percent; moments are printed with 3 digits.
    np.testing.assert_allclose(values, PUBLISHED[total_steps], rtol=1.3e-3)


def test_recomputed_values():
    ours = composed_epsilons(6.0, 0.01, total_steps=10_000, delta=1e-5)
    assert (round(ours.basic, 3), round(ours.advanced, 3)) == (123.457, 7.458)
    assert (round(ours.optimal, 4), round(ours.zcdp, 4), round(ours.moments, 4)) == (
        6.7402,
        1.1588,
        0.8227,
    )


def test_a_schedule_equals_the_textbook_sums():
    rng = np.random.default_rng(0)
    noise, rate, delta = rng.uniform(1, 8, 50), rng.uniform(0.005, 0.05, 50), 1e-6
    steps = [
        math.log(1 + q * (math.exp(math.sqrt(2 * math.log(1.25 / delta)) / s) - 1))
        for s, q in zip(noise, rate, strict=True)
    ]
    ours = composed_epsilons(noise, rate, total_steps=50, delta=delta)
    assert ours.basic == pytest.approx(sum(steps))
    squares = sum(e * e for e in steps)
    assert ours.advanced == pytest.approx(
        sum(e * (math.exp(e) - 1) for e in steps) + math.sqrt(2 * math.log(1 / delta) * squares)
    )
    assert ours.optimal == pytest.approx(
        sum(e * (math.exp(e) - 1) / (math.exp(e) + 1) for e in steps)
        + math.sqrt(2 * squares * math.log(math.e + math.sqrt(squares) / delta))
    )
    zcdp = sum(q * q / (s * s) for s, q in zip(noise, rate, strict=True))
    assert ours.zcdp == pytest.approx(zcdp + 2 * math.sqrt(math.log(1 / delta) * zcdp))


def test_zcdp_is_no_bound():
    assert composed_epsilons(0.5, 0.01, total_steps=1, delta=1e-6).zcdp == pytest.approx(
        0.149, abs=1e-3
    )  # truth: 4.285


def test_the_moments_accountant_is_no_smaller_than_the_account():
    """The other rules are formulas, and may be below it."""
    noise = np.linspace(2, 1, 300)
    settings = {"noise_multiplier": noise, "max_grad_norm": 1.0, "sample_rate": 0.01}
    log = indpriv.NormLog.from_arrays([[1.0]], [0], total_steps=300, **settings)
    rules = composed_epsilons(noise, 0.01, total_steps=300, delta=1e-5)
    assert rules.moments > indpriv.account(log, delta=1e-5).worst_case_epsilon
    assert rules.optimal == pytest.approx(rules.advanced_as_printed, rel=0.5)


def test_full_batches_and_tiny_noise():
    full = composed_epsilons(2.0, 1.0, total_steps=4, delta=1e-5)
    assert full.basic == pytest.approx(4 * math.sqrt(2 * math.log(1.25e5)) / 2)
    tiny = composed_epsilons(1e-3, 0.1, total_steps=4, delta=1e-5)
    assert tiny.advanced == math.inf
    assert math.isfinite(tiny.basic)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"noise_multiplier": [1.0, 2.0]}, "noise_multiplier has shape"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"delta": 2.0}, "delta"),
        ({"total_steps": 0}, "total_steps"),
    ],
)
def test_bad_input(arguments, match):
    good = {"noise_multiplier": 1.0, "sample_rate": 0.1, "total_steps": 5, "delta": 1e-5}
    with pytest.raises(InputError, match=match):
        composed_epsilons(**{**good, **arguments})
