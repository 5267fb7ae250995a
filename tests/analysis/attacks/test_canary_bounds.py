"""Bounds from gradient canaries: they hold, they prove something, and broken mechanisms show."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtr, stdtr

from indpriv import AttackScores, InputError
from indpriv.analysis.attacks.canaries import (
    epsilon_of_length,
    measure_gradient_canaries,
    predicted_separation,
    separation,
    simulated_evidence,
)
from indpriv.analysis.attacks.lower_bound import (
    BOUNDS,
    gaussian_epsilon,
    largest_refuted,
    refutes_gaussian,
)
from indpriv.norm_log.fields import StepSettings

SETTINGS = StepSettings.from_values(60, 1.0, 1.0, 0.1)
M = 1200


def canaries(rng, *, length=1.0, settings=SETTINGS, leaks=True) -> AttackScores:
    member = rng.random(M) < 0.5
    return AttackScores(
        scores=simulated_evidence(settings, length, member, rng),
        member=member if leaks else rng.random(M) < 0.5,
        method="simulated",
        groups=np.full(M, f"{length:g}", dtype=object),
        fair_coins=True,
        adversary="updates",
    )


def test_bounds_stay_below_the_truth_and_agree_with_the_account():
    rng = np.random.default_rng(0)
    found = [
        measure_gradient_canaries(canaries(rng), SETTINGS, seed=k).lengths[0] for k in range(6)
    ]
    bounds = np.array([[bound.epsilon for bound in one.bounds.values()] for one in found])
    assert [*found[0].bounds] == ["steinke2023", "mahloujifar2024", "rates", "means"]
    assert found[0].bounds.keys() < BOUNDS.keys()
    assert (bounds[:, :3] <= found[0].ceiling).all()
    assert (bounds[:, 3] > found[0].ceiling).sum() <= 2  # 5 percent of the draws may be
    assert (np.median(bounds, axis=0) > 0.15 * found[0].ceiling).all()
    assert all(one.agrees for one in found)
    alarms = [[bound.false_alarm_rate for bound in one.bounds.values()] for one in found]
    assert (np.mean(alarms, axis=0) < 0.06).all()


def test_scores_that_leak_nothing_prove_nothing_and_contradict_the_account():
    rng = np.random.default_rng(1)
    found = [
        measure_gradient_canaries(canaries(rng, leaks=False), SETTINGS).lengths[0] for _ in range(3)
    ]
    assert sum(bound.epsilon > 0 for one in found for bound in one.bounds.values()) <= 2
    assert not any(one.agrees for one in found)


def test_too_little_noise_exceeds_the_account():
    half = StepSettings.from_values(60, 0.5, 1.0, 0.1)
    scores = canaries(np.random.default_rng(2), settings=half)
    (found,) = measure_gradient_canaries(scores, SETTINGS).lengths
    assert not found.agrees
    assert found.separation_interval.low > found.separation_predicted


def test_the_fewest_canaries_contradict_a_sound_account_as_rarely_as_many():
    rng, member = np.random.default_rng(5), np.arange(16) < 8
    scores = rng.normal(size=(16, 60_000)) + member[:, None]
    p_values = []
    for one in scores.T:
        difference, error, freedom = separation(one, member[None])
        p_values.append(2 * stdtr(freedom, -np.abs(difference - 1) / error))
    shares = [np.mean(np.array(p_values) < level) for level in (0.05, 1e-2, 1e-3)]
    assert shares == pytest.approx([0.05, 1e-2, 1e-3], rel=0.25)  # of normal laws 0.07, 0.02, 0.006


def test_intervals_and_bounds_of_eight_canaries_use_student_s_law():
    settings = StepSettings.from_values(50, 4.0, 1.0, 1.0)  # normal scores
    member = np.arange(16) < 8
    scores = AttackScores(
        simulated_evidence(settings, 1.0, member, np.random.default_rng(6)), member, "simulated",
        groups=np.full(16, "1"), fair_coins=True, adversary="updates",
    )  # fmt: skip
    (found,) = measure_gradient_canaries(scores, settings).lengths
    ends, (_, (error,), _) = found.separation_interval, separation(scores.scores, member[None])
    assert (ends.high - ends.low) / 2 > 2.1 * error  # at most 14 degrees of freedom


def test_each_length_is_judged_by_its_own_account():
    rng = np.random.default_rng(3)
    short, long = canaries(rng, length=0.5), canaries(rng)
    both = AttackScores(
        np.concatenate([short.scores, long.scores]),
        np.concatenate([short.member, long.member]),
        "simulated",
        groups=np.concatenate([short.groups, long.groups]),
        fair_coins=True,
        adversary="updates",
    )
    found = measure_gradient_canaries(both, SETTINGS).lengths
    assert [one.length for one in found] == [0.5, 1.0]
    assert all(one.agrees for one in found)
    assert found[0].ceiling == epsilon_of_length(SETTINGS, 0.5, 1e-5) < found[1].ceiling
    assert found[0].separation_predicted == predicted_separation(SETTINGS, 0.5)


@pytest.mark.parametrize(
    ("m", "guesses", "correct", "gaussian", "any_mechanism"),
    [
        (1000, 1000, 560, 0.26881331, 0.13426273),
        (1000, 250, 160, 0.55015311, 0.35062990),
        (5000, 1250, 800, 0.71522519, 0.47599938),
        (5000, 5000, 2900, 0.48094668, 0.27503106),
        (200, 50, 45, 2.44636496, 1.39197650),
        (1000, 62, 60, 3.24445775, 2.20596078),
    ],
)
def test_bounds_from_one_run_equal_those_of_jax_privacy(
    m, guesses, correct, gaussian, any_mechanism
):
    """`_epsilon_one_run_fdp` and `_epsilon_one_run` of jax-privacy 2.0.0 (Apache-2.0).

    At level 0.05 and delta 1e-5; ours are smaller by the tolerance of the search.
    """
    arguments = (guesses, correct, 1e-5, m, 0.05)
    assert refutes_gaussian(0.0, *arguments)
    found = largest_refuted("mahloujifar2024", *arguments)
    assert found == pytest.approx(gaussian, abs=1e-5)
    assert found <= gaussian + 1e-6
    found = largest_refuted("steinke2023", *arguments)
    assert found == pytest.approx(any_mechanism, abs=1e-5)


def test_f_dp_never_refutes_a_gaussian_mechanism_more_often_than_its_level():
    rng, level, wrong = np.random.default_rng(4), 0.05, 0
    for _ in range(400):
        mu, m = 1.0, 300
        member = rng.random(m) < 0.5
        ranked = member[np.argsort(-(rng.normal(size=m) + mu * member))]
        correct = int(ranked[:60].sum() + (~ranked[-60:]).sum())
        wrong += refutes_gaussian(mu, 120, correct, 1e-5, m, level)
    assert wrong <= 0.07 * 400


def test_epsilon_of_a_gaussian_mechanism():
    epsilon = gaussian_epsilon(0.7, 1e-5)
    delta = ndtr(0.35 - epsilon / 0.7) - np.exp(epsilon) * ndtr(-0.35 - epsilon / 0.7)
    assert delta == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_epsilon(0.0, 1e-5) == 0


def test_refusals():
    scores = canaries(np.random.default_rng(5))
    with pytest.raises(InputError, match="not those of gradient canaries"):
        measure_gradient_canaries(
            AttackScores(scores.scores, scores.member, "loss", fair_coins=True), SETTINGS
        )
    few = AttackScores(
        scores.scores[:10], np.arange(10) < 3, "few", groups=scores.groups[:10],
        fair_coins=True, adversary="updates",
    )  # fmt: skip
    found = measure_gradient_canaries(few, SETTINGS)
    assert found.lengths == ()
    assert "a bound needs 8 of each" in found.left_out[0]


def test_a_length_with_too_few_canaries_does_not_cost_the_others_their_findings():
    scores, n = canaries(np.random.default_rng(6)), 5
    groups = scores.groups.copy()
    groups[:n] = "0.5"
    mixed = AttackScores(
        scores.scores, scores.member, "two lengths", groups=groups, fair_coins=True,
        adversary="updates",
    )  # fmt: skip
    found = measure_gradient_canaries(mixed, SETTINGS)
    assert [one.length for one in found.lengths] == [1.0]
    (text,) = found.left_out
    assert text.startswith("Canaries of length 0.5 have")
    assert found.agree


def test_the_test_of_the_account_is_corrected_for_the_number_of_lengths():
    less_noise = StepSettings.from_values(60, 0.87, 1.0, 0.1)
    scores = canaries(np.random.default_rng(7), settings=less_noise)
    (alone,) = measure_gradient_canaries(scores, SETTINGS).lengths
    groups = np.concatenate([scores.groups, np.full(M, "0.5", dtype=object)])
    other = canaries(np.random.default_rng(8), length=0.5)
    both = AttackScores(
        np.concatenate([scores.scores, other.scores]),
        np.concatenate([scores.member, other.member]),
        "two lengths", groups=groups, fair_coins=True, adversary="updates",
    )  # fmt: skip
    longest = measure_gradient_canaries(both, SETTINGS).lengths[-1]
    assert 0 < alone.p_value < 0.5
    assert longest.p_value == pytest.approx(2 * alone.p_value)


def test_canaries_of_a_run_that_overflowed_are_not_judged():
    scores = canaries(np.random.default_rng(1))
    values = scores.scores.copy()
    values[:5] = np.inf
    found = measure_gradient_canaries(replace(scores, scores=values), SETTINGS)
    assert not found.lengths
    assert found.left_out[0].startswith("5 canaries of length 1 have infinite scores")
