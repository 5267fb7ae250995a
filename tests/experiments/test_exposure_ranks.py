import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from audits.exposure.ranks import Exposures, exact_rank, extrapolated_exposure
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.data())
def test_a_rank_counts_all_that_are_as_likely(values, data):
    """Slow reference: sort, and take the last place among equals."""
    secret = data.draw(st.integers(0, len(values) - 1))
    last = max(k for k, value in enumerate(sorted(values)) if value == values[secret])
    assert exact_rank(values, secret) == last + 1


def test_secrets_that_no_model_saw_have_chance_exposure():
    rng = np.random.default_rng(0)
    ranks = [exact_rank(rng.normal(size=500), rng.integers(500)) for _ in range(4000)]
    found = Exposures.from_ranks(np.arange(4000), np.zeros(4000), ranks, 500)
    expected = np.mean([math.log2(500 / rank) for rank in range(1, 501)])
    assert abs(found.exposure.mean() - expected) < 5 * found.exposure.std() / 4000**0.5
    assert stats.chisquare(np.bincount(np.array(ranks) - 1, minlength=500)).pvalue > 1e-4


def test_samples_give_the_exposure_that_all_candidates_give():
    rng = np.random.default_rng(1)
    values = rng.normal(10, 1, size=(50, 20_000))
    exact = [math.log2(20_000 / exact_rank(row, 0)) for row in values]
    drawn = np.stack([rng.choice(row, 2000) for row in values])
    found = Exposures.from_samples(np.arange(50), np.ones(50), values[:, 0], drawn, 20_000)
    common = ~found.extrapolated & (np.array(exact) < 6)
    assert common.sum() > 30
    np.testing.assert_allclose(found.exposure[common], np.array(exact)[common], atol=1.2)


@pytest.mark.parametrize(("skew", "distance"), [(4.0, 0.6), (-3.0, 6.0)])
def test_extrapolation_recovers_the_tail_of_a_skew_normal_law(skew, distance):
    """The tail of the true law by summing its density on a grid."""
    law = stats.skewnorm(skew, loc=20, scale=2)
    samples = law.rvs(5000, random_state=2)
    secret = 20 - 2 * distance
    grid = np.linspace(secret - 20, secret, 400_001)
    truth = -math.log2(np.trapezoid(law.pdf(grid), grid))
    assert truth > 8
    assert extrapolated_exposure(secret, samples) == pytest.approx(truth, rel=0.15)


def test_a_secret_above_all_samples_is_extrapolated_but_proves_only_their_number():
    samples = np.random.default_rng(3).normal(50, 2, size=(1, 999))
    found = Exposures.from_samples(["a"], [4], [30.0], samples, 10**9)
    assert found.extrapolated.tolist() == [True]
    assert found.share[0] == 1 / 1000
    assert math.log2(1000) < found.exposure[0] <= math.log2(10**9)


def test_files_are_read_back_and_are_scores(tmp_path):
    found = Exposures.from_ranks(["anna", "ben", "eve"], [16, 1, 0], [1, 300, 900], 1000)
    found.to_parquet(tmp_path / "secrets.parquet")
    again = Exposures.from_parquet(tmp_path / "secrets.parquet")
    np.testing.assert_equal(vars(again), vars(found))
    scores = AttackScores.from_file(tmp_path / "secrets.parquet")
    assert scores.member.tolist() == [True, True, False]
    np.testing.assert_array_equal(scores.scores, found.to_scores().scores)
    assert scores.groups.tolist() == found.to_scores().groups.tolist()
    assert scores.example_ids.tolist() == ["anna", "ben", "eve"]


@pytest.mark.parametrize(
    ("ids", "rows", "ranks", "message"),
    [
        (["a", "b"], [1, 1], [0, 3], "shares"),
        (["a", "b"], [1, 1], [3, 11], "shares"),
        (["a", "a"], [1, 1], [3, 4], "twice"),
        (["a", "b"], [1], [3, 4], "lengths"),
        ([], [], [], "at least one"),
    ],
)
def test_ranks_that_cannot_be_are_refused(ids, rows, ranks, message):
    with pytest.raises(InputError, match=message):
        Exposures.from_ranks(ids, rows, ranks, 10)


def test_nan_and_too_few_samples_are_refused():
    with pytest.raises(InputError, match="NaN"):
        exact_rank([1.0, math.nan], 0)
    with pytest.raises(InputError, match="at least 100"):
        Exposures.from_samples(["a"], [1], [1.0], np.ones((1, 99)), 1000)
    with pytest.raises(InputError, match="finite"):
        Exposures.from_samples(["a"], [1], [math.inf], np.ones((1, 200)), 1000)
