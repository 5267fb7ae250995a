import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from indpriv.analysis.attacks.effects import membership_effects, vulnerable
from indpriv.analysis.attacks.membership import unit_scores
from indpriv.analysis.attacks.rates import ALL, rates_over_models
from indpriv.analysis.guarantee import mu_of, true_positive_rate
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.references import calibrated, lira, rmia
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.report.page import render_markdown
from synthetic import epsilon_table, parts, signals_with_effect

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
    assert auc_of([scores[0]] * 3).low is None  # 3 models that agree are not certain
    with pytest.raises(InputError, match="no scores"):
        rates_over_models([])
    with pytest.raises(InputError, match="adversary 'full'"):
        rates_over_models([replace(scores[0], adversary="full")])


@pytest.mark.parametrize("n", [6, 19])
def test_errors_over_models_that_share_references_are_those_of_a_slow_jackknife(n):
    signals = signals_with_effect(0.5, n, 400, spread=1.0)

    def again(models):
        kept = replace(signals, signal=signals.signal[models], member=signals.member[models])
        return [rmia(kept, target) for target in range(len(models))]

    def rates(scores):
        found = parts(rates_over_models([scores]))[ALL]
        return np.array([found[rate].value for rate in ("auc", "tpr_0.001", "tpr_0.01")])

    every = np.arange(n)
    full = {model: rates(one) for model, one in zip(every, again(every), strict=True)}
    student = np.std(list(full.values()), axis=0, ddof=1) / np.sqrt(n)
    groups = np.array_split(every, min(n, 8))
    k, means, moved = len(groups), [], {}
    for number, group in enumerate(groups):
        kept = np.setdiff1d(every, group)
        left = {model: rates(one) for model, one in zip(kept, again(kept), strict=True)}
        means.append(np.mean(list(left.values()), axis=0))
        for other in set(range(k)) - {number}:
            of = [full[model] - left[model] for model in groups[other]]
            moved[other, number] = np.mean(of, axis=0)
    size = np.array([[n / len(group)] for group in groups])
    pseudo = size * np.mean(list(full.values()), axis=0) - (size - 1) * np.array(means)
    variance = ((pseudo - pseudo.mean(axis=0)) ** 2 / (size - 1)).mean(axis=0)
    of_target = {g: np.mean([moved[g, h] for h in range(k) if h != g], axis=0) for g in range(k)}
    pairs = list(itertools.combinations(range(k), 2))
    sums = np.array([moved[g, h] + moved[h, g] - of_target[g] - of_target[h] for g, h in pairs])
    sums = sums * (k - 2) / 2
    design = np.array([[float(place in pair) for place in range(k)] for pair in pairs])
    rest = sums - design @ np.linalg.lstsq(design, sums, rcond=None)[0]
    twice = 2 * (rest**2).sum(axis=0) / (len(pairs) - k) / (k * (k - 1))
    variance[1:] -= twice[1:]
    jackknife = stats.t.ppf(0.975, k - 1) * np.sqrt(np.maximum(variance, 0.0))
    width = np.maximum(jackknife, stats.t.ppf(0.975, n - 1) * student)
    rows = rates_over_models(again(every), again).set_index("rate")
    assert rows["value"].to_numpy() == pytest.approx(np.mean(list(full.values()), axis=0))
    assert (rows["value"] - rows["low"]).to_numpy() == pytest.approx(
        np.minimum(width, rows["value"])
    )


@pytest.mark.slow
def test_intervals_over_models_cover_what_other_models_give():
    """For more settings, see benchmarks/intervals.py."""
    values, held = [], []
    for seed in range(120):
        signals = signals_with_effect(1.0, 10, 300, spread=1.0, seed=seed)

        def again(models, signals=signals):
            kept = replace(signals, signal=signals.signal[models], member=signals.member[models])
            return (lira(kept, target) for target in range(len(models)))

        found = parts(rates_over_models(again(np.arange(10)), again))[ALL]["auc"]
        values.append(found.value)
        held.append((found.low, found.high))
    low, high = np.transpose(held)
    assert ((low <= np.mean(values)) & (np.mean(values) <= high)).sum() >= 109


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


def with_losses(loss):
    """An example table of the run that has these losses."""
    frame = pd.DataFrame({"example_id": np.arange(N), "unit_id": np.arange(N), "loss": loss})
    return ExampleTable(frame.assign(split="train", label=0, correct=True))


