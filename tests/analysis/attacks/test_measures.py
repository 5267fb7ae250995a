from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from indpriv._plain import from_json, to_json
from indpriv.analysis.attacks.canaries import AttackMeasures, measure_attack
from indpriv.analysis.attacks.rates import ALL, accused, rates_on_updates
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from synthetic import parts


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
    groups = parts(found.rates, by="group")
    assert list(groups) == ["leaky", "safe", "tiny"]
    leaky, _, tiny = groups.values()
    assert leaky["auc"].value == 1.0
    bounds = found.group_bounds
    assert bounds["leaky"].epsilon > 2.0 > 0.0 == bounds["safe"].epsilon
    alone = measure_attack(scores_of(values[:290], member[:290], fair_coins=True), delta=1e-9)
    assert bounds["leaky"].epsilon < alone.bounds["steinke2023"].epsilon
    assert (tiny["auc"].n, leaky["auc"].n, found.overall["auc_n"]) == (20, 290, 600)
    assert len(found.roc) > 5


def test_many_more_members_than_others_prove_nothing_by_number():
    rng = np.random.default_rng(1)
    found = measure_attack(scores_of(rng.normal(size=3000), np.arange(3000) < 2800))
    assert found.bounds["steinke2023"].epsilon == 0.0
    assert found.bounds["steinke2023"].guesses <= 400
    assert "equal numbers of random members" in found.method


def test_one_sided_scores_are_defined():
    found = measure_attack(scores_of([1.0, 2.0], [True, True], np.array(["a", "b"], dtype=object)))
    assert set(found.bounds) == {"steinke2023", "mahloujifar2024", "ranks", "gaussian_ranks"}
    assert all((bound.epsilon, bound.guesses) == (0, 0) for bound in found.bounds.values())
    assert (found.overall["auc"], found.overall["auc_n"], found.roc) == (None, 2, ())


def test_the_same_seed_gives_the_same_bound():
    rng = np.random.default_rng(2)
    scores = scores_of(rng.integers(0, 4, 300), rng.random(300) < 0.6)
    assert to_json(measure_attack(scores, seed=3)) == to_json(measure_attack(scores, seed=3))


def test_a_bound_is_judged_by_the_ceiling_that_it_was_given():
    coins = np.arange(400) % 2 == 0
    for ceiling, above in ((1.9, True), (99.0, False), (None, False)):
        found = measure_attack(scores_of(coins, coins), ceiling=ceiling)
        assert {one.above_ceiling for one in found.bounds.values()} == {above}


def test_measures_without_a_bound_by_fair_coins_are_refused():
    """As in audits by earlier versions, whose bounds stood among the rates."""
    measures = to_json(measure_attack(scores_of([1.0, 2.0], [True, False])))
    assert from_json(AttackMeasures, measures).bounds["steinke2023"].epsilon == 0.0
    with pytest.raises(InputError, match="test lacks a lower bound by fair coins; audit again"):
        from_json(AttackMeasures, measures | {"bounds": {}})
    del measures["bounds"]
    with pytest.raises(InputError, match=r"bounds.*make the audit again"):
        from_json(AttackMeasures, measures)


def test_bad_arguments_are_refused():
    for options, message in (({"delta": 0.0}, "delta=0.0"), ({"seed": -1}, "seed=-1")):
        with pytest.raises(InputError, match=message):
            measure_attack(scores_of([1.0], [True]), **options)


def test_a_coin_has_one_score():
    """Copies of a score would count its coin several times: chance would look like proof."""
    rng = np.random.default_rng(0)
    member, values = rng.random(200) < 0.5, rng.normal(size=200)
    coins = {"fair_coins": True, "example_ids": np.arange(200)}
    assert measure_attack(scores_of(values, member, **coins)).bounds["steinke2023"].tried
    copies = {"fair_coins": True, "example_ids": np.repeat(np.arange(200), 2)}
    with pytest.raises(InputError, match="200 scores are of examples that have a score already"):
        measure_attack(scores_of(np.repeat(values, 2), np.repeat(member, 2), **copies))


def test_numbers_that_no_fair_coins_give_prove_nothing():
    """Before, 60 members without others "proved" epsilon 2.03 by any scores; so does a group that is a split."""
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="all examples: 60 members and 0 others are no fair coins"):
        measure_attack(scores_of(rng.normal(size=60), np.ones(60), fair_coins=True))
    member = np.arange(120) % 2 == 0
    split = np.where(member, "train", "test").astype(object)
    with pytest.raises(InputError, match="test: 0 members and 60 others"):
        measure_attack(scores_of(rng.normal(size=120), member, split, fair_coins=True))
    assert measure_attack(scores_of(rng.normal(size=20), np.ones(20), fair_coins=True)).overall
    member = np.arange(240) // 24 % 2 == 0  # a split by class: no group alone is beyond all chance
    groups = (np.arange(240) // 24).astype(str).astype(object)
    with pytest.raises(InputError, match=r"0: 24 members and 0 others .* in all groups together"):
        measure_attack(scores_of(rng.normal(size=240), member, groups, fair_coins=True))


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
    assert np.median([found.bounds["steinke2023"].epsilon for found in forced]) > 2 * truth
    assert all(found.overall["auc"] == 1.0 for found in forced)


def test_scores_of_several_models_prove_nothing_from_one_run():
    several = scores_of(np.arange(4.0), [1, 0, 1, 0], model=np.array([0, 0, 1, 1]))
    with pytest.raises(InputError, match="several models"):
        measure_attack(several)
    found = measure_attack(replace(several, model=np.ones(4, np.int64)))
    assert found.overall["n_members"] == 2


def test_scores_that_share_the_noise_of_a_run_have_no_rates():
    """Leave-one-out scores in one run: each hardly tells, but ranked they tell all."""
    rng = np.random.default_rng(0)
    member = rng.random(1000) < 0.5
    shared = 0.5 * member + rng.normal()  # noise along one direction, known to the attacker
    with pytest.raises(InputError, match="adversary 'full'"):
        rates_on_updates(AttackScores(shared, member, "white box", adversary="full"))
    found = rates_on_updates(AttackScores(shared, member, "canaries", adversary="updates"))
    (found,) = parts(found).values()
    assert (found["auc"].value, found["tpr_0.01"].value) == (1.0, 1.0)  # wrongly declared canaries


def test_one_threshold_accuses_one_other_in_a_hundred_of_all_groups():
    rng = np.random.default_rng(5)
    member, groups = rng.random(4000) < 0.5, rng.choice(["a", "b", "c"], 4000).astype(object)
    values = rng.normal(np.where(groups == "a", 1.0, 0.0))  # whose scores are high, members or not
    found = parts(accused(scores_of(values, member, groups), attack="x", by="kind"))
    sides = [of["falsely_accused"] for of in found.values()]
    n, false = [row.n for row in sides], [row.value for row in sides]
    assert np.dot(n, false) == int(0.01 * (~member).sum())
    assert false[0] > 2 * max(false[1:])
    threshold = np.sort(values[~member])[::-1][int(0.01 * (~member).sum())]
    for name, of in found.items():
        inside, row = member & (groups == name), of["accused"]
        assert (row.value, row.n) == ((values[inside] > threshold).mean(), inside.sum())
        assert row.low < row.value < row.high
    assert accused(scores_of([1.0], [True], np.array(["a"], object)), attack="x", by="y").empty
    assert ALL not in found
