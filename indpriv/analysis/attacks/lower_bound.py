"""Lower bounds on the worst-case epsilon of a run, from one run. Sensitive.

"steinke2023", after Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run"
(NeurIPS 2023, arXiv:2305.08846): each of m examples is included by an independent fair coin; the
highest scores are guessed "included", the lowest "left out", and no guess is made for the rest.
Under (epsilon, delta)-DP the number of right guesses is bounded, up to a small probability, by a
binomial with success rate e^epsilon / (1 + e^epsilon); more right guesses refute that epsilon. The
bound is on the worst case, which DP guarantees for every example; it says nothing about output-
specific epsilons.

"mahloujifar2024", after Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One
Run" (arXiv:2410.22235), makes the same guesses and finds the largest mu such that they refute
Gaussian mu-DP. It proves more, if the run's trade-off curve is a Gaussian one.
"""

import tomllib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special, stats

from indpriv._checks import check_choice
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.accountant.laws import gaussian_epsilons
from indpriv.analysis.statistics import CONFIDENCE, clopper_pearson
from indpriv.analysis.summary import record

# Fewer cannot refute any epsilon at 95 % once several numbers of guesses are tried.
LEAST_GUESSES = 8
_FEWER = 4  # ratio of one number of guesses to the next
_LARGEST, _TOLERANCE = 64.0, 1e-6  # of epsilon and of mu, that are looked for
# Shares of others accused by the thresholds of `gaussian_bound` and, of each side, `rates_bound`.
# Fixed before any result. Half as many, a factor of 16 apart, would each have to be off by 2.4
# standard deviations instead of 2.6, but a leak may then lie a factor of 16 from the next one.
_OTHERS_ACCUSED = (1 / 32, 1 / 8, 1 / 2)
_ACCUSED = (1 / 2048, 1 / 512, 1 / 128, *_OTHERS_ACCUSED)
_CELLS = np.linspace(-6.0, 6.0, 121)  # standard normal scores of a draw, of 1e-9 outside
_WINDOW = 12.0  # standard deviations beyond which a binomial has no mass that matters (1e-32)
NULL_TRIALS = 1000
_KEY = 0x696E6470  # of the draws that break ties: a run's own coins may be those of a bare seed
# (epsilon or mu, guesses, right ones, delta, number of coins, level) -> whether they refute it
Proof = Callable[[float, int, int, float, int, float], bool]


class _Bound:
    @property
    def above_ceiling(self: Any) -> bool:
        """Whether it exceeds what is accounted: the run or its account is wrong."""
        return self.ceiling is not None and self.epsilon > self.ceiling


Bound: Any = record("bound", _Bound)
# Of each bound its title and what it takes for granted; gradient canaries have the last two.
BOUNDS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("bounds.toml").read_text(encoding="utf-8")
)


def lower_bound(
    scores: FloatArray,
    member: NDArray[np.bool_],
    *,
    delta: float,
    n_coins: int,
    rng: np.random.Generator,
    balanced: bool = False,
    confidence: float = CONFIDENCE,
    proof: str = "steinke2023",
    ceiling: float | None = None,
) -> Bound:
    """Bound the worst-case epsilon from scores (n,) of examples that fair coins included.

    The numbers of guesses depend only on the number of scores and are fixed before any score is
    seen: the upper and lower half, eighth, thirty-second and so on, guessed on both sides or on the
    upper side only. n_coins were flipped in all, of which these may be a part; rng breaks ties and
    draws the random memberships. balanced: members were chosen in a fixed number instead; false
    alarms are measured for such choices. proof: one of `PROOFS`; ceiling: what is accounted. The
    result has the guesses that give the largest bound.
    """
    proven = PROOFS[check_choice("proof", proof, PROOFS)]
    plans = _plans(len(scores))
    if not plans:
        return Bound(0.0, ceiling, confidence, 0)
    rng = np.random.default_rng([_KEY, *rng.integers(1 << 32, size=4)])
    shuffled = rng.permutation(len(scores))
    ranked = member[shuffled][np.argsort(-scores[shuffled], kind="stable")]
    n = len(scores)
    cuts = np.unique([0, *(top for top, _ in plans), *(n - bottom for _, bottom in plans), n])
    included = np.add.reduceat(ranked.astype(np.int64), cuts[:-1])
    level = (1 - confidence) / len(plans)
    least = [_least_correct(proven, top + bottom, delta, n_coins, level) for top, bottom in plans]
    correct = _correct(included[None], cuts, plans)[0]
    bounds = [
        largest_refuted(proof, top + bottom, int(right), delta, n_coins, level)
        if right >= enough
        else 0.0
        for (top, bottom), right, enough in zip(plans, correct, least, strict=True)
    ]
    best = int(np.argmax(bounds))
    sizes = np.diff(cuts)
    if balanced:
        inside = int(member.sum())
        null = rng.multivariate_hypergeometric(sizes, inside, NULL_TRIALS, method="marginals")
    else:
        null = rng.binomial(sizes, 0.5, size=(NULL_TRIALS, len(sizes)))
    alarms = int((_correct(null, cuts, plans) >= np.array(least)).any(axis=1).sum())
    counted = {"guesses": sum(plans[best]), "correct": int(correct[best])}
    return Bound(bounds[best], ceiling, confidence, len(plans), **counted, **alarms_of(alarms))


