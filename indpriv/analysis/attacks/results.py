"""What each attack achieved on a model, beside what the guarantee allows. Sensitive."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from indpriv._arrays import FloatArray
from indpriv._plain import Count, Share
from indpriv.analysis.attacks.ceilings import Ceilings
from indpriv.analysis.attacks.roc import FALSE_POSITIVE_RATES, Discrimination, discriminate
from indpriv.analysis.statistics.binomial import clopper_pearson
from indpriv.analysis.statistics.bootstrap import CONFIDENCE, Interval
from indpriv.attack_scores import AttackScores

_LARGEST_EXPONENT = 700.0  # e^700 is near the largest float


@dataclass(frozen=True)
class AttackResult:
    """What one attack achieved on one model.

    Attributes:
        name: of the attack in the registry.
        title: in a few words.
        model: "dp", or "non_dp" for the non-private baseline.
        adversary: what the attacker sees, one of `indpriv.attack_scores.ADVERSARIES`.
        references: number of reference models; 0 where the attack uses none.
        n_members, n_nonmembers: number of scores.
        discrimination: over all thresholds, without the curve; None without members or others.
        above_worst_case: the rates exceed what the worst case allows, by more than chance over all
            attacks: the run or its account is wrong, if the test examples were split off at
            random. Always false for the baseline.
        source: the paper that it follows.
        caveat: what a reader must know about its results.
        sees: what the attacker sees, one of `indpriv.attack_scores.RUNGS`; "" in older audits.
        auc_joint, tpr_joint: intervals of the AUC and of the true-positive rates that hold for all
            attacks of the audit together (Bonferroni), so also for the one with the largest AUC.
    """

    name: str
    title: str
    model: str
    adversary: str
    references: Count
    n_members: Count
    n_nonmembers: Count
    discrimination: Discrimination | None
    above_worst_case: bool
    source: str
    caveat: str
    sees: str = ""
    auc_joint: Interval | None = None
    tpr_joint: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def auc(self) -> float:
        """Area under the curve; 0 where there is none."""
        return 0.0 if self.discrimination is None else self.discrimination.auc


@dataclass(frozen=True)
class AttackResults:
    """Every attack that was run on one audited run.

    Attributes:
        results: attacks on this model, the strongest by AUC first, then those on the baseline.
        ceilings: what any attack can reach; None where the unit has several rows.
        unchecked: what could not be checked about the reference models, in sentences.
    """

    results: tuple[AttackResult, ...] = ()
    ceilings: Ceilings | None = None
    unchecked: tuple[str, ...] = ()

    def of(self, model: str) -> tuple[AttackResult, ...]:
        """The attacks on one model, the strongest first."""
        return tuple(found for found in self.results if found.model == model)

    @property
    def findings(self) -> int:
        """Number of attacks that exceed the worst case."""
        return sum(found.above_worst_case for found in self.results)


@dataclass(frozen=True)
class UpdateRates:
    """What an attacker achieves on gradient canaries who sees every noisy update of the run.

    Attributes:
        title: in a few words.
        n_members, n_nonmembers: number of canaries of the largest length.
        auc, auc_interval: area under the curve.
        tpr, tpr_interval: true-positive rate at 1 % false positives.
    """

    title: str
    n_members: Count
    n_nonmembers: Count
    auc: Share
    auc_interval: Interval | None
    tpr: Share
    tpr_interval: Interval


def rates_on_updates(scores: AttackScores) -> UpdateRates | None:
    """Rates of gradient canaries of the largest length; None without members or others.

    Raises:
        InputError: scores of the white-box attack. Those of one run are computed with the true
            noise, which they share: ranked among each other, they give memberships away.
    """
    scores.check_adversary("a rate of one run")
    member, values = scores.member, scores.scores
    if scores.groups is not None:
        lengths = scores.groups.astype(np.float64)
        longest = lengths == lengths.max(initial=0.0)
        member, values = member[longest], values[longest]
    found = discriminate(values[member], values[~member])
    if found is None:
        return None
    return UpdateRates(
        title=scores.method,
        n_members=int(member.sum()),
        n_nonmembers=int((~member).sum()),
        auc=found.auc,
        auc_interval=found.auc_interval,
        tpr=found.tpr_at_fpr["0.01"],
        tpr_interval=found.tpr_at_fpr_intervals["0.01"],
    )


def ranked(
    results: Sequence[AttackResult], ceilings: Ceilings | None, unchecked: Sequence[str] = ()
) -> AttackResults:
    """Results in the order of their AUC, those on the audited model first."""
    order = sorted(results, key=lambda found: (found.model != "dp", -found.auc, found.name))
    return AttackResults(tuple(order), ceilings, tuple(dict.fromkeys(unchecked)))


def attack_result(
    scores: AttackScores,
    *,
    name: str,
    model: str,
    references: int,
    guarantee: tuple[float, float],
    tests: int,
    source: str = "",
    caveat: str = "",
    sees: str = "",
    seed: int = 0,
) -> AttackResult:
    """Measure the scores of one attack.

    Args:
        scores: of one model.
        name: of the attack.
        model: "dp" or "non_dp".
        references: number of reference models.
        guarantee: worst-case epsilon and delta.
        tests: number of attacks in all, for which above_worst_case and the joint intervals are
            corrected.
        source: the paper that the attack follows.
        caveat: what a reader must know about it.
        sees: what the attacker sees.
        seed: of the half of the non-members that chooses thresholds.

    Raises:
        InputError: scores of an adversary whose scores are not independent, or of several models.
    """
    scores.check_adversary("a binomial interval over examples", ("updates", "full"))
    scores.check_one_model("a binomial interval over examples")
    members, others = (scores.scores[scores.member == side] for side in (True, False))
    found = discriminate(members, others)
    joint = discriminate(members, others, confidence=1 - (1 - CONFIDENCE) / tests)
    return AttackResult(
        name=name,
        title=scores.method,
        model=model,
        adversary=scores.adversary,
        references=references,
        n_members=len(members),
        n_nonmembers=len(others),
        discrimination=None if found is None else replace(found, roc=()),
        auc_joint=None if joint is None else joint.auc_interval,
        tpr_joint={} if joint is None else joint.tpr_at_fpr_intervals,
        above_worst_case=model == "dp" and _exceeds(members, others, guarantee, tests, seed),
        source=source,
        caveat=caveat,
        sees=sees,
    )


def _exceeds(
    members: FloatArray,
    others: FloatArray,
    guarantee: tuple[float, float],
    tests: int,
    seed: int,
) -> bool:
    """Whether accusations refute (epsilon, delta), corrected for attacks and thresholds.

    A random half of the non-members chooses each threshold. Members and non-members are examples of
    one model: the limit holds for each example over runs, and these rates are means over examples.
    """
    epsilon, delta = guarantee
    half = len(others) // 2
    if not half or not len(members):
        return False
    order = np.random.default_rng(seed).permutation(len(others))
    choosing, reporting = np.sort(others[order[:half]])[::-1], others[order[half:]]
    level = 1 - (1 - CONFIDENCE) / (tests * len(FALSE_POSITIVE_RATES))
    for rate in FALSE_POSITIVE_RATES:
        threshold = choosing[int(rate * half)]
        hits = int((members > threshold).sum()), int((reporting > threshold).sum())
        least = clopper_pearson(hits[0], len(members), level).low
        most = clopper_pearson(hits[1], len(reporting), level).high
        if least > math.exp(min(epsilon, _LARGEST_EXPONENT)) * most + delta:
            return True
    return False
