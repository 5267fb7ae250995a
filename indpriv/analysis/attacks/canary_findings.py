"""What gradient canaries say about a run: bounds, and agreement with the account. Sensitive.

Canaries of one length in one run have independent scores, whose distributions the account predicts
exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special, stats

from indpriv._arrays import FloatArray, IntArray
from indpriv._checks import check_delta
from indpriv._formatting import format_epsilon, format_lower_bound
from indpriv._plain import Share
from indpriv.analysis.attacks.canary_bounds import (
    BOUNDS,
    Canaries,
    CanaryBound,
    epsilon_of_length,
    predicted_separation,
    separation,
)
from indpriv.analysis.attacks.rates import AttackMeasures, group_indices, measure_attack
from indpriv.analysis.attacks.simulated_evidence import simulated_evidence
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.statistics.intervals import CONFIDENCE, Interval
from indpriv.analysis.statistics.resampling import generator_of
from indpriv.analysis.summary import Audit, Finding
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.norm_log.step_settings import StepSettings

_SIMULATED = 20_000  # scores of each side, to compare distributions with
_LEAST = 8  # members, and others, of one length
SIGNIFICANCE = 1e-3  # of all tests of the account together
EACH_BY_ITSELF = (
    "Each lower bound holds with 95 % confidence by itself: among several, the largest one does "
    "not. Whether scores agree with the account is tested for all lengths together."
)


@dataclass(frozen=True)
class CanaryFindings:
    """What the canaries of one length say.

    Attributes:
        length: norm of their gradients over max_grad_norm.
        n_members, n_others: number of canaries in and out.
        ceiling: epsilon of the account for an example of this length in every step.
        bounds: each at 95 percent confidence by itself; the largest of several is none at 95.
        separation: mean score of members less that of others.
        separation_interval: of that difference, at 95 percent.
        separation_predicted: by the account.
        p_value: that scores deviate from the account as much as these do, the smallest of five
            tests times the tests of all lengths: of the difference of means, and of spread and
            distribution of each side.
        agrees: p_value is at least `SIGNIFICANCE`.
    """

    length: float
    n_members: int
    n_others: int
    ceiling: float
    bounds: tuple[CanaryBound, ...]
    separation: float
    separation_interval: Interval
    separation_predicted: float
    p_value: Share
    agrees: bool


@dataclass(frozen=True)
class CanaryResults:
    """What the gradient canaries of one run say.

    Attributes:
        delta: of every epsilon here.
        lengths: what the canaries of each length say, the shortest first.
        left_out: why other lengths are not judged, in sentences.
    """

    delta: float
    lengths: tuple[CanaryFindings, ...]
    left_out: tuple[str, ...]

    @property
    def agree(self) -> bool:
        """Whether the scores of every length agree with the account."""
        return all(found.agrees for found in self.lengths)


def measure_gradient_canaries(
    scores: AttackScores, settings: StepSettings, *, delta: float = 1e-5, seed: int = 0
) -> CanaryResults:
    """What the gradient canaries of a run prove, for each length with 8 canaries in and 8 out.

    Args:
        scores: RUN/gradient-canaries.parquet; groups are lengths.
        settings: of the run's steps, from its norm log.
        delta: of the epsilon that is bounded.
        seed: of the random choices of this analysis.

    Raises:
        InputError: scores of another attack.
    """
    delta = check_delta(delta)
    if scores.adversary != "updates" or scores.groups is None or not scores.fair_coins:
        raise InputError(
            f"scores of the attack {scores.method!r} are not those of gradient canaries; pass what "
            "a Recorder with attack=GradientCanaries(...) wrote"
        )
    judged: list[tuple[str, IntArray]] = []
    left_out: list[str] = []
    for name, index in group_indices(scores).items():
        inside, outside = (int((scores.member[index] == side).sum()) for side in (True, False))
        if min(inside, outside) >= _LEAST:
            judged.append((name, index))
            continue
        left_out.append(
            f"Canaries of length {name} have {inside} members and {outside} others; a bound needs "
            f"{_LEAST} of each: insert more."
        )
    found = []
    for name, index in judged:
        rng = generator_of(seed, name)
        canaries = Canaries(
            scores.scores[index],
            scores.member[index],
            settings,
            delta,
            len(scores.scores),
            rng,
            _simulated(settings, float(name), rng),
        )
        found.append(_findings(float(name), canaries, n_lengths=len(judged)))
    return CanaryResults(delta, tuple(sorted(found, key=lambda one: one.length)), tuple(left_out))


def _findings(length: float, canaries: Canaries, n_lengths: int) -> CanaryFindings:
    inside, outside = canaries.scores[canaries.member], canaries.scores[~canaries.member]
    difference, error = separation(canaries.scores, canaries.member[None])
    margin = float(special.ndtri((1 + CONFIDENCE) / 2) * error[0])
    predicted = predicted_separation(canaries.settings, length)
    simulated_in, simulated_out = canaries.predicted
    tests = [
        2 * float(special.ndtr(-abs(difference[0] - predicted) / error[0])),
        *(
            float(test(found, simulated).pvalue)
            for test in (stats.ks_2samp, _same_spread)
            for found, simulated in ((inside, simulated_in), (outside, simulated_out))
        ),
    ]
    p_value = min(1.0, n_lengths * len(tests) * min(tests))
    return CanaryFindings(
        length=length,
        n_members=len(inside),
        n_others=len(outside),
        ceiling=epsilon_of_length(canaries.settings, length, canaries.delta),
        bounds=tuple(method.bound(canaries) for method in BOUNDS.values()),
        separation=float(difference[0]),
        separation_interval=Interval(float(difference[0]) - margin, float(difference[0]) + margin),
        separation_predicted=predicted,
        p_value=p_value,
        agrees=p_value >= SIGNIFICANCE,
    )


def _simulated(
    settings: StepSettings, length: float, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Scores of members and of others, by the account."""
    member = np.repeat([True, False], _SIMULATED)
    scores = simulated_evidence(settings, length, member, rng)
    return scores[member], scores[~member]


