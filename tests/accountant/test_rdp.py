import itertools

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis import rdp as opacus_rdp

import oracles
from indpriv.accountant.method import Method
from indpriv.accountant.rdp import (
    FLOAT_SLACK,
    compute_rdp,
    epsilon_offsets,
    renyi_divergences,
)
from indpriv.accountant.steps import StepKinds
from indpriv.errors import InputError
from indpriv.norm_log.fields import ACCOUNT_WORDS

MOST = 2e-3  # by which an epsilon may be above that of the best of all orders
DENSE = 1 + np.geomspace(1e-4, 1e5, 100_000)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
OPACUS_ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))


def opacus(sample_rate, noise_multiplier, norm, orders):
    """Opacus's values; NaN where it fails or overflows."""
    values = []
    for order in orders:
        try:
            values.append(opacus_rdp._compute_rdp(sample_rate, noise_multiplier / norm, order))
        except (ValueError, OverflowError):
            values.append(np.nan)
    return np.array(values)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_equals_opacus_wherever_it_is_finite():
    orders = [1.1, 1.5, 2, 2.5, 3, 5, 8, 10.9, 16, 32, 63, 256]
    compared = 0
    for norm, rate, noise in itertools.product(
        [0.01, 0.1, 0.5, 1.0],
        [1e-5, 1e-3, 0.05, 0.082, 0.5, 0.99, 1.0],
        [0.3, 0.5, 1.0, 3.0, 6.0, 50.0],
    ):
        ours = compute_rdp(
            sample_rate=rate, noise_multiplier=noise, relative_norms=[norm], orders=orders
        )[0]
        theirs = opacus(rate, noise, norm, orders)
        finite = np.isfinite(theirs)
        compared += finite.sum()
        np.testing.assert_allclose(ours[finite], theirs[finite], rtol=1e-12, atol=1e-9)
    assert compared > 1800


def test_equals_opacus_on_all_its_orders():
    norms = np.array([0.05, 0.37, 1.0])
    ours = compute_rdp(
        sample_rate=4096 / 50000, noise_multiplier=3.0, relative_norms=norms, orders=OPACUS_ORDERS
    )
    theirs = [opacus(4096 / 50000, 3.0, norm, OPACUS_ORDERS) for norm in norms]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-12)


@pytest.mark.parametrize(
    ("rate", "noise", "norm", "order"),
    [
        (1e-5, 50.0, 0.01, 2.0),  # 1e-18: the leading 1 of the integral would swallow it
        (1e-5, 50.0, 0.01, 1.0001),
        (1e-8, 0.3, 1.0, 3.0),  # the second-order term and the far peak are of one size
        (1e-3, 0.5, 1.0, 4.7),  # the cliff
        (1e-3, 0.5, 1.0, 1.5),
        (0.082, 3.0, 1.0, 1.0001),
        (0.082, 3.0, 0.37, 3.3),
        (0.082, 3.0, 0.01, 1e4),
        (0.5, 0.3, 1.0, 1.7),
        (0.999999, 1.0, 0.5, 10.0),
        (1e-6, 1.0, 1e-3, 1e4),
        (0.01, 6.0, 0.3, 300.5),
        (0.999, 1e4, 0.02, 1e6),  # far from 1 in the order, near 1 in the density ratio
        (0.3, 1e3, 0.1, 1e5),
    ],
)
def test_equals_forty_digit_quadrature(rate, noise, norm, order):
    ours = compute_rdp(
        sample_rate=rate, noise_multiplier=noise, relative_norms=[norm], orders=[order]
    )[0, 0]
    truth = oracles.rdp_of_one_step(norm, noise, rate, order)
    assert abs(ours / truth - 1) < FLOAT_SLACK


@pytest.mark.parametrize(
    ("rate", "noise", "norm", "order"),
    [
        (0.01, 1.0, 1.0, 200),
        (0.01, 3.0, 0.5, 10_000),
        (1e-4, 0.1, 1.0, 300),
        (0.9, 0.01, 1.0, 64),
        (1e-9, 0.4, 1.0, 12),
    ],
)
def test_equals_the_binomial_sum_at_whole_orders(rate, noise, norm, order):
    with mpmath.workdps(60):
        q, variance = mpmath.mpf(rate), mpmath.mpf(noise) ** 2 / mpmath.mpf(norm) ** 2
        moment = mpmath.fsum(
            mpmath.binomial(order, k)
            * q**k
            * (1 - q) ** (order - k)
            * mpmath.exp(mpmath.mpf(k * k - k) / (2 * variance))
            for k in range(order + 1)
        )
        truth = float(mpmath.log(moment) / (order - 1))
    ours = compute_rdp(
        sample_rate=rate, noise_multiplier=noise, relative_norms=[norm], orders=[order]
    )[0, 0]
    assert abs(ours / truth - 1) < FLOAT_SLACK


def test_closed_forms():
    norms, orders = np.array([0.0, 0.3, 1.0]), np.array([1.5, 64.0, 1e6])
    full = compute_rdp(sample_rate=1.0, noise_multiplier=0.7, relative_norms=norms, orders=orders)
    np.testing.assert_allclose(full, 0.5 * (norms[:, None] / 0.7) ** 2 * orders, rtol=1e-14)
    assert not compute_rdp(
        sample_rate=0.3, noise_multiplier=0.7, relative_norms=[0.0], orders=orders
    ).any()


