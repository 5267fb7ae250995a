"""The paper's membership test: the success rate of one threshold on an attack's scores, by group.

Sensitive.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv._checks import check_positive_int
from indpriv._plain import Count, Share
from indpriv.analysis.attacks.measures import MIN_TRIALS, OVERALL, group_indices
from indpriv.analysis.attacks.roc import Discrimination, discriminate
from indpriv.analysis.statistics.binomial import clopper_pearson
from indpriv.analysis.statistics.bootstrap import CONFIDENCE, Interval, generator_of
from indpriv.attack_scores import AttackScores

PROTOCOL = (
    "In each group, as many random members as non-members are taken. A random half of each chooses "
    "the threshold; the success rate is measured on the other half. Chance is 50 %."
)


@dataclass(frozen=True)
class AttackRow:
    """Success of a threshold on one group.

    Attributes:
        name: the group.
        n_members, n_nonmembers: number of scores; equal numbers of both are used.
        trials: number of guesses, half on members and half on non-members; 0 where there are too
            few scores.
        successes: number of guesses that were right.
        success_rate: None without trials.
        interval: exact binomial (Clopper and Pearson 1934), of the success rate; None without
            trials.
        too_small: fewer than ten trials, too few to read.
        discrimination: over all thresholds and all scores; the curve itself for all examples only.
    """

    name: str
    n_members: Count
    n_nonmembers: Count
    trials: Count
    successes: Count
    success_rate: Share | None
    interval: Interval | None = field(metadata={"flatten": True})
    too_small: bool
    discrimination: Discrimination | None


@dataclass(frozen=True)
class ThresholdAttack:
    """Success of one attack on one model.

    Attributes:
        method: what produced the scores.
        model: "dp", or "non_dp" for the non-private baseline.
        by: the column of the groups; "" where only all examples together were attacked.
        protocol: how the success rate is measured.
        caveat: what a reader must know about this attack.
        seed: of the random choice of members and halves: an analysis seed, not one of training.
        confidence: of each interval by itself.
        overall: all examples together.
        rows: one per group, most successful first.
    """

    method: str
    model: str
    by: str
    protocol: str
    caveat: str
    seed: int
    confidence: Share
    overall: AttackRow
    rows: tuple[AttackRow, ...]


def threshold_attack(
    scores: AttackScores,
    *,
    model: str = "dp",
    by: str = "",
    caveat: str = "",
    seed: int = 0,
    overall: AttackRow | None = None,
) -> ThresholdAttack:
    """Success rate of the best threshold, chosen on half of the scores and measured on the rest.

    After Yu et al., "Individual Privacy Accounting for Differentially Private Stochastic Gradient
    Descent" (arXiv 2206.02617v7): all non-members and as many random members.

    Args:
        scores: higher means more likely a member. Of two groups of different size the smaller is
            used whole.
        model: which model the scores are of, "dp" or "non_dp".
        by: the column that the groups of the scores come from.
        caveat: what a reader must know about this attack.
        seed: of the random choices. A group's choices depend only on the seed, its name and its
            size, so the same examples are drawn for a model and its non-private baseline.
        overall: the row of all examples, if another grouping of the same scores has computed it.

    Raises:
        InputError: a negative seed, scores of an adversary whose scores are not independent, or of
            several models.
    """
    check_positive_int("seed", seed, minimum=0)
    scores.check_adversary("a binomial interval over examples")
    scores.check_one_model("a binomial interval over examples")
    names, indices = group_indices(scores)
    rows = [
        _attack_group(name, scores, index, seed) for name, index in zip(names, indices, strict=True)
    ]
    return ThresholdAttack(
        method=scores.method,
        model=model,
        by=by,
        protocol=PROTOCOL,
        caveat=caveat,
        seed=seed,
        confidence=CONFIDENCE,
        overall=overall or _attack_group(None, scores, np.arange(len(scores.scores)), seed),
        rows=tuple(sorted(rows, key=lambda row: (-(row.success_rate or 0.0), row.name))),
    )


def _attack_group(
    group: str | None, scores: AttackScores, index: NDArray[np.int64], seed: int
) -> AttackRow:
    """The row of one group, or of all examples where group is None."""
    member, values = scores.member[index], scores.scores[index]
    rng = generator_of(seed, group)
    members, nonmembers = (rng.permutation(values[member == side]) for side in (True, False))
    pairs = min(len(members), len(nonmembers))
    half = pairs // 2
    trials = successes = 0
    if half:
        threshold = best_threshold(members[:half], nonmembers[:half])
        trials = 2 * (pairs - half)
        successes = int((members[half:pairs] >= threshold).sum())
        successes += int((nonmembers[half:pairs] < threshold).sum())
    return AttackRow(
        name=OVERALL if group is None else group,
        n_members=len(members),
        n_nonmembers=len(nonmembers),
        trials=trials,
        successes=successes,
        success_rate=successes / trials if trials else None,
        interval=clopper_pearson(successes, trials) if trials else None,
        too_small=trials < MIN_TRIALS,
        discrimination=discriminate(members, nonmembers, with_roc=group is None),
    )


def best_threshold(members: FloatArray, nonmembers: FloatArray) -> float:
    """The threshold with the most right guesses; infinity accuses no example.

    Among equally good thresholds the highest, which accuses the fewest examples.

    >>> best_threshold(np.array([3.0, 2.0]), np.array([1.0, 0.0]))
    2.0
    """
    values = np.concatenate([members, nonmembers])
    gains = np.concatenate([np.ones(len(members)), -np.ones(len(nonmembers))])
    order = np.argsort(-values, kind="stable")
    values, total = values[order], np.cumsum(gains[order])
    last_of_ties = np.append(values[1:] != values[:-1], True)
    candidates, gain = values[last_of_ties], total[last_of_ties]
    best = int(np.argmax(gain))
    return float(candidates[best]) if gain[best] > 0 else float("inf")
