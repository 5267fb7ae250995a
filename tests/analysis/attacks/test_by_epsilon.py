import numpy as np
import pytest

from indpriv.analysis.attacks.membership import attack_by_epsilon
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from synthetic import epsilon_table


def attack(member_epsilon, nonmember_epsilon, mine, others, *, worst_case, **options):
    values = np.concatenate([mine, others])
    scores = AttackScores(values, np.arange(len(values)) < len(mine), "test")
    table = epsilon_table(member_epsilon, worst_case=worst_case)
    return attack_by_epsilon(scores, table, np.asarray(nonmember_epsilon, float), **options)


def randomised_responses(leak, nominal, n, rng):
    """Members told from others as well as an epsilon of `leak` allows, where each is said to have `nominal`."""
    epsilon = [rng.choice(nominal, n) for _ in range(2)]
    factor = dict(zip(nominal, leak, strict=True))
    sides = []
    for values, is_member in zip(epsilon, (True, False), strict=True):
        rate = 1 / (1 + np.exp(-np.array([factor[value] for value in values])))
        sides.append(np.where(rng.random(n) < rate, is_member, not is_member).astype(float))
    return epsilon[0], epsilon[1], sides[0], sides[1]


def test_every_member_is_in_one_bin_and_the_worst_case_in_its_own():
    rng = np.random.default_rng(0)
    epsilon = np.minimum(rng.exponential(1.0, 500), 2.0)
    found = attack(epsilon, epsilon[:100], rng.random(500), rng.random(100), worst_case=2.0)
    for _, part in found.groupby("target_fpr"):
        assert part[["n_members", "n_others"]].sum().tolist() == [500, 50]
        assert part["up_to"].iloc[-1] == 2.0
        assert part["n_members"].iloc[-1] == (epsilon == 2.0).sum()
        assert (part["low"] <= part["tpr"]).all()
        assert (part["tpr"] <= part["high"]).all()
    assert found["target_fpr"].unique().tolist() == [0.01, 0.1, 0.5]


def test_the_reference_line_is_the_formula():
    rng = np.random.default_rng(1)
    epsilon, others = rng.uniform(0, 2, 1000), rng.uniform(0, 2, 800)
    found = attack(epsilon, others, rng.random(1000), rng.random(800), worst_case=2.5)
    for row in found[found["target_fpr"] == 0.5].itertuples():
        if row.n_others:
            share, other_share = row.n_members / 1000, row.n_others / 400
            line = np.exp(row.up_to) * row.fpr * other_share / share + 1e-5 / share
            assert row.reference == pytest.approx(min(1.0, line))
            line = np.exp(2.5) * row.fpr * other_share / share + 1e-5 / share
            assert row.worst_case_reference == pytest.approx(min(1.0, line))


def test_a_leak_within_epsilon_is_no_alarm():
    alarms = 0
    for seed in range(100):
        made = randomised_responses(
            (0.2, 1.0, 2.0), (0.2, 1.0, 2.0), 1000, np.random.default_rng(seed)
        )
        found = attack(*made, worst_case=2.0, seed=seed)
        alarms += found["above_reference"].any()
    assert alarms <= 10  # 5 expected at most; more than 10 has probability 0.012


def test_a_leak_beyond_an_individual_epsilon_is_a_place_to_look_and_no_finding():
    made = randomised_responses((1.5, 1.5), (0.1, 2.0), 4000, np.random.default_rng(0))
    found = attack(*made, worst_case=2.0)
    assert found["above_reference"].any()
    assert not found["above_worst_case"].any()
    assert not found.loc[found["up_to"] == 2.0, "above_reference"].any()


def test_a_leak_beyond_the_worst_case_is_a_finding():
    made = randomised_responses((4.0, 4.0), (0.5, 1.0), 4000, np.random.default_rng(0))
    assert attack(*made, worst_case=1.0)["above_worst_case"].any()


def test_odd_cases_are_defined():
    rng = np.random.default_rng(0)
    assert attack(np.ones(39), np.ones(50), np.ones(39), np.ones(50), worst_case=1.0).empty
    same = attack(np.ones(50), np.ones(50), np.zeros(50), np.zeros(50), worst_case=1.0)
    assert same["target_fpr"].tolist() == [0.01, 0.1, 0.5]
    zero = attack(np.zeros(50), np.zeros(50), rng.random(50), rng.random(50), worst_case=0.0)
    assert not zero["above_worst_case"].any()
    lost = attack(
        rng.random(60), rng.random(60), np.full(60, -np.inf), np.full(60, -np.inf), worst_case=1.0
    )
    assert np.isfinite(lost["threshold"]).all()
    far = attack(
        rng.random(60), np.full(60, 9.0), rng.random(60), rng.random(60), worst_case=1000.0
    )
    assert not far["above_worst_case"].any()
    with pytest.raises(InputError, match="50 scores of members and 40 epsilons"):
        attack(np.ones(40), np.ones(50), np.ones(50), np.ones(50), worst_case=1.0)
