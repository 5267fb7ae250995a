import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import hypergeom

from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.analysis.attacks.lower_bound import (
    gaussian_bound,
    gaussian_epsilon,
    lower_bound,
    rank_test,
    rates_bound,
    refutation,
)
from indpriv.attack_scores import AttackScores
from oracles import one_run_p_value

RNG = np.random.default_rng


def randomised_response(epsilon, n, rng):
    """Coins, and scores that tell each coin as well as epsilon-DP allows."""
    coins = rng.random(n) < 0.5
    told = np.where(rng.random(n) < 1 / (1 + np.exp(-epsilon)), coins, ~coins)
    return told.astype(float), coins


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.7, 6.0])
@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize(
    ("guesses", "correct"), [(20, 0), (20, 11), (20, 20), (300, 170), (300, 299)]
)
def test_it_is_the_papers_code(guesses, correct, epsilon, delta):
    expected = one_run_p_value(400, guesses, correct, epsilon, delta)
    assert refutation(guesses, correct, epsilon, delta, 400) == pytest.approx(
        expected, rel=1e-9, abs=1e-13
    )


def test_every_guess_right_proves_what_it_can():
    coins = np.arange(200) % 2 == 0
    found = lower_bound(coins.astype(float), coins, delta=1e-9, n_coins=200, rng=RNG(0))
    assert (found.guesses, found.correct) == (200, 200)
    level = 0.05 / found.tried
    assert found.epsilon == pytest.approx(-np.log(level ** (-1 / 200) - 1), abs=0.01)


def test_a_planted_leak_is_found_and_not_overstated():
    for epsilon, factor in ((1.0, 0.6), (2.0, 0.7), (4.0, 0.65)):
        bounds = []
        for seed in range(20):
            scores, coins = randomised_response(epsilon, 500, RNG(seed))
            bounds.append(
                lower_bound(scores, coins, delta=1e-5, n_coins=500, rng=RNG(seed)).epsilon
            )
        assert np.median(bounds) >= factor * epsilon
        assert (
            np.mean(np.array(bounds) > epsilon) <= 0.2
        )  # at 0.05, more than 4 of 20 have probability 0.003


def test_a_large_delta_proves_nothing():
    scores, coins = randomised_response(2.0, 500, RNG(0))
    assert lower_bound(scores, coins, delta=0.1, n_coins=500, rng=RNG(0)).epsilon == 0.0


@pytest.mark.parametrize("n", [0, 1, 15])
def test_too_few_coins_prove_nothing(n):
    found = lower_bound(
        np.arange(n, dtype=float), np.arange(n) % 2 == 0, delta=1e-5, n_coins=n, rng=RNG(0)
    )
    assert (found.epsilon, found.guesses, found.tried, found.false_alarm_rate) == (0.0, 0, 0, None)


def test_ties_are_broken_without_a_look_at_the_coins():
    coins = np.arange(400) < 200  # members stand first, as in most files
    bounds = [
        lower_bound(np.zeros(400), coins, delta=1e-5, n_coins=400, rng=RNG(seed)).epsilon
        for seed in range(60)
    ]
    assert np.mean(np.array(bounds) > 0) <= 0.1


def test_false_alarms_of_coins_are_of_new_coins():
    """Not of the same number of members, which 230 heads in 400 would make an alarm of by itself."""
    coins = RNG(0).permutation(400) < 230
    scores = RNG(1).normal(size=400)
    assert lower_bound(scores, coins, delta=1e-5, n_coins=400, rng=RNG(2)).false_alarm_rate <= 0.05


def false_alarms(trials, draw, fair_coins):
    """Shares of trials without any leak in which the bound of all examples, and any bound of a group, is above 0."""
    found = np.zeros(2)
    stated = []
    for seed in range(trials):
        rng = RNG(seed)
        member = draw(rng)
        groups = rng.choice(["a", "b", "c"], len(member))
        scores = AttackScores(rng.normal(size=len(member)), member, "noise", groups, fair_coins)
        measures = measure_attack(scores, seed=seed)
        found += (
            measures.bounds["steinke2023"].epsilon > 0,
            any(of.epsilon > 0 for of in measures.group_bounds.values()),
        )
        stated.append(measures.bounds["steinke2023"].false_alarm_rate)
    return found / trials, float(np.mean(stated))


DRAWS = {
    "coins": (lambda rng: rng.random(500) < 0.5, True),
    "half": (lambda rng: rng.permutation(500) < 250, False),
    "three quarters": (lambda rng: np.arange(500) < 375, False),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_false_alarms_are_below_their_rate(draw):
    rates, stated = false_alarms(60, *DRAWS[draw])
    assert np.all(rates <= 0.1)
    assert stated <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS)
def test_null_calibration(draw):
    """200 trials of n = 500: at a rate of 0.05, more than 18 alarms have probability under 0.01."""
    rates, stated = false_alarms(200, *DRAWS[draw])
    assert np.all(rates <= 18 / 200), rates
    assert stated <= 0.05


def gaussian_scores(n, mu, seed, digits=9):
    rng = RNG(seed)
    member = rng.random(n) < 0.5
    return (rng.normal(size=n) + mu * member).round(digits), member


@pytest.mark.parametrize(
    ("n", "mu", "least"), [(200, 1.0, 2.5), (200, 2.5, 9.0), (1000, 1.0, 3.6), (1000, 2.5, 11.7)]
)
def test_independent_scores_prove_as_much_as_those_of_peers(n, mu, least):
    """1.75, 8.21, 2.97 and 11.13 of jax_privacy's bound of Gaussian DP, medians of 20 draws."""
    bounds = [gaussian_bound(*gaussian_scores(n, mu, seed), 1e-5) for seed in range(100)]
    assert np.median(bounds) >= least
    above = 0
    for seed in range(1000):
        test = rank_test(*gaussian_scores(n, mu, seed), (1 / 32, 1 / 8, 1 / 2))
        above += test(lambda false: ndtr(ndtri(false) + mu)) <= 0.05
    assert above <= 50


