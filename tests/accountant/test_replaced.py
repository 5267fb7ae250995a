"""Replaced examples with secret Poisson sampling, compared with quadrature and with dp_accounting."""

from dataclasses import replace

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from indpriv import InputError, NormLog, account
from indpriv.accountant.pairs import replaced_divergences
from indpriv.norm_log.norm_log import Filtered

DELTA = 1e-5


def by_definition(own, other, rate, order):
    """One divergence in 30 digits, split at the peaks of the integrand; the tangent has mean 0."""
    with mpmath.workdps(30):
        a, b, q, order = map(mpmath.mpf, map(float, (own, other, rate, order)))

        def integrand(z):
            x, y = mpmath.exp(a * z - a * a / 2), mpmath.exp(-b * z - b * b / 2)
            tangent = 1 + order * q * (x - 1) + (1 - order) * q * (y - 1)
            moment = (1 - q + q * x) ** order * (1 - q + q * y) ** (1 - order)
            return mpmath.npdf(z) * (moment - tangent)

        end = float(order * (a + b)) + 14
        knots = [
            -30 - float(b),
            *np.linspace(-14 - float(b), end, 2 + int((end + 14) / 2)),
            end + 8,
        ]
        total = mpmath.quad(integrand, [mpmath.mpf(float(knot)) for knot in knots])
        return float(mpmath.log1p(total) / (order - 1))


def compare(rng, n):
    for _ in range(n):
        sigma = float(rng.choice([0.3, 0.7, 1.0, 5.0, 50.0]))
        own, other = float(rng.choice([0.0, 0.02, 0.3, 1.0])) / sigma, 1 / sigma
        rate, order = float(rng.choice([1e-3, 0.05, 0.5, 0.99])), float(rng.uniform(1.01, 20))
        if rng.random() < 0.5:
            own, other = other, own
        found = replaced_divergences(*(np.array([x]) for x in (own, other, rate, order)))[0]
        truth = by_definition(own, other, rate, order)
        assert truth <= found <= truth * (1 + 1e-7)


def test_divergences_are_those_of_the_definition_and_never_smaller():
    compare(np.random.default_rng(0), 2)


@pytest.mark.parametrize(
    ("own", "other", "rate", "order"),
    [
        (10 / 3, 10 / 3, 1e-5, 1.0001),
        (1.0, 1.0, 1e-5, 5.5),
        (0.5, 0.5, 1e-5, 17.0),
        (0.0, 40.0, 1e-6, 5.0),  # what takes the example's place is far beyond the noise
        (30.0, 36.0, 1e-7, 1.01),
    ],
)
def test_small_divergences_keep_their_precision(own, other, rate, order):
    found = replaced_divergences(*(np.array([x]) for x in (own, other, rate, order)))[0]
    truth = by_definition(own, other, rate, order)
    assert truth <= found <= truth * (1 + 1e-8)


@pytest.mark.slow
def test_divergences_of_many_settings():
    compare(np.random.default_rng(1), 220)


def test_without_sampling_the_shifts_add_up():
    own, other, rate = np.full((3, 2), [[0.5], [1.0], [1.0]])
    found = replaced_divergences(own, other, rate, np.array([2.0, 8.0]))
    assert found == pytest.approx([1.5**2, 4 * 1.5**2])


@pytest.mark.parametrize("angle", [0.0, 1.0, 2.5])
def test_other_directions_of_the_replacement_cost_less(angle):
    """The divergence in two dimensions, by a sum over a grid."""
    a, b, q, order = 1.2, 0.9, 0.3, 3.0
    grid = np.arange(-9, 16, 0.04)
    x, y = np.meshgrid(grid, grid)
    first = 1 - q + q * np.exp(a * x - a * a / 2)
    second = 1 - q + q * np.exp(b * (np.cos(angle) * x + np.sin(angle) * y) - b * b / 2)
    weight = np.exp(-(x * x + y * y) / 2) / (2 * np.pi) * 0.04**2
    moment = (weight * first**order * second ** (1 - order)).sum()
    worst = replaced_divergences(*(np.array([v]) for v in (a, b, q, order)))[0]
    assert np.log(moment) / (order - 1) <= worst


