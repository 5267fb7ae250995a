"""Fixed-size batches under replace-one, compared with dp_accounting's bound of the same theorem."""

from dataclasses import replace
from itertools import combinations, product

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_sample_wor_gaussian
from scipy import stats

from indpriv import InputError, NormLog, account
from indpriv.accountant.method import Method
from indpriv.accountant.pairs import fixed_size_divergences, tight_worst_case
from indpriv.accountant.steps import StepKinds

DELTA = 1e-5
ORDERS = np.array([1.5, 2.0, 2.7, 3.0, 5.0, 8.5, 16.0, 40.0, 100.0])


def divergences(shift, rate, orders):
    kinds = StepKinds(np.array([shift]), np.array([rate]))
    return fixed_size_divergences(kinds, np.zeros(len(orders), np.int64), orders)


def by_definition(means, rate, order):
    """The divergence of two mixtures, of N(0, 1) and N(mean, 1) at this rate, in 30 digits."""
    with mpmath.workdps(30):
        q, a = mpmath.mpf(float(rate)), mpmath.mpf(float(order))
        g, h = map(mpmath.mpf, map(float, means))

        def integrand(z):
            first, second = (1 - q + q * mpmath.exp(m * z - m * m / 2) for m in (g, h))
            return mpmath.npdf(z) * first**a * second ** (1 - a)

        ends = sorted([-float(abs(a * g) + abs(a * h)) - 14, float(abs(a * g) + abs(a * h)) + 14])
        total = mpmath.quad(integrand, np.linspace(*ends, 2 + int(ends[1] / 2)).tolist())
        return float(mpmath.log(total) / (a - 1))


@pytest.mark.parametrize(
    "order", [1.3, *(pytest.param(k, marks=pytest.mark.slow) for k in (2.0, 3.7, 9.0))]
)
@pytest.mark.parametrize("shift", [0.1, 0.7, 2.5])
def test_no_pair_of_gradients_costs_more(shift, order):
    """Those of which neither, nor their difference, is longer than `shift`."""
    for rate in (0.01, 0.3, 0.9):
        found = divergences(shift, rate, np.array([order]))[0]
        pairs = (shift, 0), (0, shift), (shift / 2, -shift / 2), (shift, shift / 3), (-shift, 0)
        worst = max(by_definition(pair, rate, order) for pair in pairs)
        assert worst <= found * (1 + 1e-12)
        sampled = np.exp((order - 1) * by_definition((shift, 0), rate, order))
        bound = min(np.log(2 * sampled - 1) / (order - 1), order * shift**2 / 2)
        assert found == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_divergences_are_at_most_those_of_dp_accounting(seed):
    """Theirs are by Wang, Balle and Kasiviswanathan 2019, Theorem 27."""
    rng = np.random.default_rng(seed)
    sigma, rate = float(rng.choice([0.3, 0.8, 3.0, 50.0])), float(rng.choice([1, 0.3, 0.01]))
    # At this noise, beyond order 40, the differences of dp_accounting cancel.
    orders = np.sort(1 + rng.uniform(0, 30 if sigma == 50 else 200, 6))
    theirs = _compute_rdp_sample_wor_gaussian(rate, sigma / 2, orders)
    assert np.all(divergences(2 / sigma, rate, orders) <= theirs * (1 + 1e-8))


def log_of(norms=((0.1, 0.5, 2.0),), total_steps=1, sample_rate=0.1, **changes):
    arguments = {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "sampler": "fixed_size", **changes}
    return NormLog.from_arrays(
        np.array(norms), [0], total_steps=total_steps, sample_rate=sample_rate, **arguments
    )


