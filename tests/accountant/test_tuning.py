"""The price of publishing the best of several runs; dp_accounting is an independent peer."""

import math

import numpy as np
import pytest

from indpriv import InputError
from indpriv.accountant import Tuning
from indpriv.accountant.rdp import epsilon_offsets

dp = pytest.importorskip("dp_accounting")
ORDERS = 1 + np.geomspace(1.1e-2, 1e3, 120)  # the peer leaves out those below 1.01 for Poisson


def peer(noise, steps, rate, tuning, delta):
    accountant = dp.rdp.RdpAccountant(ORDERS)
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
    run = dp.SelfComposedDpEvent(step, steps)
    accountant.compose(dp.dp_event.RepeatAndSelectDpEvent(run, tuning.mean, tuning.shape))
    one = dp.rdp.RdpAccountant(ORDERS)
    one.compose(run)
    return accountant.get_epsilon(delta), np.asarray(one._rdp)


@pytest.mark.parametrize("settings", [10, pytest.param(250, marks=pytest.mark.slow)])
def test_prices_are_those_of_dp_accounting(settings):
    rng = np.random.default_rng(settings)
    shapes = [0.0, 1.0, math.inf, 0.5, 3.0]
    for number in range(settings):
        tuning = Tuning(float(rng.choice([1, 1.5, 2, 10, 300])), shapes[number % len(shapes)])
        noise = float(rng.choice([0.3, 50.0, rng.uniform(0.5, 20)], p=[0.1, 0.1, 0.8]))
        steps = int(rng.choice([1, rng.integers(1, 500)], p=[0.1, 0.9]))
        rate, delta = float(rng.choice([1.0, 0.1, 0.01])), float(10 ** rng.uniform(-9, -2))
        theirs, curve = peer(noise, steps, rate, tuning, delta)
        if not np.isfinite(curve).all():
            continue
        offsets = epsilon_offsets(ORDERS, delta, "canonne2020")
        ours = max(0.0, float((tuning.rdp(ORDERS, curve) + offsets).min()))
        # it bisects for gamma, and ends a little below the root, which adds to its log
        assert ours >= theirs * (1 - 1e-6) - 1e-8
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("shape", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("mean", [1.001, 2.0, 50.0])
def test_the_law_has_its_mean(shape, mean):
    gamma = Tuning(mean, shape)._gamma()
    k = np.arange(1, 200_000)
    if shape == 0:
        weights = (1 - gamma) ** k / k
    else:
        ratios = (k - 1 + shape) / k * (1 - gamma)
        weights = np.exp(np.cumsum(np.log(ratios)))
    assert float(weights @ k / weights.sum()) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("shape", [0.0, 1.0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("mean", [1.0, 1 + 1e-7])
def test_a_mean_of_hardly_more_than_one_run_costs_hardly_more(mean, shape):
    """Found for each shape that is allowed: for large ones this was a ValueError of scipy."""
    curve = ORDERS / 50
    assert Tuning(mean, shape).rdp(ORDERS, curve) == pytest.approx(
        curve + math.log(mean) / (ORDERS - 1) + (1 + shape) * np.min((1 - 1 / ORDERS) * curve),
        rel=0.1,
    )


def test_bad_laws_are_refused():
    odd = (0.5, 1), (math.nan, 1), (2, -1), (2, math.nan), (math.inf, 1), (1e300, 1), (2, 1e300)
    odd += ("2", 1), (2, "1")  # texts were a TypeError
    for mean, shape in odd:
        with pytest.raises(InputError):
            Tuning(mean, shape)
    assert [Tuning(2, shape).law for shape in (0, 1, math.inf)] == [
        "logarithmic",
        "geometric",
        "Poisson",
    ]
    assert "shape 0.5" in Tuning(2, 0.5).law
