"""Tight epsilons of units of several rows: never below the truth, and close to it."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq
from scipy.special import logsumexp

from indpriv import NormLog, account
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld import mixture_law, unit_losses
from indpriv.accountant.pld.brackets import pld_epsilon
from indpriv.accountant.pld.unit_losses import UnitSteps, unit_epsilon

LIMIT = 1e4


def all_sets(shifts, rate):
    """Values and probabilities of the sum of sampled shifts, by listing every set of rows."""
    value, probability = np.zeros(1), np.ones(1)
    for shift in shifts:
        value = np.concatenate([value, value + shift])
        probability = np.concatenate([probability * (1 - rate), probability * rate])
    return value, probability


def one_step_delta(shifts, rate, epsilon, direction):
    """Exact delta of one step: both laws beyond the one z where the loss is epsilon."""
    value, probability = all_sets(shifts, rate)
    kept = probability > 0
    value, probability = value[kept], probability[kept]
    loss = epsilon if direction == "remove" else -epsilon

    def excess(z):
        return logsumexp(value * z - value**2 / 2, b=probability) - loss

    low, high = -1e4, 1e4
    if excess(low) > 0:  # no loss is as low
        return 0.0 if direction == "add" else 1 - np.exp(epsilon)
    z = brentq(excess, low, high, xtol=1e-13)
    if direction == "remove":
        return probability @ stats.norm.sf(z - value) - np.exp(epsilon) * stats.norm.sf(z)
    return stats.norm.cdf(z) - np.exp(epsilon) * (probability @ stats.norm.cdf(z - value))


def _excess(epsilon, shifts, rate, delta, direction):
    return one_step_delta(shifts, rate, epsilon, direction) - delta


def one_step_epsilon(shifts, rate, delta):
    found = 0.0
    for direction in ("remove", "add"):
        high = 1.0
        while one_step_delta(shifts, rate, high, direction) > delta:
            high *= 2
        arguments = shifts, rate, delta, direction
        if _excess(0.0, *arguments) > 0:
            found = max(found, brentq(_excess, 0, high, args=arguments))
    return found


def bound(shifts, rate, steps, delta, tolerance=1e-6):
    shifts = np.atleast_2d(np.asarray(shifts, np.float64))
    kinds = UnitSteps.summarised(shifts, np.full(len(shifts), rate), np.full(len(shifts), steps))
    return unit_epsilon(kinds, delta, LIMIT, tolerance)


@settings(max_examples=5, deadline=None)
@given(
    shifts=st.lists(st.floats(0.02, 3.0), min_size=1, max_size=4),
    rate=st.sampled_from([1e-3, 0.02, 0.3, 0.9, 1.0]),
    delta=st.sampled_from([1e-3, 1e-5]),
)
def test_one_step_is_exact(shifts, rate, delta):
    truth = one_step_epsilon(shifts, rate, delta)
    found = bound(shifts, rate, 1, delta)
    assert truth * (1 - 1e-9) <= found <= truth * (1 + 1e-4) + 1e-4


@pytest.mark.slow
def test_one_step_of_random_units():
    rng = np.random.default_rng(0)
    for case in range(140):
        sigma = [0.3, 50.0][case % 2] if case < 40 else np.exp(rng.uniform(-0.5, 2.5))
        rate = 1.0 if case % 10 == 3 else np.exp(rng.uniform(np.log(1e-3), 0))
        shifts = rng.choice([0.1, 0.33, 0.5, 1.0], rng.integers(1, 7)) / sigma
        delta = 10.0 ** rng.integers(-8, -2)
        truth = one_step_epsilon(shifts, rate, delta)
        found = bound(shifts, rate, 1, delta)
        assert truth * (1 - 1e-9) <= found <= truth * (1 + 1e-4) + 1e-4, (shifts, rate, delta)


def test_a_unit_of_one_row_is_the_example_itself():
    one, rate, sigma = np.ones(1), 0.02, 1.1
    run = Participations(one, sigma * one, rate * one, np.array([[400.0]]))
    exact = pld_epsilon(run, delta=1e-5, rdp_upper=np.array([LIMIT]))
    found = bound([1 / sigma], rate, 400, 1e-5)
    assert exact.epsilon_lower[0] <= found <= exact.epsilon_upper[0] * (1 + 1e-4)


@pytest.mark.slow
def test_units_of_one_row_in_random_runs():
    rng = np.random.default_rng(1)
    for _ in range(80):
        levels = np.array([0.2, 0.6, 1.0])
        sigma, rate = np.exp(rng.uniform(-0.4, 2)), np.exp(rng.uniform(np.log(1e-3), -0.5))
        counts = rng.integers(1, 400, 3).astype(float)
        delta = 10.0 ** rng.integers(-8, -3)
        run = Participations(levels, np.full(3, sigma), np.full(3, rate), counts[None])
        exact = pld_epsilon(run, delta=delta, rdp_upper=np.array([LIMIT]))
        kinds = UnitSteps.summarised((levels / sigma)[:, None], np.full(3, rate), counts)
        found = unit_epsilon(kinds, delta, LIMIT, 1e-6)
        assert exact.epsilon_lower[0] * (1 - 1e-9) <= found, (sigma, rate, counts, delta)
        assert found <= exact.epsilon_upper[0] * (1 + 1e-4) + 1e-6, (sigma, rate, counts, delta)


@pytest.mark.slow
def test_dp_accounting_finds_the_same_epsilon():
    rng = np.random.default_rng(2)
    for _ in range(6):
        sigma, rate = np.exp(rng.uniform(-0.3, 1.5)), np.exp(rng.uniform(-5, -1.5))
        n_rows, steps = int(rng.integers(2, 6)), int(rng.integers(20, 400))
        shifts = rng.choice([0.2, 0.5, 1.0], n_rows)
        value, probability = all_sets(shifts, rate)
        value, place = np.unique(np.round(value, 9), return_inverse=True)
        interval = min(0.05 * rate * shifts.sum() / sigma, 5e-4)
        law = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            sigma, value, np.bincount(place, probability), value_discretization_interval=interval
        )
        oracle = law.self_compose(steps).get_epsilon_for_delta(1e-5)
        found = bound(shifts / sigma, rate, steps, 1e-5)
        assert oracle * (1 - 3e-4) <= found <= oracle * (1 + 1e-4), (shifts, sigma, rate, steps)


def unit_log(norms, units, **changes):
    run = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.05, "unit": "user"}
    steps = {"recorded_steps": np.arange(len(norms)) * 10, "total_steps": 10 * len(norms)}
    return NormLog.from_arrays(norms, unit_ids=units, **{**run, **steps, **changes})


@pytest.mark.parametrize(
    ("rounding", "rows"),
    [
        (0.05, "aabb"),
        pytest.param(0.05, "aabbbcd", marks=pytest.mark.slow),
        pytest.param(0.0, "aabbbcd", marks=pytest.mark.slow),
    ],
)
def test_the_account_of_people_by_losses(rounding, rows):
    rng, people = np.random.default_rng(3), np.array(list(rows))
    norms = np.exp(rng.normal(-0.7, 0.8, (3, len(people))))
    log = unit_log(norms, people, rounding=rounding)
    loose = account(log, delta=1e-5)
    tight = account(log, delta=1e-5, accountant="pld")
    assert np.all(tight.epsilon <= loose.epsilon)
    assert np.all(tight.epsilon[:2] < 0.95 * loose.epsilon[:2])
    assert (
        tight.details["bracket"].tolist()
        == ["upper", "upper", "certified", "certified"][: len(tight)]
    )
    assert np.all(tight.epsilon_lower[:2] == 0)
    relative = np.minimum(norms[:, :2] if not rounding else np.ceil(norms[:, :2] / 0.05) * 0.05, 1)
    assert tight.epsilon[0] == pytest.approx(bound(relative, 0.05, 10, 1e-5), rel=2e-4)
    clipped = account(unit_log(np.full(norms.shape, 2.0), people), delta=1e-5, accountant="pld")
    np.testing.assert_array_equal(clipped.epsilon, clipped.details["unit_worst_case"])
    assert np.all(tight.epsilon <= clipped.epsilon)


def test_larger_norms_and_more_rows_never_cost_less():
    units = ([0.3, 0.5], [0.3, 0.6], [0.3, 0.6, 0.1])
    few, larger, more = (bound(unit, 0.1, 4, 1e-5, tolerance=1e-2) for unit in units)
    assert few < larger < more


@pytest.mark.slow
def test_summaries_cost_a_little_more(monkeypatch):
    rng = np.random.default_rng(4)
    shifts = rng.uniform(0.2, 0.8, (30, 2))
    exact = bound(shifts, 0.05, 10, 1e-5)
    monkeypatch.setattr(unit_losses, "_MOST_LAWS", 10)
    assert exact < bound(shifts, 0.05, 10, 1e-5) < 1.3 * exact
    monkeypatch.undo()
    monkeypatch.setattr(mixture_law, "_MOST_SUMS", 32)
    many = np.linspace(0.1, 0.4, 9)
    coarse = bound(many, 0.05, 30, 1.1e-5)  # another delta: laws are kept
    monkeypatch.undo()
    assert bound(many, 0.05, 30, 1.1e-5 * (1 + 1e-9)) < coarse * (1 + 1e-9)
    assert coarse < 1.05 * bound(many, 0.05, 30, 1.1e-5 * (1 + 1e-9))


def test_what_is_free_and_what_has_almost_no_noise():
    assert bound([0.0, 0.0], 0.1, 10, 1e-5) == 0.0
    assert bound([1e-9], 0.01, 1, 1e-5) <= 1e-8
    assert bound([40.0, 40.0], 0.5, 10, 1e-5) == LIMIT
    many = np.full(1000, 1e-3)  # of which no fewer than some are ever sampled
    assert bound(many, 0.8, 10, 1e-5) == LIMIT
    assert bound(many, 0.1, 10, 1e-5) < 10


def test_finer_grids_are_tried_until_one_has_beaten_the_chernoff_bound(monkeypatch):
    one = np.ones(1)
    run = Participations(0.5 * one, one, 1e-3 * one, np.array([[1e4]]))
    truth = pld_epsilon(run, delta=1e-6, rdp_upper=np.full(1, np.inf)).epsilon_lower[0]
    found = {}
    for points in ((1 << 10,), (1 << 10, 1 << 14)):
        monkeypatch.setattr(unit_losses, "_POINTS", points)
        found[len(points)] = bound([0.5], 1e-3, 1e4, 1e-6)
    assert found[1] > truth * 1.03
    assert truth * (1 - 1e-9) <= found[2] <= truth * 1.01
