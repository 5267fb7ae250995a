"""Does an attack succeed where individual epsilon is large? Sensitive.

Members are binned by their individual epsilon, non-members by the epsilon they would have had on
the same trajectory. For a random member and a random non-member, (epsilon,
delta)-indistinguishability at the bin's upper edge would imply

    P[in the bin and accused | member] <= e^epsilon P[in the bin and accused | non-member] + delta,

that is, TPR <= e^epsilon FPR Q(bin) / P(bin) + delta / P(bin), where P and Q are the shares of
members and of non-members in the bin. Individual epsilon is output-specific and does not guarantee
this: a bin above its own limit is a place to look. The worst case does guarantee it: a bin above
that limit shows that the run or its account is wrong.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indpriv._arrays import BoolArray, FloatArray
from indpriv._checks import check_positive_int
from indpriv.analysis.statistics.binomial import clopper_pearson
from indpriv.analysis.statistics.bootstrap import CONFIDENCE, Interval
from indpriv.attack_scores import AttackScores
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError

TARGET_RATES = (0.01, 0.1, 0.5)  # false-positive rates that the thresholds aim at, fixed beforehand
_BINS = 10
_LEAST = 40  # with fewer members or non-members, no bin could show anything
_INTERVALS = "a binomial interval over examples"
_LARGEST_EXPONENT = 700.0  # e^700 is near the largest float


@dataclass(frozen=True)
class EpsilonBin:
    """One bin of individual epsilon under one threshold.

    Attributes:
        low, high: epsilon above low (or at 0) and at most high.
        n_members, n_nonmembers: number in the bin; non-members that chose the threshold are not
            counted.
        tpr: share of its members accused; None without members.
        tpr_interval: exact binomial, for this bin by itself.
        fpr: share of its non-members accused; None without non-members.
        reference: largest true-positive rate that an epsilon of `high` would allow at these rates,
            at most 1; None without members.
        worst_case_reference: the same for the worst-case epsilon.
        above_reference: the true-positive rate is above the limit by more than chance, corrected
            for all bins and thresholds: look here.
        above_worst_case: the same for the limit of the worst case: the run or its account is wrong.
    """

    low: float
    high: float
    n_members: int
    n_nonmembers: int
    tpr: float | None
    tpr_interval: Interval | None
    fpr: float | None
    reference: float | None
    worst_case_reference: float | None
    above_reference: bool
    above_worst_case: bool


@dataclass(frozen=True)
class ThresholdBins:
    """The bins under one threshold.

    Examples above it are accused, at most target_fpr of half of the non-members.
    """

    target_fpr: float
    threshold: float
    bins: tuple[EpsilonBin, ...]


@dataclass(frozen=True)
class AttackByEpsilon:
    """An attack by individual epsilon.

    Attributes:
        method: what produced the scores.
        worst_case_epsilon, delta: of the guarantee.
        confidence: that no bin under any threshold is called above a limit that holds.
        seed: of the split of the non-members; not a seed of training.
        thresholds: one entry for each intended false-positive rate.
    """

    method: str
    worst_case_epsilon: float
    delta: float
    confidence: float
    seed: int
    thresholds: tuple[ThresholdBins, ...]

    @property
    def findings(self) -> int:
        """Number of bins above the limit of the worst case, over all thresholds."""
        return sum(found.above_worst_case for part in self.thresholds for found in part.bins)

    @property
    def places_to_look(self) -> int:
        """Number of bins above their own limit, over all thresholds."""
        return sum(found.above_reference for part in self.thresholds for found in part.bins)


def attack_by_epsilon(
    scores: AttackScores,
    members: EpsilonTable,
    nonmember_epsilon: FloatArray,
    *,
    seed: int = 0,
    attacks: int = 1,
) -> AttackByEpsilon | None:
    """Compare an attack's success in bins of epsilon with what epsilon allows.

    Args:
        scores: of any attack; members in the order of their table, non-members in the order of
            nonmember_epsilon.
        members: epsilons of the members.
        nonmember_epsilon: (n_nonmembers,) the epsilons that they would have had on the same
            trajectory.
        seed: of the random half of the non-members that chooses the thresholds.
        attacks: number of attacks that this one was chosen from, which is corrected for.

    Returns:
        None with fewer than forty members or non-members.

    Raises:
        InputError: numbers that do not match, scores of an adversary whose scores are not
            independent, or of several models.
    """
    check_positive_int("seed", seed, minimum=0)
    scores.check_adversary(_INTERVALS, ("updates", "full"))
    scores.check_one_model(_INTERVALS)
    member = scores.member
    for side, count, found in (
        ("members", len(members), int(member.sum())),
        ("non-members", len(nonmember_epsilon), int((~member).sum())),
    ):
        if count != found:
            raise InputError(
                f"there are {found} scores of {side} and {count} epsilons; pass one epsilon for "
                "each score"
            )
    if min(len(members), len(nonmember_epsilon)) < _LEAST:
        return None
    mine, others = scores.scores[member], scores.scores[~member]
    order = np.random.default_rng(seed).permutation(len(others))
    choosing, reporting = order[: len(order) // 2], order[len(order) // 2 :]
    edges = epsilon_edges(members)
    tests = len(TARGET_RATES) * (len(edges) - 1) * attacks
    worst, delta = members.worst_case_epsilon, members.account.delta
    parts = []
    for rate in TARGET_RATES:
        threshold = float(np.sort(others[choosing])[::-1][int(rate * len(choosing))])
        accused = (mine > threshold, others[reporting] > threshold)
        epsilons = (members.epsilon, nonmember_epsilon[reporting])
        bins = [
            _bin(low, high, epsilons, accused, worst, delta, tests)
            for low, high in itertools.pairwise(edges)
        ]
        finite = threshold if np.isfinite(threshold) else float(np.sign(threshold)) * 1e308
        parts.append(ThresholdBins(rate, finite, tuple(bins)))
    return AttackByEpsilon(scores.method, worst, delta, CONFIDENCE, seed, tuple(parts))


def epsilon_edges(members: EpsilonTable) -> list[float]:
    """Edges of bins with about equal numbers of members; one bin for those at the worst case."""
    below = members.epsilon[~members.at_worst_case]
    inner = (
        np.quantile(below, np.linspace(0, 1, _BINS + 1)[1:], method="higher").tolist()
        if len(below)
        else []
    )
    top = max(members.worst_case_epsilon, float(members.epsilon.max()))
    return sorted({0.0, *inner, top})


def _bin(
    low: float,
    high: float,
    epsilons: Sequence[FloatArray],
    accused: Sequence[BoolArray],
    worst: float,
    delta: float,
    tests: int,
) -> EpsilonBin:
    inside = [((low < part) | (low == 0.0)) & (part <= high) for part in epsilons]
    totals = [len(part) for part in epsilons]
    counts = [int(part.sum()) for part in inside]
    hits = [int((part & named).sum()) for part, named in zip(inside, accused, strict=True)]
    level = 1 - (1 - CONFIDENCE) / tests
    least = clopper_pearson(hits[0], totals[0], level).low
    most = clopper_pearson(hits[1], totals[1], level).high
    share = counts[0] / totals[0]

    def allowed(epsilon: float, rate: float) -> float:
        return float(np.exp(min(epsilon, _LARGEST_EXPONENT)) * rate + delta)

    return EpsilonBin(
        low=low,
        high=high,
        n_members=counts[0],
        n_nonmembers=counts[1],
        tpr=hits[0] / counts[0] if counts[0] else None,
        tpr_interval=clopper_pearson(hits[0], counts[0]) if counts[0] else None,
        fpr=hits[1] / counts[1] if counts[1] else None,
        reference=min(1.0, allowed(high, hits[1] / totals[1]) / share) if share else None,
        worst_case_reference=min(1.0, allowed(worst, hits[1] / totals[1]) / share)
        if share
        else None,
        above_reference=least > allowed(high, most),
        above_worst_case=least > allowed(worst, most),
    )
