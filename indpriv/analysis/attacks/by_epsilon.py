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
from typing import Any

import numpy as np
import pandas as pd

from indpriv._arrays import FloatArray
from indpriv._checks import check_positive_int
from indpriv._plain import Columns, Count, Share
from indpriv.analysis.attacks.rates import bonferroni, table
from indpriv.analysis.statistics.intervals import clopper_pearson
from indpriv.attack_scores import AttackScores
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError

TARGET_RATES = (0.01, 0.1, 0.5)  # false-positive rates that the thresholds aim at, fixed beforehand
_BINS = 10
_LEAST = 40  # with fewer members or non-members, no bin could show anything
_INTERVALS = "a binomial interval over examples"
_LARGEST_EXPONENT = 700.0  # e^700 is near the largest float
BINS = Columns(
    "EpsilonBin",
    "One bin of individual epsilon under one threshold.",
    {
        "attack": (str, "What produced the scores."),
        "target_fpr": (Share, "The threshold accuses at most this share of those who chose it."),
        "threshold": (float, "Members are accused above it; half of the non-members chose it."),
        "above": (float, "Epsilon of the bin is above this, or 0."),
        "up_to": (float, "Epsilon of the bin is at most this."),
        "n_members": (Count, "Number of members in the bin."),
        "n_others": (Count, "Number of non-members in it that did not choose the threshold."),
        "tpr": (Share | None, "Share of its members accused; null without members."),
        "low": (Share | None, "Lower end of the exact 95 % interval, for this bin by itself."),
        "high": (Share | None, "Upper end of that interval."),
        "fpr": (Share | None, "Share of its non-members accused; null without non-members."),
        "reference": (Share | None, "Largest such share of members if up_to were a guarantee."),
        "worst_case_reference": (Share | None, "The same for the worst-case epsilon."),
        "above_reference": (bool, "Above it by more than chance in all rows together: look here."),
        "above_worst_case": (bool, "The same of the worst case: the run or its account is wrong."),
    },
)


def attack_by_epsilon(
    scores: AttackScores,
    members: EpsilonTable,
    nonmember_epsilon: FloatArray,
    *,
    seed: int = 0,
    attacks: int = 1,
) -> pd.DataFrame:
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
        rows of `BINS`; none with fewer than forty members or non-members.

    Raises:
        InputError: numbers that do not match, scores of an adversary whose scores are not
            independent, or of several models.
    """
    check_positive_int("seed", seed, minimum=0)
    scores.check_adversary(_INTERVALS, ("updates", "full"))
    scores.check_one_model(_INTERVALS)
    mine, others = (scores.scores[scores.member == side] for side in (True, False))
    for side, count, found in (
        ("members", len(members), len(mine)),
        ("non-members", len(nonmember_epsilon), len(others)),
    ):
        if count != found:
            raise InputError(
                f"there are {found} scores of {side} and {count} epsilons; pass one epsilon for "
                "each score"
            )
    if min(len(mine), len(others)) < _LEAST:
        return table(BINS)
    order = np.random.default_rng(seed).permutation(len(others))
    choosing, reporting = np.sort(others[order[: len(order) // 2]]), order[len(order) // 2 :]
    edges = epsilon_edges(members)
    level = bonferroni(len(TARGET_RATES) * (len(edges) - 1) * attacks)
    n, n_others = len(mine), len(reporting)
    rows = []
    for target, (low, high) in itertools.product(TARGET_RATES, itertools.pairwise(edges)):
        threshold = float(choosing[::-1][int(target * len(choosing))])
        inside, outside = (
            ((low < epsilon) | (low == 0.0)) & (epsilon <= high)
            for epsilon in (members.epsilon, nonmember_epsilon[reporting])
        )
        hits = int((inside & (mine > threshold)).sum())
        false = int((outside & (others[reporting] > threshold)).sum())
        least = clopper_pearson(hits, n, level).low
        most = clopper_pearson(false, n_others, level).high
        limits = (high, members.worst_case_epsilon)
        row: dict[str, Any] = {
            "attack": scores.method,
            "target_fpr": target,
            "threshold": threshold if np.isfinite(threshold) else np.sign(threshold) * 1e308,
            "above": low,
            "up_to": high,
            "n_members": int(inside.sum()),
            "n_others": int(outside.sum()),
        }
        for name, epsilon in zip(("reference", "worst_case_reference"), limits, strict=True):
            ratio, delta = np.exp(min(epsilon, _LARGEST_EXPONENT)), members.account.delta
            row[f"above_{name.removesuffix('_reference')}"] = least > ratio * most + delta
            if row["n_members"]:
                allowed = (ratio * (false / n_others) + delta) / (row["n_members"] / n)
                row[name] = min(1.0, allowed)
        if row["n_members"]:
            row |= {"tpr": hits / row["n_members"], **vars(clopper_pearson(hits, row["n_members"]))}
        rows.append(row | ({"fpr": false / row["n_others"]} if row["n_others"] else {}))
    return table(BINS, rows)


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
