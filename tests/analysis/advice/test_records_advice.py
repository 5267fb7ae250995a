"""How many records a group needs, on figures that follow a known power law."""

import numpy as np
import pytest

from indpriv.analysis.advice.records_advice import (
    BEYOND,
    FOUND,
    RISES,
    UNKNOWN,
    SubsetReading,
    records_needed,
)

N, SHARES = 8000, (0.25, 0.5, 1.0)


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
    found = records_needed(readings(lambda share: 2.0 * share**-0.5), N, target=1.0)
    assert (found.status, found.exponent) == (FOUND, pytest.approx(-0.5))
    assert found.largest_error == pytest.approx(0.0, abs=1e-12)
    for factor in (found.factor, found.factor_low, found.factor_high):
        assert 4.0 <= factor * (1 + 1e-9) <= 4.0 * 1.01 * (1 + 1e-9)  # 2 / sqrt(4) = 1


def test_the_interval_contains_the_number_that_is_true():
    rng, covered, longer = np.random.default_rng(0), 0, 0
    for _ in range(400):
        noisy = readings(lambda share: 1.5 * share**-0.6, noise=0.03, rng=rng)
        found = records_needed(noisy, N, target=1.0)
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
    found = records_needed(readings(law), N, target)
    assert found.status == status
    assert found.factor == (1.0 if status == FOUND else None)


def test_a_group_that_small_subsets_lack():
    def law(share):
        return 2.0 * share**-0.5

    part = records_needed(readings(law, n=lambda n_all: 12 if n_all == N else 5), N, 1.0)
    assert (part.status, part.factor, part.exponent) == (UNKNOWN, None, None)
    assert len(part.readings) == 6
    absent = [SubsetReading(0.1, seed, 800, 0, None) for seed in (0, 1)]
    found = records_needed([*absent, *readings(law)], N, 1.0)
    assert (found.status, found.exponent) == (FOUND, pytest.approx(-0.5))
