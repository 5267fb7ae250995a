"""Whom attacks reach: the strongest by group, all by person. Sensitive.

One threshold serves all examples: the one at which one non-member in a hundred is accused. In a
group it accuses another share of them, which stands beside.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import BoolArray
from indpriv._plain import Count, Share
from indpriv.analysis.attacks.roc import discriminate
from indpriv.analysis.statistics.binomial import clopper_pearson
from indpriv.analysis.statistics.bootstrap import CONFIDENCE, Interval
from indpriv.attack_scores import AttackScores

_RATE = 0.01  # false-positive rate of the threshold, over all non-members


@dataclass(frozen=True)
class GroupRates:
    """Rates in one group.

    Attributes:
        by, name: the column and the group.
        n_members, n_nonmembers: number of scores.
        auc, auc_interval: within the group; None without members or non-members.
        tpr, tpr_interval: share of its members accused by this threshold, and the exact binomial
            interval.
        fpr: share of its non-members accused.
    """

    by: str
    name: str
    n_members: Count
    n_nonmembers: Count
    auc: Share | None
    auc_interval: Interval | None
    tpr: Share | None
    tpr_interval: Interval | None
    fpr: Share | None


@dataclass(frozen=True)
class StrongestAttack:
    """Whom the attack with the largest AUC reaches; every interval is for one row alone.

    Attributes:
        name: of the attack in the registry.
        groups: by column and name.
    """

    name: str
    groups: tuple[GroupRates, ...]


def strongest_attack(
    name: str, scores: AttackScores, groups: Mapping[str, NDArray[np.generic]]
) -> StrongestAttack:
    """Rates of one attack by group.

    Args:
        name: of the attack.
        scores: of one model, with example ids.
        groups: (n,) names of groups by column.
    """
    others = np.sort(scores.scores[~scores.member])[::-1]
    if not len(others):
        return StrongestAttack(name, ())
    accused = scores.scores > others[int(_RATE * len(others))]
    rows = [
        _group(by, str(group), scores, names == group, accused)
        for by, names in groups.items()
        for group in sorted(set(names.tolist()), key=str)
    ]
    return StrongestAttack(name, tuple(rows))


def _group(
    by: str, name: str, scores: AttackScores, inside: BoolArray, accused: BoolArray
) -> GroupRates:
    members, others = inside & scores.member, inside & ~scores.member
    found = discriminate(scores.scores[members], scores.scores[others], with_roc=False)
    n_members, n_others, hits = int(members.sum()), int(others.sum()), int(accused[members].sum())
    return GroupRates(
        by=by,
        name=name,
        n_members=n_members,
        n_nonmembers=n_others,
        auc=None if found is None else found.auc,
        auc_interval=None if found is None else found.auc_interval,
        tpr=hits / n_members if n_members else None,
        tpr_interval=clopper_pearson(hits, n_members) if n_members else None,
        fpr=float(accused[others].mean()) if n_others else None,
    )


@dataclass(frozen=True)
class UnitRates:
    """Rates of one attack, by one rule, on units and on groups of non-members of their sizes.

    Attributes:
        name: of the attack in the registry.
        rule: how the scores of a unit's rows become one, of `indpriv.attacks.units.UNIT_RULES`.
        n_units, n_groups: number of units, and of groups of non-members.
        auc, auc_interval: of the calibrated scores; None without units or groups.
        tpr, tpr_interval: at a false-positive rate of 1 percent.
    """

    name: str
    rule: str
    n_units: Count
    n_groups: Count
    auc: Share | None
    auc_interval: Interval | None
    tpr: Share | None
    tpr_interval: Interval | None


def unit_rates(name: str, rule: str, scores: AttackScores, *, tests: int) -> UnitRates:
    """Rates of scores of units; intervals hold for this number of tests together (Bonferroni)."""
    units, groups = (scores.scores[scores.member == side] for side in (True, False))
    level = 1 - (1 - CONFIDENCE) / tests
    found = discriminate(units, groups, with_roc=False, confidence=level)
    return UnitRates(
        name=name,
        rule=rule,
        n_units=len(units),
        n_groups=len(groups),
        auc=None if found is None else found.auc,
        auc_interval=None if found is None else found.auc_interval,
        tpr=None if found is None else found.tpr_at_fpr["0.01"],
        tpr_interval=None if found is None else found.tpr_at_fpr_intervals["0.01"],
    )
