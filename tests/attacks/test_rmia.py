import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import expit

from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.references import rmia
from indpriv.errors import InputError
from synthetic import discriminate, signals_with_effect


def slow_rmia(signals, target, offline, gamma=1.0, a=0.3):
    """Algorithm 1 in loops, example by example."""
    n = signals.n_examples
    p = expit(signals.signal.astype(float))
    others = [model for model in range(signals.n_models) if model != target]
    ratio = np.empty(n)
    for x in range(n):
        without = [p[m, x] for m in others if not signals.member[m, x]]
        everyone = [p[m, x] for m in others]
        if offline or len(without) == len(everyone):
            base = ((1 + a) * np.mean(without) + 1 - a) / 2 if without else np.nan
        else:
            base = np.mean(everyone)
        ratio[x] = p[target, x] / base
    scores = {}
    for x in np.flatnonzero(~np.isnan(ratio)):
        population = [z for z in np.flatnonzero(~np.isnan(ratio)) if not signals.member[target, z]]
        scores[x] = np.mean([ratio[x] / gamma >= ratio[z] for z in population])
    return scores


@given(
    seed=st.integers(0, 2**32 - 1),
    n_models=st.integers(2, 5),
    gamma=st.sampled_from([2.0, 0.5]),
    offline=st.booleans(),
)
def test_it_is_algorithm_1_and_another_gamma_changes_no_order(seed, n_models, gamma, offline):
    signals = signals_with_effect(1.0, n_models, 12, seed=seed)
    if (~signals.member[0]).sum() < 4 or (signals.member[1:] == signals.member[0]).all(1).any():
        return
    known = (~signals.member[1:]).any(axis=0) if offline else np.ones(12, bool)
    if (known & ~signals.member[0]).sum() < 2:
        return
    expected = slow_rmia(signals, 0, offline)
    found = rmia(signals, 0, offline=offline)
    assert found.example_ids.tolist() == list(expected)
    assert found.scores == pytest.approx(list(expected.values()), abs=1e-6)
    others = np.array([*slow_rmia(signals, 0, offline, gamma).values()])
    assert (np.diff(others[np.argsort(found.scores)]) >= 0).all()


def test_a_planted_effect_is_found_up_to_the_optimum():
    signals = signals_with_effect(0.8, 100, 3000, spread=0.5)
    found = rmia(signals, 0)
    auc = discriminate(found.scores[found.member], found.scores[~found.member]).value["auc"]
    best = stats.norm.cdf(0.8 / np.sqrt(2))
    assert best - 0.04 < auc < best + 0.03


def test_one_reference_is_enough_where_a_threshold_sees_nothing():
    signals = signals_with_effect(1.5, 2, 4000, spread=4.0, seed=3)
    raw = signals.signal[0]
    members = signals.member[0]
    found = rmia(signals, 0)
    auc = discriminate(found.scores[found.member], found.scores[~found.member]).value["auc"]
    assert auc > discriminate(raw[members], raw[~members]).value["auc"] + 0.03
    offline = rmia(signals, 0, offline=True)
    assert set(offline.example_ids) == set(np.flatnonzero(~signals.member[1]))


def test_examples_and_references_in_another_order_keep_their_scores():
    signals = signals_with_effect(1.0, 5, 200)
    order, models = np.random.default_rng(1).permutation(200), [0, 3, 1, 4, 2]
    other = AttackSignals.from_arrays(
        signals.signal[models][:, order], signals.member[models][:, order], order
    )
    mine, others = rmia(signals, 0), rmia(other, 0)
    assert others.scores == pytest.approx(mine.scores[order])
    assert others.example_ids.tolist() == order.tolist()


def refused(signal, member, **facts):
    signals = AttackSignals.from_arrays(signal, member, audited=0, **facts)
    ATTACKS["rmia"].scores(Material(confidence=signals))


def test_what_it_does_not_hold_for_is_refused():
    signals = signals_with_effect(1.0, 3, 50)
    with pytest.raises(
        InputError, match=r"models is 0, and this attack needs 1; .*train_references$"
    ):
        refused(signals.signal[:1], signals.member[:1])
    with pytest.raises(InputError, match="another kind than 'other'"):
        refused(signals.signal, signals.member, kind="other")
    with pytest.raises(InputError, match="reference 1 was trained on the same examples"):
        refused(signals.signal, signals.member[[0, 0, 1]])
    with pytest.raises(InputError, match="two non-members"):
        refused(signals.signal, [[1] * 50, *signals.member[1:].tolist()])
    alone = np.where(np.arange(50) < 1, signals.signal, np.where(signals.member[0], 1, np.nan))
    with pytest.raises(InputError, match="two non-members"):
        refused(alone, signals.member)


def test_missing_and_infinite_signals():
    signals = signals_with_effect(1.0, 4, 100)
    values = np.array(signals.signal)
    values[0, :3] = [np.nan, np.inf, -np.inf]
    values[1, 5] = np.nan
    found = rmia(AttackSignals.from_arrays(values, signals.member), 0)
    assert found.example_ids.tolist() == list(range(1, 100))
    assert np.isfinite(found.scores).all()
    assert found.scores[0] > found.scores[1]


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("offline", [False, True])
def test_equal_ratios_do_not_give_members_away(levels, offline):
    """As for labels: members and non-members with the same few values are not told apart."""
    rng = np.random.default_rng(0)
    signal = np.broadcast_to(rng.integers(0, levels, 4000) / 2, (5, 4000))
    signals = AttackSignals.from_arrays(signal, rng.random((5, 4000)) < 0.7)
    found = rmia(signals, 0, offline=offline)
    auc = discriminate(found.scores[found.member], found.scores[~found.member]).value["auc"]
    assert auc == pytest.approx(0.5, abs=0.04)
