from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from indpriv.analysis.attacks.effects import membership_effects
from indpriv.analysis.attacks.membership import unit_scores
from indpriv.analysis.attacks.rates import ALL, parts, rates_over_models
from indpriv.analysis.guarantee import mu_of, true_positive_rate
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.references import calibrated, rmia
from indpriv.errors import InputError
from synthetic import epsilon_table, signals_with_effect

N = 1200
EPSILON = np.linspace(0.2, 2.5, N)
TABLE = epsilon_table(EPSILON, worst_case=3.0)


def test_planted_effects_are_found_where_they_are():
    planted = np.where(EPSILON > 1.5, 0.6, 0.0)
    found = membership_effects(signals_with_effect(planted, 24, N), TABLE, redraws=99)
    assert sum(part.n_examples for part in found.bins) == found.n_examples == N
    for part in found.bins:
        truth = 0.6 if part.mean_epsilon > 1.75 else 0.0 if part.mean_epsilon < 1.25 else None
        if truth is not None:
            assert abs(part.effect - truth) < 4 * part.error
            assert (part.p_value < 0.05) == (truth > 0)
    assert found.p_value == found.trend_p_value == 0.01
    r = np.corrcoef(EPSILON, planted)[0, 1]
    assert found.corrected_interval.low < r < found.corrected_interval.high
    assert found.correlation < r - 0.1  # the raw correlation is diluted by noise


@pytest.mark.slow
@pytest.mark.parametrize("units", [None, np.arange(N) // 3])
def test_p_values_are_uniform_without_an_effect(units):
    """Signals share a shock of each model, which no test that takes examples as independent survives."""
    found = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        member = rng.random((8, N // 3 if units is not None else N)) < 0.5
        member = member if units is None else member[:, units]
        shocks = rng.normal(size=(8, 1)) * rng.normal(size=N)
        signals = AttackSignals.from_arrays(
            shocks + 0.3 * rng.normal(size=(8, N)), member, unit_ids=units, coins=True
        )
        found.append(membership_effects(signals, TABLE, redraws=39, seed=seed))
    for name in ("p_value", "trend_p_value"):
        values = [getattr(part, name) for part in found]
        jittered = np.array(values) - np.random.default_rng(0).random(40) / 40
        assert stats.kstest(jittered, "uniform").pvalue > 0.001, name
    alarms = [min(part.p_value for part in one.bins) <= 0.05 for one in found]
    assert sum(alarms) <= 7  # at most 2 expected


def test_an_unreliable_correlation_is_not_corrected():
    found = membership_effects(signals_with_effect(0.0, 8, N, seed=1), TABLE, redraws=9)
    assert found.reliability_interval.low <= 0
    assert found.corrected is found.corrected_interval is None


def test_what_effects_need_is_said():
    with pytest.raises(InputError, match="7 models, and effects need 8"):
        membership_effects(signals_with_effect(0.0, 7, N), TABLE)
    with pytest.raises(InputError, match="coins"):
        membership_effects(signals_with_effect(0.0, 8, N, coins=False), TABLE)
    elsewhere = signals_with_effect(0.0, 8, 5, example_ids=np.arange(5) + 10**6)
    with pytest.raises(InputError, match="no example has both"):
        membership_effects(elsewhere, TABLE)


def test_a_ceiling_is_that_of_a_gaussian_mechanism():
    mu = mu_of(epsilon_table([0.31, 1.7, 2.7, 2.7]))
    assert mu[2] == mu[3]
    for epsilon, shift in zip([0.31, 1.7, 2.7], mu, strict=False):
        delta = stats.norm.cdf(-epsilon / shift + shift / 2) - np.exp(epsilon) * stats.norm.cdf(
            -epsilon / shift - shift / 2
        )
        assert delta == pytest.approx(1e-5, rel=1e-3)
    grid = stats.norm.sf(stats.norm.isf(0.01) - mu)
    assert true_positive_rate(mu, 0.01) == pytest.approx(grid)


def auc_of(scores):
    return parts(rates_over_models(scores))[ALL]["auc"]


def test_rates_over_models_are_means_with_errors_over_models():
    signals = signals_with_effect(0.5, 12, 600, spread=1.0)
    scores = [rmia(signals, target) for target in range(12)]
    found = auc_of(iter(scores))
    aucs = [auc_of([of]).value for of in scores]
    assert found.value == pytest.approx(np.mean(aucs))
    interval = stats.t.interval(0.95, 11, np.mean(aucs), stats.sem(aucs))
    assert (found.low, found.high) == pytest.approx(interval)
    assert (found.n, found.n_members + found.n_others) == (12, 7200)
    assert auc_of([scores[0]]).low is None  # of one model
    with pytest.raises(InputError, match="no scores"):
        rates_over_models([])
    with pytest.raises(InputError, match="adversary 'full'"):
        rates_over_models([replace(scores[0], adversary="full")])


@pytest.mark.parametrize("rule", ["max", "mean", "log_sum"])
def test_people_with_several_rows_are_attacked_as_one(rule):
    units = np.repeat(np.arange(500), 4)
    rng = np.random.default_rng(0)
    member = (rng.random((10, 500)) < 0.5)[:, units]
    signal = rng.normal(size=2000) + 0.3 * member + rng.normal(size=member.shape)
    signals = AttackSignals.from_arrays(signal, member, unit_ids=units)
    rows = calibrated(signals, 0)
    people = unit_scores(rows, units, rule)
    assert people.example_ids.tolist() == list(range(500))
    assert np.array_equal(people.member, member[0, ::4])
    parts = rows.scores.reshape(500, 4)
    slow = {
        "max": [max(part) for part in parts],
        "mean": [sum(part) / 4 for part in parts],
        "log_sum": [np.log(sum(np.exp(x) for x in part)) for part in parts],
    }
    assert people.scores == pytest.approx(slow[rule])
    assert auc_of([people]).value > auc_of([rows]).value
    with pytest.raises(InputError, match="both members and non-members"):
        unit_scores(rows, np.arange(2000) % 7, rule)
