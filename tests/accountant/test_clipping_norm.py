"""What a private clipping norm adds to accounts, odds and compositions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import expit, ndtr, ndtri

from indpriv import InputError, NormLog, account, membership_risk
from indpriv.accountant import Method, Tuning, cap_rows, compose
from indpriv.accountant.laws import gaussian_delta
from indpriv.accountant.method import rate_after_release
from indpriv.accountant.risk import Readings
from indpriv.analysis.guarantee import ceilings_of, membership_of, true_positive_bound
from indpriv.epsilon_table import FALSE_POSITIVE_RATE

COST, DELTA = 0.3, 1e-5
NORMS = np.array([[0.1, 0.4, 2.0, 2.0], [0.2, 0.3, 0.9, 2.0]])


def readings(rate, epsilon, cost):
    return replace(Readings.of(rate, epsilon, delta=DELTA), clipping_norm_cost=cost)


def pair(cost=COST, **changes):
    """A log without a private clipping norm, and the same log with one."""
    given = {
        "total_steps": 20,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.1,
        **changes,
    }
    plain = NormLog.from_arrays(NORMS, [0, 10], **given)
    return plain, NormLog.from_arrays(NORMS, [0, 10], **given, clipping_norm_epsilon=cost)


KNOWN = {"participation": "known"}
BATCHES = {"batch_norms": ([0, 0, 5], [0, 2, 2], [0.5, 2.0, 0.7]), "sampler": "shuffled"}
ACCOUNTS = {
    "rdp": ({}, {}, 1),
    "pld": ({}, {"accountant": "pld"}, 1),
    "the paper's": ({"rounding_mode": "nearest"}, {"preset": "yu2023"}, 1),
    "worst case between records": ({}, {"between_records": "worst_case"}, 1),
    "zero out": ({}, {"neighbouring": "zero_out"}, 1),
    "replace one": ({}, {"neighbouring": "replace_one"}, 2),
    "replace one, pld": ({}, {"neighbouring": "replace_one", "accountant": "pld"}, 2),
    "fixed size": (
        {"sampler": "fixed_size", "neighbouring": "replace_one"},
        {},
        2,
    ),
    "truncated": ({"sampler": "truncated_poisson", "max_batch_size": 2}, {}, 1),
    "hardly truncated": ({"sampler": "truncated_poisson", "max_batch_size": 4}, {}, 1),
    "known": (BATCHES, KNOWN, 1),
    "known, replaced": (BATCHES, {**KNOWN, "neighbouring": "replace_one"}, 2),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_every_epsilon_grows_by_what_the_clipping_norm_costs(name):
    changes, method, times = ACCOUNTS[name]
    tables = [account(log, delta=DELTA, **method) for log in pair(**changes)]
    plain, found = tables
    assert plain.account.clipping_norm_epsilon == 0
    assert "private clipping norm" not in plain.account.describe()
    assert found.worst_case_epsilon == pytest.approx(plain.worst_case_epsilon + times * COST)
    np.testing.assert_allclose(found.epsilon, plain.epsilon + times * COST)
    np.testing.assert_array_equal(found.epsilon_upper, found.epsilon)
    np.testing.assert_array_equal(found.epsilon_lower, plain.epsilon_lower)
    np.testing.assert_array_equal(found.at_worst_case, plain.at_worst_case)
    assert found.account.clipping_norm_epsilon == pytest.approx(times * COST)
    said = f"including epsilon {times * COST:.2f} for a private clipping norm"
    assert said in found.account.describe()
    assert said in found.account.guaranteed_by
    assert found.claim == plain.claim
    if "rdp_epsilon" in plain.details:
        by_orders = plain.details["rdp_epsilon"] + times * COST
        np.testing.assert_allclose(found.details["rdp_epsilon"], by_orders)


def test_many_rows_of_a_unit_cost_as_many_times():
    rows = {"unit": "user", "unit_ids": ["a", "a", "a", "b"]}
    plain, found = (account(log, delta=DELTA) for log in pair(**rows))
    np.testing.assert_allclose(found.epsilon, plain.epsilon + COST * np.array([3, 1]))
    np.testing.assert_allclose(
        found.details["unit_worst_case"],
        plain.details["unit_worst_case"] + COST * np.array([3, 1]),
    )
    assert found.worst_case_epsilon == pytest.approx(plain.worst_case_epsilon + 3 * COST)
    assert found.account.clipping_norm_epsilon == pytest.approx(3 * COST)
    caps = [cap_rows(log, Method(delta=DELTA), [1, 2]).itertuples() for log in pair(**rows)]
    for without, with_cost, rows_of in zip(*caps, (1, 2), strict=True):
        extra = with_cost.worst_case_epsilon - without.worst_case_epsilon
        assert extra == pytest.approx(rows_of * COST)
    known = [account(log, delta=DELTA, **KNOWN) for log in pair(**rows, **BATCHES)]
    assert known[1].worst_case_epsilon == pytest.approx(known[0].worst_case_epsilon + 3 * COST)
    np.testing.assert_allclose(known[1].epsilon, known[0].epsilon + COST * np.array([3, 1]))
    # One row per unit
    single = {"unit": "user", "unit_ids": list("abcd")}
    plain, found = (account(log, delta=DELTA) for log in pair(**single))
    np.testing.assert_allclose(found.epsilon, plain.epsilon + COST)


def exact_rate(rate, mu, cost):
    """True-positive rate of the best test of randomised response and a Gaussian shift together."""
    likely = expit(cost)  # the answer that the example makes likely

    def rates(threshold):
        # Accuse if the sum of both log likelihood ratios is above the threshold.
        cuts = [(threshold - own) / mu + mu / 2 for own in (cost, -cost)]
        false = (1 - likely) * ndtr(-cuts[0]) + likely * ndtr(-cuts[1])
        true = likely * ndtr(mu - cuts[0]) + (1 - likely) * ndtr(mu - cuts[1])
        return false, true

    threshold = brentq(lambda t: rates(t)[0] - rate, -60, 60, xtol=1e-13)
    return rates(threshold)[1]


@settings(deadline=None, max_examples=60)
@given(
    mu=st.floats(0.05, 4.0),
    cost=st.floats(0.01, 3.0),
    rate=st.sampled_from([1e-4, 0.01, 0.1, 0.5, 0.9]),
    epsilon=st.sampled_from([0.0, 0.1, 1.0, 4.0]),
)
def test_odds_are_never_below_those_of_the_hardest_release(mu, cost, rate, epsilon):
    """Randomised response is the (cost, 0)-private release that tells the most."""
    squared = np.array([mu])
    risk = readings(rate, epsilon, cost).off_gaussian(squared)
    likely = expit(cost)
    exact = exact_rate(rate, mu, cost)
    assert exact - 1e-9 <= risk.true_positive_rate[0, 0] <= 1
    at = np.array([epsilon - cost, epsilon + cost])
    parts = [
        float(gaussian_delta(np.array([value]), squared)[0])
        if value >= 0
        else 1 - np.exp(value) * (1 - float(gaussian_delta(np.array([-value]), squared)[0]))
        for value in at
    ]
    # delta at a negative epsilon by the symmetry of the Gaussian pair
    exact_delta = likely * parts[0] + (1 - likely) * parts[1]
    assert exact_delta <= risk.delta[0, 0] + 1e-9
    advantage = max(exact_rate(x, mu, cost) - x for x in np.linspace(0.01, 0.99, 33))
    assert advantage <= risk.advantage[0] + 1e-9
    # The Gaussian mechanism with the stated mu tells at least as much.
    assert ndtr(ndtri(rate) + risk.mu[0]) >= exact - 1e-9


def test_a_release_that_costs_little_hardly_changes_odds_and_none_changes_nothing():
    squared = np.array([1.2])
    plain = readings(0.01, 1.0, 0.0).off_gaussian(squared)
    found = readings(0.01, 1.0, 1e-6).off_gaussian(squared)
    for name in ("advantage", "true_positive_rate", "delta", "mu"):
        np.testing.assert_allclose(getattr(found, name), getattr(plain, name), rtol=1e-5)
    huge = readings(0.01, 1.0, 60.0)
    assert huge.off_gaussian(squared).true_positive_rate[0, 0] == 1
    assert rate_after_release(0.01, 0.0) == 0.01


@pytest.mark.slow
def test_limits_of_membership_tests_grow_and_stay_below_those_of_epsilon_alone():
    plain, found = (account(log, delta=DELTA) for log in pair())
    risks = [membership_risk(log, delta=DELTA, epsilon=1.0) for log in pair()]
    for before, after in (
        (plain.details["true_positive_limit"], found.details["true_positive_limit"]),
        (risks[0].individual.true_positive_rate, risks[1].individual.true_positive_rate),
        (risks[0].individual.delta, risks[1].individual.delta),
        (risks[0].worst_case.advantage, risks[1].worst_case.advantage),
    ):
        assert (after > before).all()
    factor = np.exp(COST)
    np.testing.assert_allclose(
        found.details["true_positive_limit"], plain.details["true_positive_limit"] * factor
    )
    worst = risks[1].worst_case.true_positive_rate[0, 0]
    alone = true_positive_bound(found.worst_case_epsilon, DELTA, FALSE_POSITIVE_RATE)
    assert worst < alone
    assert worst <= risks[0].worst_case.true_positive_rate[0, 0] * factor
    assert risks[1].account.clipping_norm_epsilon == COST


def test_known_participation_states_the_odds_of_the_gaussian_steps_and_the_release():
    plain, log = pair(**BATCHES)
    table = account(log, delta=DELTA, **KNOWN)
    mu = membership_of(plain, account(plain, delta=DELTA, **KNOWN)).mu
    found = membership_of(log, table)
    assert found.true_positive_rate >= exact_rate(FALSE_POSITIVE_RATE, mu, COST)
    risk = membership_risk(log, delta=DELTA, **KNOWN).worst_case
    assert found.true_positive_rate == pytest.approx(risk.true_positive_rate[0, 0], rel=1e-6)
    assert found.advantage == pytest.approx(risk.advantage[0], rel=1e-6)
    ceilings = ceilings_of(log, table)
    assert ceilings.worst_case["0.01"] == pytest.approx(found.true_positive_rate, rel=1e-6)
    assert ceilings.advantage == pytest.approx(found.advantage, rel=1e-6)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_compositions_add_the_clipping_norms_of_all_runs(accountant):
    plain, found = pair()
    other = replace(found, clipping_norm_epsilon=0.1)
    before = compose([plain, plain], delta=DELTA, accountant=accountant)
    after = compose([found, other], delta=DELTA, accountant=accountant)
    assert after.worst_case_epsilon == pytest.approx(before.worst_case_epsilon + COST + 0.1)
    np.testing.assert_allclose(after.epsilon, before.epsilon + COST + 0.1)
    np.testing.assert_allclose(
        after.details["unit_worst_case"], before.details["unit_worst_case"] + COST + 0.1
    )
    assert after.account.clipping_norm_epsilon == pytest.approx(COST + 0.1)
    # Someone in one run only pays for that run.
    apart = replace(other, example_ids=np.array([0, 1, 2, 9]))
    some = compose([found, apart], delta=DELTA, accountant=accountant)
    alone = account(other, delta=DELTA, accountant=accountant)
    nine = np.flatnonzero(some.example_ids == 9)
    np.testing.assert_allclose(some.epsilon[nine], alone.epsilon[-1], rtol=1e-4)


def test_tuning_counts_the_clipping_norm_in_every_trial():
    plain, found = pair()
    tuning = Tuning(5.0)
    before, after = (
        compose([log, log], delta=DELTA, tuning=tuning).worst_case_epsilon for log in (plain, found)
    )
    assert after > before + COST


def test_an_epsilon_of_a_release_is_a_number_of_at_least_0():
    for wrong in (-0.1, np.nan, np.inf, True, "0.1"):
        with pytest.raises(InputError, match="clipping_norm_epsilon="):
            pair(cost=wrong)


def test_compositions_of_known_participation_add_them_too():
    plain, found = pair(**BATCHES)
    for options in ({"participation": "known"}, {"participation": ["known", "secret"]}):
        secret = options["participation"] != "known"
        others = pair() if secret else (plain, found)
        before = compose([plain, others[0]], delta=DELTA, **options)
        after = compose([found, others[1]], delta=DELTA, **options)
        assert after.worst_case_epsilon == pytest.approx(before.worst_case_epsilon + 2 * COST)
        np.testing.assert_allclose(after.epsilon, before.epsilon + 2 * COST)
    replaced = [compose([log, log], delta=DELTA, participation="known", neighbouring="replace_one")
                for log in (plain, found)]  # fmt: skip
    assert replaced[1].worst_case_epsilon == pytest.approx(
        replaced[0].worst_case_epsilon + 4 * COST
    )
