"""Truncated Poisson batches: against the mechanism itself, enumerated, and against dp_accounting."""

from dataclasses import replace
from itertools import combinations
from math import comb

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from indpriv import InputError, NormLog, account, membership_risk
from indpriv.accountant.method import Method
from indpriv.accountant.pairs import cases_of, pair_divergences, tight_worst_case
from indpriv.accountant.runs import compose

DELTA = 1e-5
RELATIONS = ("add_remove", "zero_out", "replace_one")


def log_of(norms=((0.1, 0.5, 2.0),), total_steps=1, **changes):
    arguments = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.3,
        "sampler": "truncated_poisson",
        "max_batch_size": 2,
        "rounding": 0.1,
        **changes,
    }
    return NormLog.from_arrays(np.array(norms), [0], total_steps=total_steps, **arguments)


def sums_of_batches(gradients, rate, cap):
    """Sum of a batch -> its probability, over all samples and all ways to truncate them."""
    found = {}
    n = len(gradients)
    for size in range(n + 1):
        for drawn in combinations(range(n), size):
            kept = min(size, cap)
            weight = rate**size * (1 - rate) ** (n - size) / comb(size, kept)
            for batch in combinations(drawn, kept):
                total = sum(gradients[place] for place in batch)
                found[total] = found.get(total, 0.0) + weight
    return {total: probability for total, probability in found.items() if probability}


def divergence(first, second, order, sigma):
    """Rényi divergence of mixtures of Gaussians at these means, by a sum over a grid."""
    z = np.arange(-60, 60, 0.005) * sigma
    logs = [
        np.logaddexp.reduce([np.log(p) - (z - m) ** 2 / (2 * sigma**2) for m, p in law.items()])
        for law in (first, second)
    ]
    scale = np.log(0.005 / np.sqrt(2 * np.pi))
    return (np.logaddexp.reduce(order * logs[0] + (1 - order) * logs[1]) + scale) / (order - 1)


def bound(own, n, cap, rate, sigma, order, relation):
    rates = np.array([rate])
    log = log_of([[1.0] * n], max_batch_size=cap, sample_rate=rate)
    cases, one = cases_of(log, rates), np.array([1 / sigma])
    other = {"add_remove": None, "zero_out": 0 * one, "replace_one": one}[relation]
    directions = [(own * one, other)] + ([] if other is None else [(other, own * one)])
    found = [
        pair_divergences(cases, *pair, one, np.array([0]), np.array([order])) for pair in directions
    ]
    return float(np.max(found))


@pytest.mark.parametrize("relation", RELATIONS)
def test_no_set_of_gradients_costs_more_than_the_bound(relation):
    rng, tightest = np.random.default_rng(5), 0.0
    for _ in range(25):
        n, cap, rate = int(rng.integers(2, 6)), int(rng.integers(1, 4)), rng.uniform(0.05, 1)
        sigma, order, own = rng.uniform(0.5, 3), rng.uniform(1.1, 6), rng.uniform(0, 1)
        others = rng.choice([-1.0, 0.3, 1.0], n - 1).tolist()
        with_it = sums_of_batches([own, *others], rate, cap)
        without = {
            "add_remove": others,
            "zero_out": [0.0, *others],
            "replace_one": [-1.0, *others],
        }[relation]
        other = sums_of_batches(without, rate, cap)
        worst = bound(own, n, cap, rate, sigma, order, relation)
        for pair in ((with_it, other), (other, with_it)):
            truth = divergence(*pair, order, sigma)
            assert truth <= worst * (1 + 1e-7)
            tightest = max(tightest, truth / worst)
    assert tightest > 0.4


def test_the_bound_is_met_where_all_others_point_away():
    """A batch of one, always full: the example takes the place of its opposite."""
    truth = divergence(
        sums_of_batches([1.0, -1.0, -1.0], 1.0, 1), sums_of_batches([-1.0, -1.0], 1.0, 1), 3.0, 1.5
    )
    assert bound(1.0, 3, 1, 1.0, 1.5, 3.0, "add_remove") == pytest.approx(truth, rel=1e-7)


