"""What gradient canaries prove about epsilon, and whether they agree with the account. Sensitive.

Canaries of one length in one run have independent scores, whose distributions the account predicts
exactly. Four lower bounds, each with its assumption; `BOUNDS` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import optimize, special

from indpriv._arrays import BoolArray, FloatArray
from indpriv._plain import AtLeastZero, Share
from indpriv.accountant.per_example import account
from indpriv.accountant.predicted_evidence import predicted_evidence
from indpriv.analysis.attacks.lower_bound import NULL_TRIALS, gaussian_epsilon, lower_bound
from indpriv.analysis.statistics.intervals import CONFIDENCE, Interval, clopper_pearson
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.step_settings import StepSettings

_THRESHOLDS = (0.25, 0.5, 0.75)  # quantiles of the predicted scores at which rates are counted


@dataclass(frozen=True)
class CanaryBound:
    """A lower bound on the epsilon of a canary.

    Attributes:
        key: of `BOUNDS`.
        epsilon: at the given delta; 0 proves nothing.
        false_alarm_rate: share of `NULL_TRIALS` random memberships that give a bound above 0.
        false_alarm_interval: exact binomial, for that rate.
    """

    key: str
    epsilon: AtLeastZero
    false_alarm_rate: Share
    false_alarm_interval: Interval


@dataclass(frozen=True)
class Canaries:
    """Scores of the canaries of one length, with what is needed to judge them.

    scores and member: (n,); delta: of the epsilon; n_coins: flipped in all; rng: for ties and null
    memberships; predicted: (n_simulated,) scores of members, then of others, by the account.
    """

    scores: FloatArray
    member: BoolArray
    settings: StepSettings
    delta: float
    n_coins: int
    rng: np.random.Generator
    predicted: tuple[FloatArray, FloatArray]


def epsilon_of_length(settings: StepSettings, length: float, delta: float) -> float:
    """Epsilon of an example whose clipped gradient has this relative length in every step."""
    return float(account(_log_of(settings, length), delta=delta, accountant="pld").epsilon[0])


def predicted_separation(settings: StepSettings, length: float) -> float:
    """Mean score of members less that of others, by the account; length may be above 1."""
    return float(predicted_evidence(_log_of(settings, length), orders=()).separation[0])


def _log_of(settings: StepSettings, length: float) -> NormLog:
    """A log of one example, whose gradient is as long as the noise at 1 / length is strong."""
    return NormLog.from_arrays(
        [[1.0]],
        [0],
        total_steps=len(settings),
        noise_multiplier=settings.noise_multiplier / length,
        max_grad_norm=1.0,
        sample_rate=settings.sample_rate,
    )


def separation(scores: FloatArray, member: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Differences of means and their standard errors, for each row of memberships (k, n)."""
    sides = []
    for side in (member.astype(np.float64), (~member).astype(np.float64)):
        n = side.sum(axis=1)
        mean = side @ scores / n
        sides.append((mean, (side @ scores**2 - n * mean**2) / (n - 1) / n))
    (mean_in, error_in), (mean_out, error_out) = sides
    return mean_in - mean_out, np.sqrt(error_in + error_out)


def _from_one_run(proof: str, canaries: Canaries) -> CanaryBound:
    found = lower_bound(
        canaries.scores,
        canaries.member,
        delta=canaries.delta,
        n_coins=canaries.n_coins,
        rng=canaries.rng,
        proof=proof,
    )
    return CanaryBound(proof, found.epsilon, found.false_alarm_rate, found.false_alarm_interval)


def _from_rates(canaries: Canaries) -> CanaryBound:
    """Clopper-Pearson intervals of both rates at thresholds fixed by the account; then mu."""
    thresholds = np.quantile(np.concatenate(canaries.predicted), _THRESHOLDS)
    above = (canaries.scores > thresholds[:, None]).astype(np.float64)

    def largest_mu(member: BoolArray) -> FloatArray:
        rates = [
            [
                [clopper_pearson(k, n, confidence) for k in row]
                for row, n in zip(*counts, strict=True)
            ]
            for counts in ((side @ above.T, side.sum(axis=1)) for side in (member, ~member))
        ]
        low = np.array([[rate.low for rate in row] for row in rates[0]])
        high = np.array([[rate.high for rate in row] for row in rates[1]])
        largest: FloatArray = (special.ndtri(low) - special.ndtri(high)).max(axis=1)
        return largest

    confidence = 1 - (1 - CONFIDENCE) / len(_THRESHOLDS)  # two-sided: each end has half of the rest
    epsilon = gaussian_epsilon(float(largest_mu(canaries.member[None])[0]), canaries.delta)
    return _bound("rates", epsilon, largest_mu(_null_memberships(canaries)) > 0)


def _from_means(canaries: Canaries) -> CanaryBound:
    """The shortest length that the account would need to explain the difference of means."""
    quantile = float(special.ndtri(CONFIDENCE))

    def least(member: BoolArray) -> FloatArray:
        difference, error = separation(canaries.scores, member)
        return difference - quantile * error

    proven = float(least(canaries.member[None])[0])
    settings, shortest = canaries.settings, 1e-3
    epsilon = 0.0
    if proven > predicted_separation(settings, shortest):
        longest = 1.0
        while predicted_separation(settings, longest) < proven:
            longest *= 2
        length = optimize.brentq(
            lambda length: predicted_separation(settings, length) - proven,
            shortest,
            longest,
            xtol=1e-4,
        )
        log = _log_of(settings, length)
        table = account(log, delta=canaries.delta, accountant="pld")
        epsilon = float(table.epsilon_lower[0])
    return _bound("means", epsilon, least(_null_memberships(canaries)) > 0)


def _null_memberships(canaries: Canaries) -> BoolArray:
    """(NULL_TRIALS, n) fair coins that have nothing to do with the scores."""
    found: BoolArray = canaries.rng.random((NULL_TRIALS, len(canaries.scores))) < 0.5
    return found


def _bound(key: str, epsilon: float, alarms: BoolArray) -> CanaryBound:
    interval = clopper_pearson(int(alarms.sum()), len(alarms))
    return CanaryBound(key, epsilon, float(alarms.mean()), interval)


@dataclass(frozen=True)
class Method:
    """A way to bound epsilon from the scores of canaries.

    Attributes:
        title: in a few words.
        assumption: what it takes for granted.
        bound: from the canaries of one length.
    """

    title: str
    assumption: str
    bound: Callable[[Canaries], CanaryBound]


BOUNDS = {
    "steinke2023": Method(
        "one run, any mechanism (Steinke et al. 2023)",
        "nothing but fair coins",
        partial(_from_one_run, "steinke2023"),
    ),
    "mahloujifar2024": Method(
        "one run, f-DP (Mahloujifar et al. 2024)",
        "fair coins; the run's trade-off curve is that of a Gaussian mechanism",
        partial(_from_one_run, "mahloujifar2024"),
    ),
    "rates": Method(
        "rates at fixed thresholds (Clopper and Pearson), Gaussian DP",
        "scores are independent; the trade-off curve is that of a Gaussian mechanism",
        _from_rates,
    ),
    "means": Method(
        "difference of mean scores",
        "scores are independent; the noise is Gaussian and what may be wrong is its scale",
        _from_means,
    ),
}