@pytest.mark.parametrize(
    ("n", "mu", "least"), [(200, 1.0, 0.8), (200, 2.5, 2.4), (1000, 1.0, 1.4), (1000, 2.5, 3.5)]
)
def test_rates_prove_as_much_as_those_of_peers(n, mu, least):
    """0.46, 1.80, 1.03 and 3.02 of jax_privacy's Clopper-Pearson bound, medians of 20 draws."""
    bounds = [rates_bound(*gaussian_scores(n, mu, seed), 1e-5) for seed in range(100)]
    assert np.median(bounds) >= least
    assert max(bounds) <= gaussian_epsilon(mu, 1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_rates_show_a_leak_on_either_side(turned):
    """One example in ten gives its membership away, or only its absence: the rates are far apart."""
    rng = RNG(0)
    member = rng.random(4000) < 0.5
    told = (rng.random(4000) < 0.1) & (member != turned)
    scores = np.where(told, 9.0 - 18.0 * turned, rng.normal(size=4000))
    found = rates_bound(scores, member, 1e-5)
    assert found > 3
    assert found == pytest.approx(rates_bound(-scores, ~member, 1e-5))
    assert rates_bound(scores, member, 0.09) < 0.1  # which a delta of 0.1 explains


def test_rates_hold_for_randomised_response_whose_curve_is_not_gaussian():
    """At epsilon 1.5, by scores that are 0 or 1: chance breaks their ties."""
    bounds = [rates_bound(*randomised_response(1.5, 2000, RNG(k)), 1e-5) for k in range(300)]
    assert np.median(bounds) > 1.1
    assert np.mean(np.array(bounds) > 1.5) <= 0.05


@pytest.mark.parametrize("bound", [gaussian_bound, rates_bound])
@pytest.mark.parametrize("digits", [9, 0])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_bounds_of_scores_that_tell_nothing_are_0(digits, share, bound):
    """With ties or without, members half of all or nearly all, in 1,000 draws: 5 % allowed."""
    alarms = 0
    for seed in range(1000):
        rng = RNG(seed)
        scores, member = rng.normal(size=300).round(digits), rng.random(300) < share
        alarms += bound(scores, member, 1e-5) > 0
    assert alarms <= 50


def test_f_dp_of_any_scores_is_calibrated_and_between_the_others():
    null, found = 0, []
    for seed in range(300):
        for mu in (0.0, 1.0) if seed < 20 else (0.0,):
            scores, member = gaussian_scores(300, mu, seed)
            attack = AttackScores(scores, member, "any", fair_coins=True)
            bounds = [one.epsilon for one in measure_attack(attack, seed=seed).bounds.values()]
            if mu:
                found.append(bounds)
            else:
                null += np.array(bounds) > 0
    assert np.all(null <= 22)  # of 300: at a rate of 0.05, more have probability 0.03
    assert list(np.argsort(np.median(found, axis=0))) == [2, 0, 1, 3]  # rates, any, f-DP, Gaussian
    assert np.max(found) < gaussian_epsilon(1.0, 1e-5)


def test_the_test_of_ranks_is_the_exact_one_and_never_below_it():
    """If scores tell nothing, hits above a rank follow a negative hypergeometric law."""
    rng = RNG(0)
    member = rng.permutation(400) < 150
    ranked = member[np.argsort(-(scores := rng.normal(size=400)))]
    for rank in (1, 7, 60):
        at = np.flatnonzero(~ranked)[rank - 1]
        exact = hypergeom.cdf(rank - 1, 400, 250, at)  # of at - rank + 1 members or more
        exact = 1.0 if at < rank else exact
        found = rank_test(scores, member, (rank / 250,))(lambda false: false)
        assert exact <= found <= min(1.0, 1.15 * exact + 1e-9)


def test_many_scores_that_tell_little_are_told_from_none():
    """Of 200 draws of a shift of 0.3, those that refute epsilon 0; by an interval for each rate 118 and 142."""
    found = np.zeros(2)
    for seed in range(200):
        scores, member = gaussian_scores(1000, 0.3, seed)
        found += [bound(scores, member, 1e-5) > 0 for bound in (rates_bound, gaussian_bound)]
    assert np.all(found >= 190)


def test_few_scores_prove_nothing():
    scores, member = gaussian_scores(12, 9.0, 0)
    assert gaussian_bound(scores, member, 1e-5) == rates_bound(scores, member, 1e-5) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_coins_of_a_bare_seed_break_no_ties(seed):
    """Scores that tell nothing prove nothing, though members were drawn from a generator of the same seed."""
    n, proven = 1000, []
    drawn = RNG(seed).random(n)
    for member in (drawn < 0.5, drawn >= 0.5, RNG(seed).permutation(n) < n // 2):
        for scores in (np.zeros(n), (RNG(99).random(n) < 0.3).astype(float)):
            proven += [bound(scores, member, 1e-5) for bound in (rates_bound, gaussian_bound)]
            rng = RNG([seed])  # as of an analysis
            proven.append(lower_bound(scores, member, delta=1e-5, n_coins=n, rng=rng).epsilon)
        chosen = np.isin(np.arange(n), RNG(seed).permutation(n)[: n // 2])
        rng = RNG([seed])
        proven.append(lower_bound(np.zeros(n), chosen, delta=1e-5, n_coins=n, rng=rng).epsilon)
    assert max(proven) < 1.0