def theirs(n, rate, cap, sigma, steps):
    """Of dp_accounting's event, with the pair of add/remove in place of its looser one."""
    cut, width = stats.binom.sf(cap - 1, n - 1, rate), min(1e-4, 2e-4 / sigma)
    plain = pld.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=width
    )
    if cut > 0:
        then = stats.binom.sf(cap, n, rate) * cap / n / cut
        replaced = pld.from_gaussian_mechanism(
            sigma / 2, sampling_prob=then, value_discretization_interval=width
        )
        plain = replaced.compute_mixture(plain, cut)
    return plain.self_compose(steps)


def by_definition(n, rate, cap, sigma, order):
    """The divergence of one step of that mixture, by a sum over a grid."""
    cut = stats.binom.sf(cap - 1, n - 1, rate)
    then = stats.binom.sf(cap, n, rate) * cap / n / cut if cut > 0 else 0.0
    total = mpmath.mpf(0)
    for weight, q, shift in ((1 - cut, rate, 1 / sigma), (cut, then, 2 / sigma)):
        z = np.arange(-14, order * shift + 14, 0.02 / max(1, shift))
        loss = np.log1p(-q) if q < 1 else -np.inf
        log_f = np.logaddexp(loss, np.log(q) + z * shift - shift**2 / 2) if q else 0 * z
        moment = np.logaddexp.reduce(
            order * log_f - z**2 / 2 + np.log((z[1] - z[0]) / np.sqrt(2 * np.pi))
        )
        if moment < 0.1:
            rise = np.exp(order * log_f) - 1 - order * np.expm1(log_f)  # less a tangent of mean 0
            moment = np.log1p((stats.norm.pdf(z) * rise).sum() * (z[1] - z[0]))
        total += weight * mpmath.expm1(moment)
    return float(mpmath.log1p(total) / (order - 1))


def compare(rng, n_settings):
    for _ in range(n_settings):
        n, rate = int(rng.choice([20, 300, 50_000])), float(rng.choice([1e-3, 0.02, 0.3, 1.0]))
        cap = max(1, int(n * rate * rng.uniform(0.5, 1.5)))
        sigma, order = float(rng.choice([0.3, 0.8, 3.0, 50.0])), float(rng.uniform(1.1, 8))
        found = bound(1.0, n, cap, rate, sigma, order, "add_remove")
        truth = by_definition(n, rate, cap, sigma, order)
        assert truth * (1 - 1e-7) <= found <= truth * (1 + 1e-4)


def test_divergences_are_those_of_the_mixture_and_never_smaller():
    compare(np.random.default_rng(0), 10)


@pytest.mark.slow
def test_divergences_of_many_settings():
    compare(np.random.default_rng(1), 220)


def tight_worst_case_of(n, rate, cap, sigma, steps, relation="add_remove"):
    log = log_of([[2.0] * n], steps, noise_multiplier=sigma, sample_rate=rate, max_batch_size=cap)
    return tight_worst_case(replace(log, neighbouring=relation), Method(delta=DELTA), np.inf)


@pytest.mark.parametrize(
    ("n", "rate", "cap", "sigma", "steps"),
    [
        pytest.param(300, 0.05, 25, 1.0, 200, marks=pytest.mark.slow),
        (300, 1.0, 30, 3.0, 10),
        pytest.param(2000, 0.01, 40, 0.8, 1, marks=pytest.mark.slow),
    ],
)
def test_tight_worst_cases_are_those_of_dp_accounting(n, rate, cap, sigma, steps):
    found = tight_worst_case_of(n, rate, cap, sigma, steps)
    tight = theirs(n, rate, cap, sigma, steps).get_epsilon_for_delta(DELTA)
    assert -1e-6 <= found / tight - 1 <= 2e-4
    accountant = PLDAccountant()
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(n, rate, cap, sigma)
    accountant.compose(event, steps)
    assert accountant.get_epsilon(DELTA) >= tight * 0.999  # its pair for full batches is looser


def test_with_the_tight_accountant_nobody_exceeds_the_tight_worst_case():
    log = log_of([[0.1, 0.5, 2.0] * 40], 50, sample_rate=0.1, max_batch_size=14)
    tight, bound = (account(log, delta=DELTA, accountant=which) for which in ("pld", "rdp"))
    assert tight.worst_case_epsilon < bound.worst_case_epsilon
    assert np.all(tight.epsilon <= tight.worst_case_epsilon)
    assert tight.epsilon[2] == tight.worst_case_epsilon
    assert tight.account.why_at_worst_case == "no smaller bound is proven for them"
    assert bound.account.why_at_worst_case == "counted as clipped in every step"
    assert np.any(tight.epsilon < tight.worst_case_epsilon)
    assert np.all(tight.epsilon <= tight.details["rdp_epsilon"])
    np.testing.assert_array_equal(tight.details["rdp_epsilon"], bound.epsilon)