def alarms_of(alarms: int) -> dict[str, Any]:
    """What a bound says of this many random memberships that gave one above 0."""
    interval = clopper_pearson(alarms, NULL_TRIALS)
    return {"false_alarm_rate": alarms / NULL_TRIALS, "false_alarm_interval": interval}


def refutation(guesses: int, correct: int, epsilon: float, delta: float, n_coins: int) -> float:
    """Largest probability of at least `correct` right guesses under (epsilon, delta)-DP.

    Steinke, Nasr and Jagielski 2023, Theorem 5.2 in the form of the code in their appendix D: with
    W binomial of success rate e^epsilon / (1 + e^epsilon), P[W >= v] + 2 m delta max_i P[v > W >= v
    - i] / i.
    """
    rate = 1 / (1 + np.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, rate))
    if delta == 0 or correct == 0:
        return tail
    spread = np.sqrt(guesses * rate * (1 - rate))
    lowest = max(0, int(min(correct - 1, guesses * rate) - _WINDOW * spread - 1))
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, lowest - 1, -1), guesses, rate))
    steepest = float(np.max(below / np.arange(1, len(below) + 1)))
    return min(1.0, tail + 2 * n_coins * delta * steepest)


def _plans(n: int) -> list[tuple[int, int]]:
    """Number of guesses "included" and of guesses "left out", for every plan."""
    plans, side = list[tuple[int, int]](), n // 2
    while side >= LEAST_GUESSES:
        plans += [(side, side), (side, 0)]
        side //= _FEWER
    return plans


def _correct(included: IntArray, cuts: IntArray, plans: Sequence[tuple[int, int]]) -> IntArray:
    """Number of right guesses, (n_trials, n_plans), from the members between cuts."""
    up_to, n = np.pad(np.cumsum(included, axis=1), ((0, 0), (1, 0))), int(cuts[-1])
    tops, bottoms = np.transpose(plans)
    members_below = up_to[:, -1:] - up_to[:, np.searchsorted(cuts, n - bottoms)]
    return np.asarray(up_to[:, np.searchsorted(cuts, tops)] + bottoms - members_below)