def test_who_is_vulnerable_is_told_by_epsilon_and_by_loss():
    planted = np.where(EPSILON > 2.04, 1.5, 0.0)  # a fifth of the examples
    loss = planted + np.random.default_rng(0).normal(size=N)
    signals = signals_with_effect(planted, 24, N)
    found = membership_effects(signals, TABLE, redraws=9, examples=with_losses(loss))
    epsilon, by_loss = found.vulnerability
    assert (epsilon.figure, by_loss.figure) == ("epsilon", "loss")
    assert epsilon.found > 0.9 > by_loss.found > 0.3  # 0.2 is chance
    assert epsilon.correlation > by_loss.correlation > by_loss.given_other
    r = stats.spearmanr(EPSILON, loss).statistic
    expected = (epsilon.correlation - r * by_loss.correlation) / np.sqrt(
        (1 - r**2) * (1 - by_loss.correlation**2)
    )
    assert epsilon.given_other == pytest.approx(expected, abs=1e-9)
    for one in found.vulnerability:
        assert one.correlation_interval.low < one.correlation < one.correlation_interval.high
        assert one.found_interval.low <= one.found <= one.found_interval.high <= 1
    (alone,) = membership_effects(signals, TABLE, redraws=9).vulnerability
    assert (alone.correlation, alone.given_other) == (epsilon.correlation, None)
    page = render_markdown("effects", found=found)
    assert "Who is vulnerable?" in page
    assert "by chance" in page


def test_who_is_vulnerable_without_the_rest_of_the_effects():
    signals = signals_with_effect(np.where(EPSILON > 2.04, 1.5, 0.0), 12, N)
    examples = with_losses(np.random.default_rng(0).normal(size=N))
    found = membership_effects(signals, TABLE, redraws=9, examples=examples).vulnerability
    assert vulnerable(signals, TABLE, examples=examples) == found
    assert {one.model for one in found} == {"dp"}
    without_dp = vulnerable(signals, TABLE, examples=examples, model="non_dp")
    assert without_dp == tuple(replace(one, model="non_dp") for one in found)
    with pytest.raises(InputError, match="7 models, and effects need 8"):
        vulnerable(signals_with_effect(0.0, 7, N), TABLE)


def test_equal_epsilons_and_losses_rank_nobody():
    signals = signals_with_effect(0.5, 8, N)
    found = membership_effects(signals, epsilon_table(np.full(N, 2.0)), redraws=9)
    assert found.vulnerability == ()
    assert found.correlation == 0
    found = membership_effects(signals, TABLE, redraws=9, examples=with_losses(np.ones(N)))
    assert [one.figure for one in found.vulnerability] == ["epsilon"]
    same = membership_effects(signals, TABLE, redraws=9, examples=with_losses(EPSILON))
    assert [one.given_other for one in same.vulnerability] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("effect", [0.0, 1.0])
@pytest.mark.parametrize("shock", [0.0, 0.5])
def test_intervals_of_vulnerability_cover_what_other_models_give(effect, shock):
    """Truth: the mean over 150 sets of models, which share a shock on all examples or do not."""
    rng = np.random.default_rng(0)
    loss, load = EPSILON + rng.normal(size=N), rng.normal(size=N)
    rows = []
    for _ in range(150):
        member = rng.random((12, N)) < 0.5
        signal = rng.normal(size=member.shape) + shock * rng.normal(size=(12, 1)) * load
        signal += effect * member * np.maximum(EPSILON - 1, 0)
        signals = AttackSignals.from_arrays(signal, member, coins=True)
        found = membership_effects(signals, TABLE, redraws=1, examples=with_losses(loss))
        rows.append(
            [
                (value, ends.low, ends.high)
                for one in found.vulnerability
                for value, ends in (
                    (one.correlation, one.correlation_interval),
                    (one.given_other, one.given_other_interval),
                    (one.found, one.found_interval),
                )
            ]
        )
    value, low, high = np.moveaxis(np.array(rows), 2, 0)
    truth = value.mean(axis=0)
    covered = ((low <= truth) & (truth <= high)).mean(axis=0)
    assert np.all(covered[[0, 1, 3, 4]] >= 0.91), covered
    assert np.all(covered >= 0.85), covered
    if not effect:
        assert np.abs(truth[[0, 1, 3, 4]]).max() < 0.02
        assert truth[[2, 5]] == pytest.approx(0.2, abs=0.03)


def test_few_examples_and_examples_that_every_model_has_are_no_division_by_zero():
    rng = np.random.default_rng(0)
    for n in (1, 3, 19):
        member = rng.random((8, n)) < 0.5
        few = AttackSignals.from_arrays(rng.normal(size=(8, n)), member, coins=True)
        with pytest.raises(InputError, match=r"^\d+ examples have both"):
            membership_effects(few, TABLE, redraws=9)
        assert vulnerable(few, TABLE) == ()
    member = rng.random((8, 30)) < 0.5
    member[:, -1] = True  # the only one at the worst case
    table = epsilon_table(np.append(np.linspace(0.2, 2.5, 29), 3.0), worst_case=3.0)
    signals = AttackSignals.from_arrays(rng.normal(size=(8, 30)), member, coins=True)
    found = membership_effects(signals, table, redraws=9)
    assert sum(part.n_examples for part in found.bins) == 29
    nobody = AttackSignals.from_arrays(signals.signal, np.zeros_like(member), coins=True)
    with pytest.raises(InputError, match=r"^0 examples have"):
        membership_effects(nobody, table, redraws=9)
    assert vulnerable(nobody, table) == ()