@pytest.mark.parametrize(("sigma", "steps"), [(2.0, 100), (0.3, 1), (50.0, 1)])
def test_everyone_has_the_worst_case_and_it_is_at_most_that_of_dp_accounting(sigma, steps):
    log = log_of(total_steps=steps, noise_multiplier=sigma)
    table = account(log, delta=DELTA, neighbouring="replace_one", orders=ORDERS)
    theirs = RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        1000, 100, dp_accounting.GaussianDpEvent(sigma / 2)
    )
    theirs.compose(event, steps)
    tight = account(log, delta=DELTA, neighbouring="replace_one", accountant="pld")
    assert tight.worst_case_epsilon <= table.worst_case_epsilon
    assert table.worst_case_epsilon <= theirs.get_epsilon(DELTA) * (1 + 1e-8)
    assert np.all(table.epsilon == table.worst_case_epsilon)
    assert table.claim == "exact"
    assert "Every example has the worst case" in table.claim_reason
    assert "clipped" not in table.account.why_at_worst_case
    assert table.account.describe().startswith("delta 1e-5, replace one example, fixed-size")


@pytest.mark.slow
def test_people_of_one_row_are_named_by_their_ids():
    """Before, such a table had the ids of their rows, as if rows were protected."""
    people = log_of(unit="user", unit_ids=["a", "b", "c"])
    table = account(people, delta=DELTA, neighbouring="replace_one")
    rows = account(log_of(), delta=DELTA, neighbouring="replace_one")
    assert table.to_frame()["unit_id"].tolist() == ["a", "b", "c"]
    assert np.array_equal(table.epsilon, rows.epsilon)


@pytest.mark.slow
def test_the_tight_worst_case_is_slightly_above_that_of_removal_at_twice_the_sensitivity():
    log = log_of(total_steps=20)
    table = account(log, delta=DELTA, neighbouring="replace_one", accountant="pld")
    theirs = PLDAccountant()
    pair = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    theirs.compose(pair, 20)
    assert 1.0 < table.worst_case_epsilon / theirs.get_epsilon(DELTA) < 1.1
    bound = account(log, delta=DELTA, neighbouring="replace_one").worst_case_epsilon
    assert np.all(table.epsilon == table.worst_case_epsilon)
    assert table.worst_case_epsilon < bound


@pytest.mark.parametrize("seed", range(4))
def test_no_batches_of_one_size_leak_more_than_the_tight_worst_case(seed):
    """One step of the mechanism itself, with gradients of length 1 that may point either way."""
    rng = np.random.default_rng(seed)
    n, size = (int(rng.integers(3, 6)), 2) if seed else (3, 3)
    sigma, delta = float(rng.choice([0.5, 1.0, 3.0])), 1e-3
    z = np.arange(-size - 12 * sigma, size + 12 * sigma, sigma / 400)
    log = log_of(noise_multiplier=sigma, sample_rate=size / n)
    log = replace(log, neighbouring="replace_one")
    bound = tight_worst_case(log, Method(delta=delta), np.inf)
    leaked = []
    for own, replacement, *others in product((-1.0, 1.0), repeat=n + 1):
        first, second = (
            np.mean([stats.norm.pdf(z, sum(batch), sigma) for batch in combinations(data, size)], 0)
            for data in ((own, *others), (replacement, *others))
        )
        leaked.append(np.maximum(first - np.exp(bound) * second, 0).sum() * sigma / 400)
    assert 0.1 * delta < max(leaked) <= delta * (1 + 1e-4)


def test_all_examples_in_every_batch_is_the_gaussian_mechanism():
    assert divergences(1.0, 1.0, ORDERS) == pytest.approx(ORDERS / 2)


@pytest.mark.slow
def test_settings_may_change():
    changing = log_of(total_steps=2, noise_multiplier=[1.0, 3.0], sample_rate=[0.1, 0.2])
    found = account(changing, delta=DELTA, neighbouring="replace_one").worst_case_epsilon
    parts = [
        account(log_of(total_steps=2, noise_multiplier=sigma, sample_rate=rate), delta=DELTA,
                neighbouring="replace_one").worst_case_epsilon
        for sigma, rate in ((3.0, 0.1), (1.0, 0.2))
    ]  # fmt: skip
    assert parts[0] < found < parts[1]


def test_several_rows_of_a_person_and_add_or_remove_are_refused():
    people = log_of(unit="user", unit_ids=["a", "a", "b"])
    with pytest.raises(InputError, match="several rows of one user"):
        account(people, delta=DELTA, neighbouring="replace_one")
    assert account(log_of(), delta=DELTA).claim == "estimate"  # nothing is proven for it
