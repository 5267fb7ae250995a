"""Compare how a run drew its batches with Poisson sampling, which the analysis assumes."""

from __future__ import annotations

import math
from dataclasses import replace

from indpriv.norm_log.evidence import BATCH_SIZES, PARTICIPATION, SAMPLER, Check
from indpriv.norm_log.session_counts import DrawCounts

# The chance that a sound run fails a test of its sampling. Small, since a failure costs the claim
# "exact".
FALSE_ALARM = 1e-6


def observed_sampler(sampler: str, sampler_class: str) -> Check:
    """How batches were drawn in a run that was watched."""
    assumption = replace(SAMPLER, title=f"sampler ({sampler_class})")
    if sampler == "poisson":
        return assumption.passed("Opacus's Poisson sampler draws every batch")
    if sampler == "truncated_poisson":
        return assumption.passed("Poisson sampling draws every batch, and a cap truncates it")
    return assumption.failed(
        f"batches come from {sampler_class}, not from Poisson sampling, which accounts with secret "
        "participation assume"
    )


def declared_sampler(sampler: str, source: str) -> Check:
    """How batches were drawn, according to a source."""
    declared = replace(SAMPLER, title="sampler (declared)")
    if sampler in ("poisson", "truncated_poisson"):
        return declared.not_checked(f"{source} declares {sampler.replace('_', ' ')} sampling")
    return declared.failed(f"batches were {sampler}, which the analysis does not cover")


def batch_sizes(n_examples: int, sampler: str, counts: DrawCounts, of: str = "example") -> Check:
    """Whether the number of examples, or what `of` says, fits Poisson sampling."""
    if sampler != "poisson" or not counts.draws:
        return BATCH_SIZES.not_checked(f"only Poisson sampling has an expected number of {of}s")
    from scipy import stats  # takes longer to import than the rest of the audit side

    trials = n_examples * counts.draws
    rate = counts.expected_participations / trials
    seen = counts.participations
    below, above = stats.binom.cdf(seen, trials, rate), stats.binom.sf(seen - 1, trials, rate)
    chance = 2 * float(min(below, above))
    detail = f"{seen:,} {of}s drawn where {rate * trials:,.0f} are expected"
    if chance < FALSE_ALARM:
        return BATCH_SIZES.failed(
            f"{detail}: under Poisson sampling a deviation this large has probability {chance:.1g}"
        )
    return BATCH_SIZES.passed(detail)


def participation(n_examples: int, sampler: str, counts: DrawCounts, of: str = "example") -> Check:
    """Whether the counts of the examples, and their spread, are plausible for Poisson sampling."""
    n, draws = n_examples, counts.draws
    assumption = replace(PARTICIPATION, title=f"participation of each {of}")
    if sampler != "poisson" or not draws:
        return assumption.not_checked("only Poisson sampling has an expected participation")
    from scipy import stats

    rate = counts.expected_participations / (n * draws)
    least, most = counts.participations_min, counts.participations_max
    detail = (
        f"each {of} was drawn {least:,} to {most:,} times in {draws:,} draws at rate {rate:.4g}"
    )
    if (evenness := _chance_of_evenness(n, counts)) < FALSE_ALARM:
        return assumption.failed(
            f"{detail}: the probability that independent draws are as even as this is at most "
            f"{evenness:.1g} (shuffled batches?)"
        )
    low = n * float(stats.binom.cdf(least, draws, rate))
    high = n * float(stats.binom.sf(most - 1, draws, rate))
    if min(low, high) < FALSE_ALARM:
        return assumption.failed(
            f"{detail}: under Poisson sampling the probability of a count this extreme is at most "
            f"{min(low, high):.1g}"
        )
    return assumption.passed(detail)


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
