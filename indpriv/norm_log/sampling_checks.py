"""Statistical checks: were batches Poisson-sampled, and is the noise what is accounted?"""

from __future__ import annotations

import math

from indpriv._facts import FAILED, NOT_CHECKED, PASSED, Fact, fact
from indpriv.norm_log.session_counts import DrawCounts, NoiseCounts

# The chance that a sound run fails a test of its sampling. Small, since a failure costs the claim
# "exact".
FALSE_ALARM = 1e-6

_CHANCE = 1e-9  # that the variance of sound noise is as small; tensors are at most some thousands
_DEVIATIONS = 6.0  # of a product, which sound noise exceeds once in 10^9
_SMALL_DEFICIT = 0.002  # of the variance: rounding, or noise a thousandth too small
_MANY_VALUES = 10**5  # with fewer, the mean fourth power is not nearly normal
_MORE_NOISE = 0.02  # of the variance: some parameters may have more than accounted, which is safe
_SMALL_EXCESS = 0.01  # of the mean fourth power
_FOURTH = 3.0  # mean fourth power of standard normal numbers, whose variance is 96


def batch_sizes(n_examples: int, sampler: str, counts: DrawCounts, of: str = "example") -> Fact:
    """Whether the number of examples, or what `of` says, fits Poisson sampling."""
    if sampler != "poisson" or not counts.draws:
        return fact("check.batch_sizes", NOT_CHECKED, of=of)
    from scipy import stats  # takes longer to import than the rest of the audit side

    trials = n_examples * counts.draws
    rate = counts.expected_participations / trials
    seen, expected = counts.participations, rate * trials
    below, above = stats.binom.cdf(seen, trials, rate), stats.binom.sf(seen - 1, trials, rate)
    chance = 2 * float(min(below, above))
    status = FAILED if chance < FALSE_ALARM else PASSED
    return fact("check.batch_sizes", status, counts=counts, of=of, expected=expected, chance=chance)


def participation(n_examples: int, sampler: str, counts: DrawCounts, of: str = "example") -> Fact:
    """Whether the counts of the examples, and their spread, are plausible for Poisson sampling."""
    n, draws = n_examples, counts.draws
    if sampler != "poisson" or not draws:
        return fact("check.participation", NOT_CHECKED, of=of)
    from scipy import stats

    rate = counts.expected_participations / (n * draws)
    least, most = counts.participations_min, counts.participations_max
    evenness = _chance_of_evenness(n, counts)
    low = n * float(stats.binom.cdf(least, draws, rate))
    high = n * float(stats.binom.sf(most - 1, draws, rate))
    even = evenness < FALSE_ALARM
    chance = evenness if even else min(low, high)
    return fact(
        "check.participation",
        FAILED if chance < FALSE_ALARM else PASSED,
        "even" if even else "",
        of=of,
        counts=counts,
        rate=rate,
        chance=chance,
    )


def _chance_of_evenness(n_examples: int, counts: DrawCounts) -> float:
    """An upper bound of the chance that independent draws give so little spread.

    Spread is the sum over examples of Y = (participations - expected)**2 >= 0, so that
    P(sum <= E[sum] - t) <= exp(-t**2 / (2 n E[Y**2])) (Maurer 2003, A bound on the deviation
    probability for sums of non-negative random variables, Theorem 2.1), and
    E[Y**2] <= variance + 3 variance**2 for a sum of independent draws.
    """
    variance = counts.participations_variance
    if not variance:
        return 1.0
    missing = max(0.0, n_examples * variance - counts.participations_spread)
    return math.exp(-(missing**2) / (2 * n_examples * (variance + 3 * variance**2)))


def noise_check(noise: NoiseCounts | None) -> Fact:
    """Compare the noise of one session with independent normal noise of the accounted size."""
    if noise is None:
        return fact("check.noise", NOT_CHECKED)
    case = _fault(noise)
    error = math.sqrt(2 / max(noise.values, 1))
    return fact("check.noise", FAILED if case else PASSED, case, noise=noise, error=error)


def _fault(noise: NoiseCounts) -> str:
    """What is wrong with the noise; "" if nothing is."""
    if _too_small(noise.variance, noise.values):
        return "small"
    if _too_small(noise.least_variance, noise.least_values):
        return "small_somewhere"
    for case in ("along_sum", "previous", "first"):
        if abs(getattr(noise, case)) > _DEVIATIONS:
            return case
    return "" if _is_normal(noise) else "shape"


def _is_normal(noise: NoiseCounts) -> bool:
    """By the fourth power, unless there are few values or more noise than accounted."""
    if noise.values < _MANY_VALUES or noise.variance > 1 + _MORE_NOISE:
        return True
    excess = abs(noise.fourth_moment / noise.variance**2 - _FOURTH)
    return excess <= max(_SMALL_EXCESS, _DEVIATIONS * math.sqrt(96 / noise.values))


def _too_small(variance: float, values: int) -> bool:
    from scipy.special import gammainc  # takes longer to import than the rest of the audit side

    if 1 - variance <= _SMALL_DEFICIT:
        return False
    return bool(gammainc(values / 2, values * variance / 2) < _CHANCE)  # of chi squared