@pytest.mark.parametrize("noise", [1e-3, 0.05, 0.3, 1.0, 20.0, 1e4, 1e9])
@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.3, 1 - 1e-12])
def test_extreme_settings_are_finite_monotone_and_below_the_full_batch(rate, noise):
    norms = np.array([0.0, 1e-6, 0.02, 0.5, 1.0])
    orders = np.array([1.01, 1.9, 2, 3, 17.3, 1e3, 1e4, 1e6])
    rdp = compute_rdp(sample_rate=rate, noise_multiplier=noise, relative_norms=norms, orders=orders)
    full = 0.5 * (norms[:, None] / noise) ** 2 * orders
    assert np.all(np.isfinite(rdp))
    assert np.all(np.diff(rdp, axis=0) >= -FLOAT_SLACK * rdp[1:])
    assert np.all(np.diff(rdp, axis=1) >= -FLOAT_SLACK * rdp[:, 1:])
    assert np.all(rdp <= full * (1 + FLOAT_SLACK))
    assert np.all(rdp[1:] > 0)


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(1e-6, 1.0),
    noise=st.floats(0.3, 20.0),
    order=st.floats(1.001, 300.0),
    shifts=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
)
def test_log_moment_is_convex_in_the_squared_shift(rate, noise, order, shifts):
    """What sharing a step between two nodes rests on."""
    low, middle, high = np.sort(shifts) / noise
    values = renyi_divergences(np.array([low, middle, high]), np.full(3, rate), np.array([order]))[
        :, 0
    ]
    width = high**2 - low**2
    share = (middle**2 - low**2) / width if width > 0 else 0.0
    chord = (1 - share) * values[0] + share * values[2]
    assert values[1] <= chord + 1e-9 * values[2]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"orders": [1.0]}, "orders"),
        ({"orders": [np.inf]}, "orders"),
        ({"orders": []}, "orders"),
        ({"relative_norms": [1.1]}, "relative_norms"),
        ({"relative_norms": [np.nan]}, "relative_norms"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": np.nan}, "noise_multiplier"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"sample_rate": 0.0}, "sample_rate"),
    ],
)
def test_bad_input(change, match):
    good = {"sample_rate": 0.1, "noise_multiplier": 1.0, "relative_norms": [0.5], "orders": [2.0]}
    with pytest.raises(InputError, match=match):
        compute_rdp(**{**good, **change})


def runs_to_order(n, seed):
    """Random runs of two kinds: cliffs of rare sampling, full batches, one step and many."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        sigma = 10 ** rng.uniform(-0.5, 1.2) * np.array([1.0, rng.uniform(1, 2)])
        rate = np.where(rng.random() < 0.1, 1.0, 10 ** rng.uniform(-6, -0.3, 2))
        norms, steps = 10 ** rng.uniform(-1.5, 0, 2), np.round(10 ** rng.uniform(0, 5, 2))
        yield StepKinds(norms / sigma, rate), steps, 10 ** rng.uniform(-10, -3)


def best_of_dense(divergence, epsilon, delta, conversion):
    """The least bound of all dense orders that can be below epsilon.

    Divergences are at least 0 and grow with the order: an order whose offset is above epsilon is
    not tried, nor one beyond an order whose divergence is well above it. No offset is below -0.05.
    """
    able = DENSE[epsilon_offsets(DENSE, delta, conversion) < epsilon]
    part = itertools.takewhile(
        lambda orders: divergence(orders[:1])[0] < epsilon + 0.05, np.array_split(able, 200)
    )
    bounds = [divergence(own) + epsilon_offsets(own, delta, conversion) for own in part]
    return max(min((own.min() for own in bounds), default=np.inf), 0.0)


@pytest.mark.parametrize("conversion", ACCOUNT_WORDS["conversion"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_of_a_hundred_thousand_is_much_better(conversion, seed):
    for kinds, steps, delta in runs_to_order(5, seed):
        method = Method(delta=delta, conversion=conversion)
        found = kinds.accountant(method).epsilons(steps[None])

        def divergence(orders, law=kinds, steps=steps):
            return steps @ renyi_divergences(law.shift, law.rate, orders)

        offset = epsilon_offsets(found["best_order"], delta, conversion)
        allowed = max((divergence(found["best_order"]) + offset)[0], 0.0)
        assert found["epsilon"][0] == pytest.approx(allowed, rel=1e-9, abs=1e-12)
        best = best_of_dense(divergence, found["epsilon"][0], delta, conversion)
        assert found["epsilon"][0] <= best * (1 + MOST), (kinds, steps, delta)


@pytest.mark.parametrize("seed", SEEDS)
def test_nor_for_units_of_several_rows_which_start_from_small_orders(seed):
    rng = np.random.default_rng(seed)
    for kinds, steps, delta in runs_to_order(3, 100 + seed):
        k = rng.integers(2, 30, 2)
        cells = StepKinds(kinds.shift, np.minimum(kinds.rate, 0.5), k)
        found = cells.accountant(Method(delta=delta)).epsilons(steps[None])

        def divergence(orders, cells=cells, steps=steps):
            each = np.repeat([0, 1], len(orders))
            one = cells.divergences_at(each, np.tile(orders, 2)).reshape(2, -1)
            return steps @ one

        offset = epsilon_offsets(found["best_order"], delta, "canonne2020")
        allowed = max((divergence(found["best_order"]) + offset)[0], 0.0)
        assert found["epsilon"][0] == pytest.approx(allowed, rel=1e-9, abs=1e-12)
        best = best_of_dense(divergence, found["epsilon"][0], delta, "canonne2020")
        assert found["epsilon"][0] <= best * (1 + MOST), (cells, steps, delta)
