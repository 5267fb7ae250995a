import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.references import calibrated, effects, lira, moments, offline_lira, plain_lira
from indpriv.errors import InputError
from synthetic import discriminate, signals_with_effect

every_variant = pytest.mark.parametrize("attack", [lira, plain_lira, offline_lira, calibrated])


def auc(scores):
    return discriminate(scores.scores[scores.member], scores.scores[~scores.member]).value["auc"]


@every_variant
def test_a_planted_effect_is_found_up_to_the_optimum(attack):
    signals = signals_with_effect(1.0, 200, 3000, spread=3.0)
    best = stats.norm.cdf(1 / np.sqrt(2))
    assert best - 0.03 < auc(attack(signals, 7)) < best + 0.02


@every_variant
def test_a_constant_added_to_every_signal_changes_nothing(attack):
    signals = signals_with_effect(0.5, 12, 100)
    moved = AttackSignals.from_arrays(signals.signal + np.float32(4), signals.member)
    assert attack(moved, 0).scores == pytest.approx(attack(signals, 0).scores, abs=1e-4)


@every_variant
def test_no_effect_is_not_found(attack):
    signals = signals_with_effect(0.0, 40, 4000)
    assert abs(auc(attack(signals, 0)) - 0.5) < 0.04


def test_plain_scores_are_carlinis():
    """Two normal laws per example with the moments of numpy, as in the authors' code."""
    signals = signals_with_effect(1.0, 30, 40, seed=5)
    values, member = signals.signal[1:].astype(float), signals.member[1:]
    expected, fixed = np.empty(40), np.empty(40)
    deviations = [
        np.concatenate(
            [
                values[:, x][member[:, x] == side] - values[:, x][member[:, x] == side].mean()
                for x in range(40)
            ]
        )
        for side in (True, False)
    ]
    degrees = [sum((member[:, x] == side).sum() - 1 for x in range(40)) for side in (True, False)]
    common = [np.sqrt((found**2).sum() / n) for found, n in zip(deviations, degrees, strict=True)]
    for x in range(40):
        inside, outside = values[:, x][member[:, x]], values[:, x][~member[:, x]]
        of = float(signals.signal[0, x])
        expected[x] = stats.norm.logpdf(of, inside.mean(), inside.std()) - stats.norm.logpdf(
            of, outside.mean(), outside.std()
        )
        fixed[x] = stats.norm.logpdf(of, inside.mean(), common[0]) - stats.norm.logpdf(
            of, outside.mean(), common[1]
        )
    assert plain_lira(signals, 0).scores == pytest.approx(expected, rel=1e-6)
    assert plain_lira(signals, 0, fixed=True).scores == pytest.approx(fixed, rel=1e-6)


@pytest.fixture
def tf_privacy(monkeypatch):
    """LiRA of TensorFlow Privacy, by `pip install --no-deps tensorflow-privacy==0.8.12`: two files that need numpy and scipy only."""
    found = importlib.util.find_spec("tensorflow_privacy")
    if found is None:
        pytest.skip("tensorflow-privacy is not installed")
    if importlib.metadata.version("tensorflow-privacy") != "0.8.12":
        pytest.skip("tensorflow-privacy 0.9.0 was published without its attacks")
    parent = "tensorflow_privacy.privacy.privacy_tests"
    folder = Path(found.origin).parent / "privacy" / "privacy_tests"
    for name in ("utils", "membership_inference_attack.advanced_mia"):
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(f"{parent}.{name}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("models", [9, 40])
def test_plain_scores_are_those_of_tensorflow_privacy(tf_privacy, models):
    signals = signals_with_effect(1.0, models, 60, seed=6)
    values, member = signals.signal[1:].astype(float), signals.member[1:]
    taken = (member.sum(axis=0) >= 2) & ((~member).sum(axis=0) >= 2)
    sides = [
        [values[side[:, x], x][:, None] for x in np.flatnonzero(taken)]
        for side in (member, ~member)
    ]
    theirs = tf_privacy.compute_score_lira(
        signals.signal[0, taken].astype(float)[:, None], *sides, median_or_mean="mean"
    )
    assert taken.sum() > 50
    assert plain_lira(signals, 0).scores[taken] == pytest.approx(-theirs, rel=1e-9, abs=1e-9)


def test_effects_are_hedges():
    signals = signals_with_effect(0.7, 24, 30, seed=2)
    found = effects(moments(signals))
    pooled = np.empty(30)
    for x in range(30):
        inside, outside = (
            signals.signal[:, x][signals.member[:, x] == side].astype(float)
            for side in (True, False)
        )
        pooled[x] = (
            ((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum()
        ) / 22
    shrunk = (22 * pooled + 4 * np.median(pooled)) / 26
    assert found.variance == pytest.approx(shrunk)
    x = 11
    inside, outside = (
        signals.signal[:, x][signals.member[:, x] == side].astype(float) for side in (True, False)
    )
    d = (1 - 3 / (4 * 26 - 1)) * (inside.mean() - outside.mean()) / np.sqrt(shrunk[x])
    assert found.effect[x] == pytest.approx(d)
    assert found.error[x] == pytest.approx(1 / len(inside) + 1 / len(outside))


def test_shrunk_effects_are_better_with_few_references():
    """With few references the direction of each example is mostly noise."""
    signals = signals_with_effect(0.5, 9, 20000, seed=4)
    assert auc(lira(signals, 0)) > auc(plain_lira(signals, 0)) + 0.03


def test_too_few_references_are_refused():
    signals = signals_with_effect(0.5, 4, 100, audited=0)
    two = AttackSignals.from_arrays(signals.signal[:2], signals.member[:2], audited=0)
    for name in ("lira", "lira_plain", "lira_fixed"):
        with pytest.raises(InputError, match=r"models is 3, and this attack needs 4.*rmia"):
            ATTACKS[name].scores(Material(confidence=signals))
    for name in ("lira_offline", "calibrated"):
        with pytest.raises(InputError, match="models is 1, and this attack needs 2"):
            ATTACKS[name].scores(Material(confidence=two))


@every_variant
def test_examples_that_no_reference_saw_are_scored(attack):
    signals = signals_with_effect(0.5, 8, 100)
    member = np.array(signals.member)
    member[1:, 0], member[1:, 1] = False, True
    values = np.array(signals.signal)
    values[0, 2], values[3, 3], values[0, 4] = np.inf, np.inf, np.nan
    found = attack(AttackSignals.from_arrays(values, member), 0)
    assert np.isfinite(found.scores).all()
    assert found.example_ids.tolist() == [x for x in range(100) if x != 4]


@pytest.mark.parametrize("attack", [lira, offline_lira, calibrated])
def test_an_example_that_no_reference_has_a_signal_of_gets_no_score(attack):
    signals = signals_with_effect(1.0, 12, 50)
    values = signals.signal + np.float32(100)
    values[1:, 3] = np.nan
    found = attack(AttackSignals.from_arrays(values, signals.member), 0)
    assert found.example_ids.tolist() == [k for k in range(50) if k != 3]


@every_variant
def test_only_models_that_coins_made_have_scores_of_fair_coins(attack):
    made = signals_with_effect(1.0, 12, 50)
    for audited, fair in ((None, True), (0, False), (3, True)):
        signals = AttackSignals.from_arrays(
            made.signal, made.member, coins=True, share=0.5, audited=audited
        )
        assert attack(signals, 0).fair_coins == fair