def log_of(norms, **changes):
    arguments = {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "sample_rate": 0.1, **changes}
    return NormLog.from_arrays(norms, [0], **{"total_steps": 20, **arguments})


def test_the_tight_worst_case_is_that_of_dp_accounting():
    theirs = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    theirs.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0)), 20)
    log = log_of([[0.1, 5.0]], rounding=0.1)
    bound = account(log, delta=DELTA, neighbouring="replace_one")
    tight = account(log, delta=DELTA, neighbouring="replace_one", accountant="pld")
    assert -1e-6 <= tight.worst_case_epsilon / theirs.get_epsilon(DELTA) - 1 <= 2e-4
    assert tight.worst_case_epsilon < bound.worst_case_epsilon
    assert tight.epsilon[1] == tight.worst_case_epsilon
    assert tight.epsilon[0] == pytest.approx(bound.epsilon[0])


def test_an_example_with_a_small_norm_still_pays_for_its_replacement():
    log = log_of([[0.0, 0.3, 5.0]], rounding=0.1)
    replaced = account(log, delta=DELTA, neighbouring="replace_one")
    removed = account(log, delta=DELTA)
    assert np.all(np.diff(replaced.epsilon) > 0)
    assert np.all(replaced.epsilon > removed.epsilon)
    assert replaced.epsilon[0] > 0.5 * removed.worst_case_epsilon
    assert replaced.epsilon[2] == replaced.worst_case_epsilon
    assert replaced.account.relation == "replace one example"


@pytest.mark.parametrize("rounding", [0.0, 0.01])
def test_a_setting_a_step_costs_what_its_own_steps_cost(rounding):
    """Before, a log of six examples took minutes, and each had the worst case."""
    rng, n_steps = np.random.default_rng(3), 200
    noise, rate = rng.uniform(0.8, 2, n_steps), rng.uniform(0.005, 0.02, n_steps)
    norms, orders = np.array([[0.05, 0.4, 0.77, 1.5]]), np.array([2.0, 4.0, 7.5])
    log = log_of(norms, total_steps=n_steps, noise_multiplier=noise, sample_rate=rate,
                 rounding=rounding, neighbouring="replace_one")  # fmt: skip
    found = account(log, delta=DELTA, orders=orders, conversion="mironov2017").epsilon
    for epsilon, norm in zip(found, np.minimum(norms[0], 1.0), strict=True):
        ends = [norm / noise, 1 / noise]
        steps = [
            [replaced_divergences(*pair, rate, np.full(n_steps, order)).sum() for order in orders]
            for pair in (ends, ends[::-1])
        ]
        truth = np.max(np.min(steps - np.log(DELTA) / (orders - 1), axis=1))
        assert truth * (1 - 1e-12) <= epsilon <= truth * 1.005


def test_zero_out_with_poisson_sampling_is_add_or_remove():
    log = log_of([[0.2, 5.0]])
    zeroed, removed = (account(log, delta=DELTA, neighbouring=one) for one in ("zero_out", None))
    assert np.array_equal(zeroed.epsilon, removed.epsilon)
    assert zeroed.account.relation == "zero out the contribution of one example"


def test_people_of_several_rows_are_refused():
    log = log_of([[0.2, 0.3]], unit="user", unit_ids=["a", "a"])
    with pytest.raises(InputError, match='pass participation="known"'):
        account(log, delta=DELTA, neighbouring="replace_one")


def test_the_charges_of_a_filter_are_of_add_or_remove_and_cap_nothing():
    log = log_of(np.array([[0.5, 2.0]]))
    capped = replace(
        log, filtered=Filtered(order=4.0, rdp_cap=1e-3, left_out_at=np.full(2, log.total_steps))
    )
    plain = account(log, delta=1e-5, neighbouring="replace_one")
    found = account(capped, delta=1e-5, neighbouring="replace_one")
    assert np.array_equal(found.epsilon, plain.epsilon)
    assert found.account.privacy_filter == ""


def test_a_sampler_without_proof_is_refused():
    log = replace(log_of(np.array([[0.5]])), sampler="shuffled")
    with pytest.raises(InputError, match="proven for Poisson sampling"):
        account(log, delta=1e-5, neighbouring="replace_one")
