import numpy as np
import pytest

from indpriv.analysis.attacks.measures import measure_attack
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
