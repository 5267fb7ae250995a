"""What an attack's scores prove: discrimination and a lower bound on epsilon. Sensitive.

Reads only AttackScores, from any source.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import IntArray
from indpriv._checks import check_delta, check_positive_int
from indpriv.analysis.attacks.lower_bound import LEAST_GUESSES, NULL_TRIALS, LowerBound, lower_bound
from indpriv.analysis.attacks.roc import Discrimination, discriminate
from indpriv.analysis.statistics.bootstrap import CONFIDENCE, generator_of
from indpriv.attack_scores import AttackScores

MIN_TRIALS = 10  # with fewer guesses the result says more about these examples than about the group
OVERALL = "all examples"
ONE_RUN = "one run with independent fair coins (Steinke, Nasr and Jagielski 2023)"
BALANCED = (
    "one run (Steinke, Nasr and Jagielski 2023), on equal numbers of random members and "
    "non-members, as if fair coins had chosen them: valid if members were chosen at random"
)


@dataclass(frozen=True)
class AttackMeasure:
    """What one attack achieves on some examples.

    Attributes:
        name: the group, or "all examples".
        n_members, n_nonmembers: number of scores.
        too_small: fewer than ten members or non-members, too few to read.
        discrimination: None without members or without non-members.
        bound: lower bound on the worst-case epsilon; for a group, corrected for the number of
            groups.
    """

    name: str
    n_members: int
    n_nonmembers: int
    too_small: bool
    discrimination: Discrimination | None
    bound: LowerBound


@dataclass(frozen=True)
class AttackMeasures:
    """What one attack achieves.

    Attributes:
        attack: what produced the scores.
        method: how the lower bound is found, and what it assumes.
        confidence: of every interval by itself, of the overall bound, and of the bounds of all
            groups together.
        delta: of the (epsilon, delta) that is bounded.
        seed: of the analysis, not of training.
        null_trials: number of random memberships on which each false-alarm rate was measured.
        overall: all examples.
        groups: by name; empty where the scores have no groups.
    """

    attack: str
    method: str
    confidence: float
    delta: float
    seed: int
    null_trials: int
    overall: AttackMeasure
    groups: tuple[AttackMeasure, ...]


def measure_attack(scores: AttackScores, *, delta: float = 1e-5, seed: int = 0) -> AttackMeasures:
    """Measure an attack.

    The lower bound needs members that were chosen by fair coins. From other scores, equal numbers
    of random members and non-members are taken, so that unequal numbers cannot prove anything.

    Args:
        scores: of any attack; higher means more likely a member.
        delta: of the (epsilon, delta)-DP that is tested.
        seed: of the random choices: which scores are left out, and the order of ties.

    Raises:
        InputError: a delta outside (0, 1), a negative seed, scores of an adversary for whom the
            bound does not hold, or of several models.
    """
    delta = check_delta(delta)
    check_positive_int("seed", seed, minimum=0)
    scores.check_adversary("a lower bound from one run", ("full", "gradients"))
    scores.check_one_model("a lower bound from one run")
    names, indices = group_indices(scores)
    n_tested = sum(len(index) >= 2 * LEAST_GUESSES for index in indices)
    every = np.arange(len(scores.scores))
    return AttackMeasures(
        attack=scores.method,
        method=ONE_RUN if scores.fair_coins else BALANCED,
        confidence=CONFIDENCE,
        delta=delta,
        seed=seed,
        null_trials=NULL_TRIALS,
        overall=_measure(None, scores, every, delta, seed, CONFIDENCE),
        groups=tuple(
            _measure(name, scores, index, delta, seed, 1 - (1 - CONFIDENCE) / max(1, n_tested))
            for name, index in zip(names, indices, strict=True)
        ),
    )


def group_indices(scores: AttackScores) -> tuple[list[str], list[IntArray]]:
    """Sorted names of the groups and the positions of their scores; both empty without groups."""
    if scores.groups is None:
        return [], []
    uniques, codes = np.unique(scores.groups.astype(str), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    return uniques.tolist(), np.split(
        order, np.searchsorted(codes[order], np.arange(1, len(uniques)))
    )


def _measure(
    group: str | None,
    scores: AttackScores,
    index: IntArray,
    delta: float,
    seed: int,
    confidence: float,
) -> AttackMeasure:
    values, member = scores.scores[index], scores.member[index]
    rng = generator_of(seed, group)
    used = np.arange(len(index)) if scores.fair_coins else _balanced(member, rng)
    too_small = min(int(member.sum()), int((~member).sum())) < MIN_TRIALS
    return AttackMeasure(
        name=OVERALL if group is None else group,
        n_members=int(member.sum()),
        n_nonmembers=int((~member).sum()),
        too_small=too_small,
        discrimination=discriminate(values[member], values[~member], with_roc=group is None),
        bound=lower_bound(
            values[used],
            member[used],
            delta=delta,
            n_coins=len(scores.scores),
            rng=rng,
            balanced=not scores.fair_coins,
            confidence=confidence,
        ),
    )


def _balanced(member: NDArray[np.bool_], rng: np.random.Generator) -> IntArray:
    """Positions of equal numbers of random members and non-members."""
    sides = [rng.permutation(np.flatnonzero(member == side)) for side in (True, False)]
    pairs = min(map(len, sides))
    return np.concatenate([side[:pairs] for side in sides])
