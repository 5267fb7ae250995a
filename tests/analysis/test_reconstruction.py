"""Ceilings of identification, and what is made of the scores of leak."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri
from scipy.stats import norm

import indpriv
from indpriv.analysis.reconstruction import identification_ceiling, reconstruction_of
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from reconstructions import scores

MUS = st.lists(st.floats(0.01, 6), min_size=1, max_size=6).map(np.array)


@given(mu=MUS, chance=st.floats(1e-3, 0.9))
def test_no_split_of_chance_gives_more_than_the_ceiling(mu, chance):
    ceiling = identification_ceiling(mu, chance)
    rng = np.random.default_rng(0)
    splits = rng.dirichlet(np.ones(len(mu)), 300) * chance * len(mu)
    splits = splits[(splits < 1).all(axis=1)]
    reached = ndtr(ndtri(splits) + mu).mean(axis=1)
    assert (reached <= ceiling + 1e-9).all()
    assert chance <= ceiling + 1e-9
    assert ceiling <= 1


@given(
    candidates=st.lists(
        st.tuples(st.floats(-4, 4), st.integers(1, 5)),
        min_size=2,
        max_size=6,
        unique_by=lambda c: c[0],
    )
)
def test_not_even_the_best_attack_passes_the_ceiling(candidates):
    """It names the likeliest of candidates with copies; each is a gradient of one coordinate."""
    gradients, copies = (np.array(column) for column in zip(*candidates, strict=True))
    y = np.linspace(-13, 13, 4001)
    likelihoods = copies[:, None] * norm.pdf(y - gradients[:, None])
    share = likelihoods.max(0).sum() * (y[1] - y[0]) / copies.sum()
    mu = np.repeat(np.abs(gradients), copies)
    assert share <= identification_ceiling(mu, copies.max() / copies.sum()) + 1e-6


@given(mu=st.floats(0.01, 6), chance=st.floats(1e-3, 0.9))
def test_where_all_are_alike_the_ceiling_is_one_test(mu, chance):
    expected = ndtr(ndtri(chance) + mu)
    assert identification_ceiling(np.full(5, mu), chance) == pytest.approx(expected, abs=1e-6)


def test_the_ceiling_of_one_look_is_that_of_membership():
    log = indpriv.NormLog.from_arrays(
        [[0.5, 0.5]], [0], total_steps=1, noise_multiplier=2.0, max_grad_norm=1.0, sample_rate=1.0
    )
    risk = indpriv.membership_risk(log, delta=1e-5, false_positive_rate=0.01)
    ceiling = identification_ceiling(np.array([0.25, 0.25]), 0.01)
    assert ceiling == pytest.approx(float(risk.individual.true_positive_rate[0, 0]), rel=1e-3)


def test_examples_without_noise_are_found_and_take_no_chance():
    assert identification_ceiling(np.array([np.inf, np.inf]), 0.01) == 1
    mixed = identification_ceiling(np.array([np.inf, 1.0]), 0.05)
    assert mixed == pytest.approx((1 + ndtr(ndtri(0.1) + 1)) / 2)


def test_more_than_the_ceiling_is_found_only_where_noise_is_missing():
    few, many = np.arange(200) < 20, np.arange(200) < 60
    assert not reconstruction_of(scores(few, 1.0)).above_ceiling
    found = reconstruction_of(scores(many, 1.0))
    assert found.above_ceiling
    assert found.identified == 0.3
    assert found.chance == pytest.approx(0.01)
    assert found.label_found is None


def test_failures_count_as_failures():
    errors = np.r_[np.full(3, np.inf), 1e-6, np.full(4, 0.5)]
    found = reconstruction_of(scores(np.zeros(4), 1.0, errors=errors))
    assert found.error is None
    assert (found.close, found.close_by_chance) == (0.25, 0.0)


def test_bins_by_epsilon_have_ceilings_of_their_own():
    epsilon = np.repeat([1.0, 2.0, 3.0, 4.0], 50)
    found = reconstruction_of(scores(epsilon == 4, 1.0), epsilon)
    assert [(part.low, part.high, part.n_examples) for part in found.bins] == [
        (0, 1, 50),
        (1, 2, 50),
        (2, 3, 50),
        (3, 4, 50),
    ]
    assert [part.identified for part in found.bins] == [0, 0, 0, 1]
    assert found.bins[-1].above_ceiling
    assert found.bins[0].ceiling > found.ceiling  # all the chance could lie in one bin


def test_other_scores_are_refused():
    plain = AttackScores(np.zeros(2), np.array([True, False]), "losses")
    with pytest.raises(InputError, match="pass those of leak"):
        reconstruction_of(plain)


@pytest.mark.parametrize(("column", "value"), [("mu", np.nan), ("mu", -1.0), ("chance", 0.0)])
def test_numbers_that_leak_never_writes_are_refused(column, value):
    found = scores(np.ones(4), 1.0)
    found.details[column][1] = value
    with pytest.raises(InputError, match="mu must be at least 0"):
        reconstruction_of(found)