def test_a_cap_that_no_batch_reaches_costs_nothing():
    plain = account(log_of(sampler="poisson", max_batch_size=None), delta=DELTA)
    capped = account(log_of(max_batch_size=3), delta=DELTA)
    np.testing.assert_allclose(capped.epsilon, plain.epsilon, rtol=1e-6)


def test_truncation_costs_more_than_poisson_sampling_and_less_the_higher_the_cap():
    norms = [[0.0, 0.3, 5.0] * 40]
    found = [
        account(log_of(norms, 50, sample_rate=0.1, **changes), delta=DELTA)
        for changes in (
            {"max_batch_size": 12},
            {"max_batch_size": 20},
            {"max_batch_size": 119},
            {"sampler": "poisson", "max_batch_size": None},
        )
    ]
    epsilons = np.array([table.epsilon[:3] for table in found])
    assert np.all(np.diff(epsilons, axis=0) <= 1e-9)
    assert np.all(np.diff(epsilons, axis=1) > 0)
    assert epsilons[0, 0] > 0.5  # an example with no gradient still takes another's place
    assert found[0].epsilon[2] == found[0].worst_case_epsilon
    assert "at most 12 in a batch" in found[0].account.describe()
    assert found[0].account.max_batch_size == 12


def test_some_of_the_examples_cost_what_they_cost_among_all():
    log = log_of([[0.1, 0.5, 2.0] * 30], 20)
    whole = account(log, delta=DELTA).epsilon
    assert account(log.take(np.arange(3)), delta=DELTA).epsilon == pytest.approx(whole[:3])


def test_rates_that_a_lattice_rounded_up_have_cases_of_larger_probability():
    rates, norms = np.array([0.05, 0.1]), [[1.0] * 80]
    exact, rounded = (
        cases_of(log_of(norms, 2, max_batch_size=9, sample_rate=run), rates)
        for run in (rates, rates * 0.999)
    )
    for one, other in zip(exact, rounded, strict=True):
        assert np.all(other.log_probability >= one.log_probability)
        assert np.all(other.sample_rate >= one.sample_rate)


def test_truncations_that_are_rare_enough_are_paid_for_by_delta():
    norms, n, steps, cap = [[0.0, 0.4, 5.0] * 40], 120, 50, 35
    log = log_of(norms, steps, sample_rate=0.1, max_batch_size=cap)
    cut = steps * stats.binom.sf(cap - 1, n, 0.1)
    assert 1e-3 < cut / DELTA < 0.1
    poisson = replace(log, sampler="poisson", truncation=None)
    for accountant in ("rdp", "pld"):
        found = account(log, delta=DELTA, accountant=accountant)
        plain = account(poisson, delta=DELTA - cut, accountant=accountant)
        np.testing.assert_allclose(found.epsilon, plain.epsilon, rtol=1e-7)
        assert found.epsilon[0] == 0.0
        assert found.account.delta == DELTA
        assert found.account.max_batch_size == cap
    tight = theirs(n, 0.1, cap, 1.0, steps).get_epsilon_for_delta(DELTA)
    assert tight * (1 - 1e-4) <= found.worst_case_epsilon <= tight * 1.01


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda log: membership_risk(log, delta=DELTA), "truncated at max_batch_size=2"),
        (lambda log: compose([log, log], delta=DELTA), "truncated at max_batch_size=2"),
    ],
)
def test_accounts_that_assume_poisson_samples_are_refused(use, message):
    with pytest.raises(InputError, match=message):
        use(log_of())


def test_people_of_several_rows_are_refused():
    log = log_of(unit="user", unit_ids=["a", "a", "b"])
    with pytest.raises(InputError, match="truncated batches: there is no account"):
        account(log, delta=DELTA)


@pytest.mark.parametrize(
    "changes",
    [{"max_batch_size": None}, {"sampler": "poisson"}, {"max_batch_size": 0}],
)
def test_a_cap_and_its_sampler_belong_together(changes):
    with pytest.raises(InputError, match="max_batch_size"):
        log_of(**changes)
