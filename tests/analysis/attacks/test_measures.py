from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from indpriv.analysis.attacks.measures import measure_attack
from indpriv.analysis.attacks.results import rates_on_updates
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError


def scores_of(values, member, groups=None, **options):
    return AttackScores(
        np.asarray(values, float), np.asarray(member, bool), "test", groups, **options
    )


def test_groups_are_measured_alone_and_corrected_together():
    rng = np.random.default_rng(0)
    member = rng.random(600) < 0.5
    groups = np.repeat(np.array(["leaky", "safe", "tiny"], dtype=object), [290, 290, 20])
    values = np.where(groups == "leaky", member, 0.0) + rng.normal(0, 0.1, 600)
    found = measure_attack(scores_of(values, member, groups, fair_coins=True))
    assert [row.name for row in found.groups] == ["leaky", "safe", "tiny"]
    leaky, safe, tiny = found.groups
    assert leaky.discrimination.auc == 1.0
    assert leaky.bound.epsilon > 2.0 > 0.0 == safe.bound.epsilon
    alone = measure_attack(scores_of(values[:290], member[:290], fair_coins=True), delta=1e-9)
    assert leaky.bound.epsilon < alone.overall.bound.epsilon
    assert tiny.too_small
    assert (tiny.discrimination.roc, len(found.overall.discrimination.roc) > 5) == ((), True)


def test_many_more_members_than_others_prove_nothing_by_number():
    rng = np.random.default_rng(1)
    found = measure_attack(scores_of(rng.normal(size=3000), np.arange(3000) < 2800))
    assert found.overall.bound.epsilon == 0.0
    assert found.overall.bound.guesses <= 400
    assert "equal numbers of random members" in found.method


def test_one_sided_scores_are_defined():
    found = measure_attack(scores_of([1.0, 2.0], [True, True], np.array(["a", "b"], dtype=object)))
    assert (found.overall.discrimination, found.overall.bound.epsilon, found.overall.too_small) == (
        None,
        0.0,
        True,
    )


def test_the_same_seed_gives_the_same_bound():
    rng = np.random.default_rng(2)
    scores = scores_of(rng.integers(0, 4, 300), rng.random(300) < 0.6)
    assert measure_attack(scores, seed=3) == measure_attack(scores, seed=3)


def test_bad_arguments_are_refused():
    for options, message in (({"delta": 0.0}, "delta=0.0"), ({"seed": -1}, "seed=-1")):
        with pytest.raises(InputError, match=message):
            measure_attack(scores_of([1.0], [True]), **options)


def scores_that_share_noise(adversary, seed=0, mu=0.5, n=1000):
    """Scores of an attacker who knows all other memberships: mu times the coin, plus one draw of
    noise that all scores share. Every score has the law of a Gaussian mechanism with this mu."""
    rng = np.random.default_rng(seed)
    member = rng.random(n) < 0.5
    return scores_of(mu * member + rng.normal(), member, fair_coins=True, adversary=adversary)


def test_the_trap_of_scores_that_share_their_noise():
    """The bound holds for independent guesses only: here it would "prove" twice the truth."""
    with pytest.raises(InputError, match="adversary 'full'"):
        measure_attack(scores_that_share_noise("full"))
    truth = 1.99  # epsilon of a Gaussian mechanism of mu = 0.5 at delta 1e-5
    delta = stats.norm.sf(truth / 0.5 - 0.25) - np.exp(truth) * stats.norm.sf(truth / 0.5 + 0.25)
    assert delta == pytest.approx(1e-5, rel=0.05)
    forced = [measure_attack(scores_that_share_noise("final_model", seed)) for seed in range(9)]
    assert np.median([found.overall.bound.epsilon for found in forced]) > 2 * truth
    assert all(found.overall.discrimination.auc == 1.0 for found in forced)


def test_scores_of_several_models_prove_nothing_from_one_run():
    several = scores_of(np.arange(4.0), [1, 0, 1, 0], model=np.array([0, 0, 1, 1]))
    with pytest.raises(InputError, match="several models"):
        measure_attack(several)
    assert measure_attack(replace(several, model=np.ones(4, np.int64))).overall.n_members == 2


def test_scores_that_share_the_noise_of_a_run_have_no_rates():
    """Leave-one-out scores in one run: each hardly tells, but ranked they tell all."""
    rng = np.random.default_rng(0)
    member = rng.random(1000) < 0.5
    shared = 0.5 * member + rng.normal()  # noise along one direction, known to the attacker
    with pytest.raises(InputError, match="a rate of one run"):
        rates_on_updates(AttackScores(shared, member, "white box", adversary="full"))
    found = rates_on_updates(AttackScores(shared, member, "canaries", adversary="updates"))
    assert (found.auc, found.tpr) == (1.0, 1.0)  # of one direction, wrongly declared as canaries
