"""How many records a group needs, on figures that follow a known power law."""

import math
from dataclasses import replace

import numpy as np
import pytest

from audits.advice.records import (
    BEYOND,
    FOUND,
    RISES,
    UNKNOWN,
    SubsetReading,
    records_needed,
)
from indpriv.analysis.lint import Plan

N, SHARES = 8000, (0.25, 0.5, 1.0)


def unused(factor):
    raise AssertionError("no group is at the worst case in every run")


def readings(law, *, noise=0.0, seeds=2, rng=None, n=lambda n_all: n_all // 10):
    return [
        SubsetReading(
            share,
            seed,
            round(share * N),
            n(round(share * N)),
            law(share) * (np.exp(noise * rng.normal()) if noise else 1.0),
        )
        for share in SHARES
        for seed in range(seeds)
    ]


def test_a_power_law_is_followed_to_the_target():
    found = records_needed(readings(lambda share: 2.0 * share**-0.5), N, 1.0, unused)
    assert (found.status, found.exponent) == (FOUND, pytest.approx(-0.5))
    assert found.largest_error == pytest.approx(0.0, abs=1e-12)
    for factor in (found.factor, found.factor_low, found.factor_high):
        assert 4.0 <= factor * (1 + 1e-9) <= 4.0 * 1.01 * (1 + 1e-9)  # 2 / sqrt(4) = 1


def test_the_interval_contains_the_number_that_is_true():
    rng, covered, longer = np.random.default_rng(0), 0, 0
    for _ in range(400):
        noisy = readings(lambda share: 1.5 * share**-0.6, noise=0.03, rng=rng)
        found = records_needed(noisy, N, 1.0, unused)
        truth = 1.5 ** (1 / 0.6)
        high = np.inf if found.factor_high is None else found.factor_high
        covered += found.factor_low <= truth * 1.01 and truth <= high
        longer += high > found.factor > found.factor_low
    assert covered >= 0.95 * 400  # of one more run, so wider than that of the line
    assert longer > 390


@pytest.mark.parametrize(
    ("law", "target", "status"),
    [
        (lambda share: 2.0 * share**-0.1, 1.0, BEYOND),
        (lambda share: 2.0 * share**0.2, 1.0, RISES),
        (lambda share: 0.5 * share**0.2, 1.0, FOUND),  # and is below the target already
    ],
)
def test_where_no_number_follows(law, target, status):
    found = records_needed(readings(law), N, target, unused)
    assert found.status == status
    assert found.factor == (1.0 if status == FOUND else None)


def test_a_group_that_small_subsets_lack():
    def law(share):
        return 2.0 * share**-0.5

    part = records_needed(readings(law, n=lambda n_all: 12 if n_all == N else 5), N, 1.0, unused)
    assert (part.status, part.factor, part.exponent) == (UNKNOWN, None, None)
    assert len(part.readings) == 6
    absent = [SubsetReading(0.1, seed, 800, 0, None) for seed in (0, 1)]
    found = records_needed([*absent, *readings(law)], N, 1.0, unused)
    assert (found.status, found.exponent) == (FOUND, pytest.approx(-0.5))


def worst_case(n_all):
    """Of one example, 20 epochs with batches of 256 and noise 0.8: no power of n."""
    batches = math.ceil(n_all / 256)
    return Plan(0.8, 1 / batches, 20 * batches).epsilon(1e-5)


def test_a_group_at_the_worst_case_in_every_run_follows_the_worst_case_and_no_line():
    n, shares = 32_561, (0.25, 0.5, 1.0)
    sizes = [math.ceil(share * n) for share in shares]
    found = [
        SubsetReading(share, seed, n_all, 100, worst_case(n_all), at_worst_case=True)
        for share, n_all in zip(shares, sizes, strict=True)
        for seed in range(2)
    ]

    def at_factor(factor):
        return worst_case(math.ceil(factor * n))

    target = 0.4 * worst_case(n)
    needed = records_needed(found, n, target, at_factor)
    assert at_factor(needed.factor) <= target
    assert at_factor(needed.factor / 1.01) > target
    assert needed.factor == needed.factor_low == needed.factor_high
    assert (needed.status, needed.exponent, needed.largest_error) == (FOUND, None, None)
    # A line through the same figures promises the target for a fifth fewer, and is sure of it
    line = records_needed([replace(one, at_worst_case=False) for one in found], n, target, unused)
    assert line.factor_high < 0.85 * needed.factor
    assert records_needed(found, n, 0.01, at_factor).status == BEYOND
    # Where one run is below its worst case, the group has a line again
    below = [replace(one, at_worst_case=one.share < 1) for one in found]
    assert records_needed(below, n, target, unused).exponent is not None