@lru_cache(maxsize=4096)
def _least_correct(proof: Proof, guesses: int, delta: float, n_coins: int, level: float) -> int:
    """Smallest number of right guesses that refutes epsilon 0, or more than there are."""
    rights = range(guesses // 2 + 1, guesses + 1)
    refuted = bisect_left(rights, True, key=lambda n: proof(0, guesses, n, delta, n_coins, level))
    return rights.start + refuted


def largest_refuted(
    proof: str, guesses: int, correct: int, delta: float, n_coins: int, level: float
) -> float:
    """Largest epsilon at delta that this many right guesses refute, by one of `PROOFS`."""
    found = _largest(lambda x: PROOFS[proof](x, guesses, correct, delta, n_coins, level))
    return gaussian_epsilon(found, delta) if proof == "mahloujifar2024" else found


def _largest(refuted: Callable[[float], bool]) -> float:
    """Largest epsilon or mu that is refuted, as all smaller ones are; 0 where none is."""
    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while high <= _LARGEST and refuted(high):
        low, high = high, 2 * high
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def refutes_gaussian(
    mu: float, guesses: int, correct: int, _: float, n_coins: int, level: float
) -> bool:
    """Whether this many right guesses refute Gaussian mu-DP, which knows no delta.

    Mahloujifar, Melis and Chaudhuri 2024, Algorithm 3 in the form of their code
    (`audit_rh_with_cap`), for the trade-off curve of N(0, 1) and N(mu, 1).
    """
    right = level * correct / n_coins
    wrong = level * (guesses - correct) / n_coins
    for i in range(correct - 1, -1, -1):
        more = max(wrong, float(special.ndtr(special.ndtri(min(right, 1.0)) - mu)))
        if more == wrong:
            break
        right += i / (guesses - i) * (more - wrong)
        wrong = more
    return right + wrong > guesses / n_coins


# Whether guesses refute a number: epsilon, or the mu of a Gaussian trade-off.
PROOFS: dict[str, Proof] = {
    "steinke2023": lambda epsilon, guesses, correct, delta, n_coins, level: (
        refutation(guesses, correct, epsilon, delta, n_coins) <= level
    ),
    "mahloujifar2024": refutes_gaussian,
}


def rates_bound(
    scores: FloatArray, member: NDArray[np.bool_], delta: float, confidence: float = CONFIDENCE
) -> float:
    """Lower bound on epsilon at delta if scores are independent, for any trade-off curve.

    The largest epsilon that `rank_test` refutes by accusing members, or by clearing others.
    """
    sides = [(scores, member), (-scores, ~member)]
    tests = [rank_test(*side, _ACCUSED) for side in sides]

    def refuted(epsilon: float) -> bool:
        p_values = [test(lambda false: np.exp(epsilon) * false + delta) for test in tests]
        return len(tests) * min(p_values) <= 1 - confidence

    return _largest(refuted)


def gaussian_bound(
    scores: FloatArray, member: NDArray[np.bool_], delta: float, confidence: float = CONFIDENCE
) -> float:
    """Lower bound on epsilon at delta if scores are independent and the trade-off is Gaussian.

    The epsilon of the largest mu, Phi^-1(true-positive rate) - Phi^-1(false-positive rate), that
    `rank_test` refutes.
    """
    test = rank_test(scores, member, _OTHERS_ACCUSED)

    def refuted(mu: float) -> bool:
        return test(lambda false: special.ndtr(special.ndtri(false) + mu)) <= 1 - confidence

    return gaussian_epsilon(_largest(refuted), delta)


def rank_test(
    scores: FloatArray, member: NDArray[np.bool_], accused: Sequence[float]
) -> Callable[[Callable[[FloatArray], FloatArray]], float]:
    """Test of a curve that gives the largest true-positive rate at each false-positive rate.

    A threshold is the score of the non-member with a fixed rank, k-th of n from the top. The
    probability that another non-member lies above it is then a draw of Beta(k, n - k + 1), and the
    members above it are binomial, with at most the curve's rate there. The p-value is the mean of
    the binomial tail over that draw, times the number of thresholds (Bonferroni). An interval for
    each rate would ask both to be off at once: where they are equally uncertain, for a difference
    1.4 times as large. Chance breaks ties.
    """
    order = np.lexsort((np.random.default_rng(_KEY).random(len(scores)), scores))
    ranks = np.argsort(order)
    members, others = ranks[member], np.sort(ranks[~member])[::-1]
    if min(len(members), len(others)) < LEAST_GUESSES:
        return lambda _: 1.0
    rank = np.unique(np.maximum(1, np.array(accused) * len(others)).astype(np.int64))[:, None]
    hits = (members > others[rank - 1]).sum(axis=1, keepdims=True)
    # The tail grows with the rate, so the upper ends of cells give a sum above the integral.
    upper = special.betaincinv(rank, len(others) - rank + 1, special.ndtr(_CELLS))
    false = np.append(upper, np.ones_like(hits), axis=1)
    mass = np.diff(special.ndtr([-np.inf, *_CELLS, np.inf]))

    def p_value(most: Callable[[FloatArray], FloatArray]) -> float:
        rate = np.minimum(most(false), 1.0)
        tail = special.betainc(np.maximum(hits, 1), len(members) - hits + 1, rate)
        return len(rank) * float(np.min(np.where(hits > 0, tail, 1.0) @ mass))

    return p_value


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at delta of the Gaussian mechanism with shift mu, at most the truth; 0 for mu <= 0.

    Balle and Wang 2018 (arXiv:1805.06530), Theorem 8.
    """
    if mu <= 0:
        return 0.0
    return float(gaussian_epsilons(np.array([mu]), delta)[0][0])


# Bounds that take scores to be independent, and how many thresholds each tries.
OF_INDEPENDENT = {
    "ranks": (rates_bound, 2 * len(_ACCUSED)),
    "gaussian_ranks": (gaussian_bound, len(_OTHERS_ACCUSED)),
}
