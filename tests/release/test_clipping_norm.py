"""The private median of gradient norms: its law, its sensitivity, and what it may not depend on."""

from fractions import Fraction
from itertools import permutations
from math import factorial

import numpy as np
import pytest
from scipy import stats

from indpriv.errors import InputError, PrivacyWarning
from indpriv.release import private_median_norm
from indpriv.release.mechanisms import (
    norm_grid,
    rank_distances,
    select_quantile,
    simulate_quantile,
    to_norm_cells,
)

HALF = Fraction(1, 2)
EPSILON = 0.7
COUNTS = np.array([3, 0, 4, 1, 2])


def law(counts, epsilon):
    """Of permute-and-flip, cell by cell: candidates in random order, each is kept by a coin."""
    distances = rank_distances(counts, HALF)  # in half people; one person moves each by 1 at most
    keep = np.exp(-(distances - distances.min()) * epsilon / 2)
    found = np.zeros(len(counts))
    for order in permutations(range(len(counts))):
        left = 1.0
        for cell in order:
            found[cell] += left * keep[cell]
            left *= 1 - keep[cell]
    return found / factorial(len(counts))


def neighbours(counts):
    for cell in range(len(counts)):
        for change in (-1, 1):
            other = counts.copy()
            other[cell] += change
            if other.min() >= 0:
                yield other


def test_one_norm_more_or_less_moves_every_distance_by_half_a_rank_and_costs_epsilon():
    largest = 0.0
    for other in neighbours(COUNTS):
        moved = np.abs(rank_distances(other, HALF) - rank_distances(COUNTS, HALF))
        assert moved.max() <= 1
        largest = max(largest, np.abs(np.log(law(other, EPSILON) / law(COUNTS, EPSILON))).max())
    assert 0.5 * EPSILON < largest <= EPSILON


def test_a_replaced_norm_costs_more_than_epsilon_and_at_most_twice_as_much():
    """So replace-one accounts count the release twice."""
    largest = max(
        np.abs(np.log(law(other, EPSILON) / law(COUNTS, EPSILON))).max()
        for fewer in neighbours(COUNTS)
        for other in neighbours(fewer)
        if other.sum() == COUNTS.sum()
    )
    assert EPSILON < largest <= 2 * EPSILON


@pytest.mark.parametrize("seeded", [False, True])
def test_opendp_and_the_seeded_generator_draw_from_that_law(seeded):
    n = 4000
    if seeded:
        drawn = [simulate_quantile(COUNTS, HALF, EPSILON, seed) for seed in range(n)]
    else:
        drawn = [select_quantile(COUNTS, HALF, EPSILON) for _ in range(n)]
    found = np.bincount(drawn, minlength=len(COUNTS))
    assert stats.chisquare(found, n * law(COUNTS, EPSILON)).pvalue > 1e-6
    # The same test tells the law at twice the epsilon from this one.
    assert stats.chisquare(found, n * law(COUNTS, 2 * EPSILON)).pvalue < 1e-6


def test_the_median_of_many_norms_is_near_the_true_one():
    norms = np.random.default_rng(0).lognormal(1.0, 1.0, 30_000)
    for seed in (None, 5):
        found = private_median_norm(norms, epsilon=0.1, seed=seed)
        rank = np.abs((norms <= found).mean() - 0.5)
        # Cells are 0.5 % wide and hold 0.2 % of these norms; noise of 10 people is 0.03 % of them.
        assert rank < 0.01


def test_candidates_do_not_depend_on_the_norms():
    """A norm far beyond all others changes one count, and no candidate."""
    grid = norm_grid()
    assert (grid[0], grid[-1]) == pytest.approx((1e-4, 1e6))
    norms = np.random.default_rng(0).lognormal(0.0, 1.0, 200)
    for extreme in (0.0, 1e-9, 1e12):
        cells = [np.bincount(to_norm_cells(own, grid), minlength=len(grid))
                 for own in (norms, np.append(norms, extreme))]  # fmt: skip
        assert np.abs(cells[1] - cells[0]).sum() == 1
        assert private_median_norm(np.append(norms, extreme), epsilon=1.0) in grid
    with pytest.warns(PrivacyWarning, match="infinite"):
        assert private_median_norm(np.append(norms, np.inf), epsilon=1.0) in grid
    assert private_median_norm(np.zeros(1000), epsilon=1.0) > 0  # a norm to clip at


def test_a_seed_draws_the_same_norm_again():
    norms = np.random.default_rng(0).lognormal(0.0, 1.0, 200)
    drawn = [private_median_norm(norms, epsilon=0.01, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("norms", "epsilon", "message"),
    [
        ([], 0.1, "at least one example"),
        ([[1.0]], 0.1, r"norms has shape \(1, 1\)"),
        ([1.0, np.nan], 0.1, "NaN"),
        ([1.0, -1.0], 0.1, "negative"),
        ([1.0], 0.0, r"epsilon=0.0 is not in \(0, inf\)"),
        ([1.0], "0.1", r"epsilon='0.1' is not in \(0, inf\)"),
        ([1.0], np.inf, "epsilon=inf"),
    ],
)
def test_what_is_refused(norms, epsilon, message):
    with pytest.raises(InputError, match=message):
        private_median_norm(norms, epsilon=epsilon)