def _same_spread(found: FloatArray, simulated: FloatArray) -> Any:
    """Test of Brown and Forsythe."""
    return stats.levene(found, simulated, center="median")


def _canaries(run: AuditedRun) -> dict[str, Any]:
    if (scores := run.recorded.canaries) is None:
        return {}
    return {"canaries": measure_attack(scores, delta=run.epsilons.account.delta, seed=run.seed)}


def _gradient_canaries(run: AuditedRun) -> dict[str, Any]:
    if (scores := run.recorded.gradient_canaries) is None:
        return {}
    delta, seed = run.epsilons.account.delta, run.seed
    found = measure_gradient_canaries(scores, run.log.settings, delta=delta, seed=seed)
    return {"gradient_canaries": found}


def _proven(audit: Audit) -> Iterator[str]:
    if (found := audit.canaries) is None:
        return
    proven, worst = found.overall["epsilon"].value, audit.guarantee.worst_case_epsilon
    if proven > worst:
        yield (
            "The canaries prove a worst-case epsilon of at least "
            f"{format_lower_bound(proven)}, above the {format_epsilon(worst)} accounted: the run "
            "or its account is wrong."
        )


def _contradicted(audit: Audit) -> Iterator[str]:
    for one in audit.gradient_canaries.lengths if audit.gradient_canaries else ():
        if not one.agrees:
            yield (
                f"Gradient canaries of length {one.length:g} contradict the account: the run or "
                "its account is wrong."
            )


FINDINGS = (
    Finding(
        "canaries",
        52,
        {
            "canaries": (
                AttackMeasures | None,
                "What canaries prove about the worst case; null where the run had none.",
            )
        },
        _canaries,
        alarms=_proven,
        watched="epsilon that canaries prove",
    ),
    Finding(
        "gradient_canaries",
        54,
        {
            "gradient_canaries": (
                CanaryResults | None,
                "What gradient canaries prove, beside the account; null where the run had none.",
            )
        },
        _gradient_canaries,
        alarms=_contradicted,
        watched="gradient canaries agree with the account",
    ),
)
