import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri
from sklearn.metrics import roc_auc_score, roc_curve

from indpriv.analysis.attacks.rates import roc, separation
from indpriv.attack_scores import AttackScores
from synthetic import discriminate

SCORES = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=40)


@given(SCORES, SCORES)
def test_it_is_scikit_learns_roc(members, nonmembers):
    found = discriminate(np.array(members), np.array(nonmembers))
    labels, scores = [1] * len(members) + [0] * len(nonmembers), [*members, *nonmembers]
    assert found.value["auc"] == pytest.approx(roc_auc_score(labels, scores))
    fpr, tpr, _ = roc_curve(labels, scores, drop_intermediate=False)
    assert found.value["advantage"] == pytest.approx(np.max(tpr - fpr))
    for rate in (0.001, 0.01):
        assert found.value[f"tpr_{rate}"] == pytest.approx(tpr[fpr <= rate].max())
    points = set(zip(np.round(fpr, 9), np.round(tpr, 9), strict=True))
    curve = roc(AttackScores(np.array(scores), np.array(labels, bool), "test"))
    assert curve
    assert {(round(x, 9), round(y, 9)) for x, y in curve} <= points


def test_low_false_positive_rates_are_where_they_should_be():
    found = discriminate(np.arange(1000.0) - 0.5, np.arange(1000.0)).value
    assert found["tpr_0.001"] == 0.001  # at or above 998.5 there is one of each
    assert found["tpr_0.01"] == 0.01


def test_separation_ties_and_infinities():
    perfect = discriminate(np.full(20, np.inf), np.full(20, -np.inf))
    assert perfect.value[["auc", "advantage", "tpr_0.001"]].tolist() == [1.0, 1.0, 1.0]
    assert 0.8 < perfect.low["auc"] < perfect.high["auc"] == 1.0
    tied = discriminate(np.zeros(20), np.zeros(30))
    assert (tied.value["auc"], tied.value["advantage"], tied.low["advantage"]) == (0.5, 0.0, 0.0)
    assert tied.loc["auc", ["low", "high"]].isna().all()
    assert discriminate(np.zeros(0), np.zeros(3)).empty
    assert discriminate(np.zeros(3), np.zeros(0)).empty
    assert discriminate(np.ones(1), np.zeros(1)).value["auc"] == 1.0
    assert roc(AttackScores(np.ones(3), np.ones(3, bool), "test")) == ()


def test_intervals_are_covered():
    """95 % of 400 is 380; fewer than 364 has probability under 0.001. The advantage's band may be wide, never narrow."""
    rng, inside = np.random.default_rng(0), np.zeros(2)
    for _ in range(400):
        found = discriminate(rng.normal(1.0, 1.0, 60), rng.normal(0.0, 1.0, 80))
        for place, (rate, truth) in enumerate({"auc": 0.7602499, "advantage": 0.3829249}.items()):
            inside[place] += found.low[rate] <= truth <= found.high[rate]
    assert inside[0] >= 364
    assert inside[1] >= 364


@pytest.mark.parametrize(("mu", "sizes"), [(0.0, (2, 20)), (2.5, (10, 200)), (3.3, (50, 1000))])
def test_an_auc_of_few_or_nearly_separate_scores_is_covered(mu, sizes):
    """DeLong's interval alone covers 85, 85 and 88 percent of these."""
    rng, auc, covered = np.random.default_rng(1), ndtr(mu / np.sqrt(2)), []
    for _ in range(300):
        members, others = rng.normal(mu, 1, sizes[0]), rng.normal(0, 1, sizes[1])
        found = next(separation(members, others))
        covered.append(found["low"] <= auc <= found["high"])
    assert np.mean(covered) >= 0.93


def rates_covered(mu, n_members, n_others, draws, seed=0):
    """How often the interval holds the rate of the population, by false-positive rate."""
    rng, inside = np.random.default_rng(seed), {"0.001": 0, "0.01": 0}
    for _ in range(draws):
        members, others = rng.normal(mu, 1.0, n_members), rng.normal(size=n_others)
        found = discriminate(members, others)
        for name in inside:
            low, high = found.loc[f"tpr_{name}", ["low", "high"]]
            inside[name] += low <= ndtr(ndtri(float(name)) + mu) <= high
    return [count / draws for count in inside.values()]


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.5])
def test_rates_at_few_false_positives_are_covered(mu):
    """With the threshold taken as known, 51 and 69 % of the intervals missed at mu = 1.5."""
    assert min(rates_covered(mu, 1000, 1000, 150)) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1000, 1000), (1000, 10_000), (10_000, 1000), (200, 300)])
@pytest.mark.parametrize("mu", [0.0, 0.5, 1.5, 3.0])
def test_rates_are_covered_whatever_the_sizes(mu, sizes):
    assert min(rates_covered(mu, *sizes, 1500, seed=1)) >= 0.95


def test_an_interval_of_a_rate_says_how_little_few_scores_tell():
    few = discriminate(np.full(20, 1.0), np.zeros(50))
    assert few.low["tpr_0.001"] == 0.0  # the threshold may be above all of them
    assert few.high["tpr_0.001"] == 1.0
    many = discriminate(np.full(500, 1.0), np.zeros(20_000))
    assert many.low["tpr_0.001"] > 0.99
    tied = discriminate(np.zeros(500), np.zeros(20_000))
    assert tied.low["tpr_0.01"] == 0.0
