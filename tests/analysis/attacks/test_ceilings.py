"""Limits of attacks: those of the guarantee, and of all examples under one threshold."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtr

from indpriv import NormLog, account, membership_risk
from indpriv.analysis.guarantee import ceilings_of, individual_ceiling, mu_of

DELTA = 1e-5
RATES = (0.01, 0.001)


@pytest.mark.parametrize("participation", ["secret", "known"])
def test_limits_of_the_worst_case_are_those_of_its_risk(participation):
    steps, positions = np.divmod(np.arange(24), 4)
    log = NormLog.from_arrays(
        np.full((1, 4), 0.5),
        [0],
        total_steps=6,
        noise_multiplier=1.5,
        max_grad_norm=1.0,
        sample_rate=1.0,
        batch_norms=(steps, positions, np.full(len(steps), 0.5)),
    )
    table = account(log, delta=DELTA, participation=participation)
    risk = membership_risk(
        log, delta=DELTA, false_positive_rate=0.01, participation=participation
    ).worst_case
    limits = ceilings_of(log, table)
    assert limits is not None
    assert limits.worst_case["0.01"] == pytest.approx(risk.true_positive_rate[0, 0], rel=1e-6)
    assert limits.advantage == pytest.approx(risk.advantage[0], rel=1e-6)
    individual = membership_risk(
        log, delta=DELTA, false_positive_rate=0.01, participation=participation
    ).individual.true_positive_rate[0, 0]
    assert individual <= limits.common_threshold["0.01"] * (1 + 1e-9)  # all are alike
    if participation == "known":
        assert limits.common_threshold["0.01"] == pytest.approx(individual, rel=1e-3)


def mixture(small, large, *, share=0.1, noise=1.0, rate=0.05, steps=200, n=20, **options):
    """Examples of two norms, a share of them of the large one."""
    norms = np.where(np.arange(n) < share * n, large, small)
    return NormLog.from_arrays(
        norms[None], [0], total_steps=steps, noise_multiplier=noise, max_grad_norm=1.0,
        sample_rate=rate, rounding=0.0, **options,
    )  # fmt: skip


def good_split(log, rate, share=0.1):
    """Mean true-positive rate of the best test of those of the large norm, and of guesses at the others; 1 % less, as these are upper figures."""
    to_large = rate / share * np.array([0.6, 0.8, 0.95, 1.0])
    found = membership_risk(log.take([0]), delta=DELTA, false_positive_rate=to_large).individual
    guessed = rate - share * to_large
    return float((share * 0.99 * found.true_positive_rate[0] + guessed).max())


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(
    "setting",
    [
        {"small": 0.1, "large": 1.0},
        pytest.param(
            {"small": 0.25, "large": 0.8, "noise": 1.4, "rate": 1 / 34, "steps": 680},
            marks=pytest.mark.slow,
        ),
        {"small": 0.5, "large": 1.0, "rate": 1.0, "steps": 3, "noise": 2.0},
    ],
)
def test_no_split_of_false_positives_is_above_the_ceiling(setting, accountant):
    log = mixture(**setting)
    table = account(log, delta=DELTA, accountant=accountant)
    for rate in RATES:
        found, best = individual_ceiling(log, table, rate), good_split(log, rate)
        assert best <= found
        if accountant == "pld":
            assert found <= 1.4 * best


def scores(norm, member, rng, *, noise=1.0, rate=0.05, steps=200):
    """(n,) log likelihood ratios of the best test, which knows the norm and sees all updates."""
    total = np.zeros(len(member))
    for _ in range(steps):
        shift = norm / noise
        seen = rng.normal(size=len(member)) + shift * (member & (rng.random(len(member)) < rate))
        total += np.log1p(rate * np.expm1(shift * seen - shift**2 / 2))
    return total


@pytest.mark.slow
def test_an_optimal_attacker_exceeds_the_mean_of_limits_and_not_the_ceiling():
    """With one threshold on the likelihood ratio it accuses 3.5 % where each example's own limit is 1.9 % on average."""
    rng, n = np.random.default_rng(0), 30_000
    log = mixture(0.1, 1.0)
    limits = {
        name: ceilings_of(log, account(log, delta=DELTA, accountant=name)).common_threshold["0.01"]
        for name in ("pld", "rdp")
    }
    mine, others = (
        [scores(norm, np.full(n, side), rng) for norm in (0.1, 1.0)] for side in (True, False)
    )
    pooled, weight = np.concatenate(others), np.repeat([0.9, 0.1], n) / n
    order = np.argsort(-pooled)
    threshold = pooled[order][np.searchsorted(np.cumsum(weight[order]), 0.01)]
    reached = 0.9 * np.mean(mine[0] > threshold) + 0.1 * np.mean(mine[1] > threshold)
    kinds = membership_risk(log.take([0, 19]), delta=DELTA, false_positive_rate=0.01).individual
    mean = np.array([0.1, 0.9]) @ kinds.true_positive_rate[:, 0]  # of each at its own rate
    assert mean < 0.0195
    assert 0.032 < reached < limits["pld"] * 1.05 < limits["rdp"]
    assert limits["pld"] == pytest.approx(0.0351, abs=2e-4)


@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(1.4, 1 / 34, 680), (1.0, 0.05, 200), (1.0, 1.0, 4)]
)
def test_a_gaussian_mechanism_of_the_same_epsilon_is_above_a_sampled_run(noise, rate, steps):
    log = mixture(0.4, 1.0, noise=noise, rate=rate, steps=steps)
    tight = account(log, delta=DELTA, accountant="pld")
    gaussian = replace(tight, account=replace(tight.account, accountant="rdp"))
    for at in (*RATES, 0.1):  # norms of tight curves are rounded up, by 1.5e-3 at most
        most = individual_ceiling(log, gaussian, at) * (1 + 3e-3)
        assert individual_ceiling(log, tight, at) <= most


def test_a_private_clipping_norm_raises_the_ceiling():
    """Its release alone can be told apart at e^cost times the rate, whatever the epsilon of the steps."""
    options = {"small": 0.05, "large": 0.05, "noise": 3.0}
    plain, log = (mixture(**options, clipping_norm_epsilon=cost) for cost in (0.0, 1.0))
    tables = [account(each, delta=DELTA) for each in (plain, log)]
    before, after = (
        individual_ceiling(each, table, 0.01)
        for each, table in zip((plain, log), tables, strict=True)
    )
    assert before < 0.011
    assert np.e * 0.01 < after <= np.e * before
    assert 2 * ndtr(mu_of(tables[1]) / 2).min() - 1 > np.tanh(0.5)
