"""Scores of people with several rows, from the scores of their rows. Sensitive."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._checks import check_choice
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import split_units
from indpriv.errors import InputError

_DRAWS = 999  # random groups of each size


def _largest(scores: FloatArray, codes: IntArray, n: int) -> FloatArray:
    found = np.full(n, -np.inf)
    np.maximum.at(found, codes, scores)
    return found


def _mean(scores: FloatArray, codes: IntArray, n: int) -> FloatArray:
    return np.asarray(np.bincount(codes, scores, n) / np.bincount(codes, minlength=n))


def _log_sum(scores: FloatArray, codes: IntArray, n: int) -> FloatArray:
    top = _largest(scores, codes, n)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.bincount(codes, np.exp(scores - shift[codes]), n)) + shift)


UNIT_RULES: dict[str, Callable[[FloatArray, IntArray, int], FloatArray]] = {
    "max": _largest,
    "mean": _mean,
    "log_sum": _log_sum,
}


def unit_scores(
    scores: AttackScores, unit_ids: NDArray[np.generic], rule: str = "mean"
) -> AttackScores:
    """One score for each unit, by a rule that must be chosen before looking at the scores.

    Args:
        scores: of the rows of one model.
        unit_ids: (n,) whose row each score is of.
        rule: "max", "mean" or "log_sum" (logarithm of the sum of exponentials).

    Returns:
        scores whose example_ids are the units. Groups are left out: rows of a unit may differ.

    Raises:
        InputError: scores of several models, or a unit with members and non-members.
    """
    check_choice("rule", rule, UNIT_RULES)
    scores.check_one_model("a score of a unit")
    codes, units = pd.factorize(unit_ids)
    if len(codes) != len(scores.scores):
        raise InputError(f"there are {len(codes)} unit ids for {len(scores.scores)} scores")
    n = len(units)
    if split := split_units(codes, scores.member):
        raise InputError(
            f"{split} units have both members and non-members; attack whole units, whose rows are "
            "all in the training data or all outside"
        )
    return replace(
        scores,
        scores=UNIT_RULES[rule](scores.scores, codes, n),
        member=np.bincount(codes, scores.member, n) > 0,
        groups=None,
        example_ids=np.asarray(units),
        model=None if scores.model is None else scores.model[:1].repeat(n),
    )


def calibrated_unit_scores(
    scores: AttackScores, owners: NDArray[np.generic], rule: str = "mean", *, seed: int = 0
) -> AttackScores:
    """Scores of units beside groups of non-members, which have no owners.

    Non-members are put into random groups of as many rows as units have, each row in one group. A
    score is the rank of a unit or group among `_DRAWS` random groups of non-members of its own
    size, so that large and small units compare. It is calibrated if rows of a unit are no more
    alike than random rows are; where they are, ranks spread too widely on both sides of 1/2.

    Args:
        scores: of the rows of one model.
        owners: (n_members,) whose row each member is, in the order of the members.
        rule: one of `UNIT_RULES`, chosen before looking at the scores.
        seed: of the groups.

    Returns:
        scores from 0 to 1, units first; example_ids are the units, and "" for groups.

    Raises:
        InputError: scores of several models, or another number of owners.
    """
    check_choice("rule", rule, UNIT_RULES)
    scores.check_one_model("a score of a unit")
    mine, others = scores.scores[scores.member], scores.scores[~scores.member]
    if len(owners) != len(mine):
        raise InputError(f"there are {len(owners)} owners for {len(mine)} scores of members")
    codes, units = pd.factorize(owners)
    sizes = np.bincount(codes)
    rng = np.random.default_rng(seed)
    wanted = rng.permutation(sizes)
    groups = wanted[np.cumsum(wanted) <= len(others)]
    numbers = np.repeat(np.arange(len(groups)), groups)
    shuffled = rng.permutation(others)[: len(numbers)]
    combine = UNIT_RULES[rule]
    inside, outside = combine(mine, codes, len(units)), combine(shuffled, numbers, len(groups))
    raw = np.concatenate([inside, outside])
    size_of, ranks = np.concatenate([sizes, groups]), np.zeros(len(raw))
    for size in np.unique(size_of) if len(others) else ():
        drawn = others[rng.integers(0, len(others), _DRAWS * size)]
        null = np.sort(combine(drawn, np.repeat(np.arange(_DRAWS), size), _DRAWS))
        here = size_of == size
        sides = [np.searchsorted(null, raw[here], side) for side in ("left", "right")]
        ranks[here] = (sides[0] + sides[1]) / (2 * _DRAWS)
    return AttackScores(
        scores=ranks,
        member=np.arange(len(raw)) < len(units),
        method=f"{scores.method}, {rule} over the rows of a unit",
        example_ids=np.concatenate([np.asarray(units).astype(str), np.full(len(groups), "")]),
        adversary=scores.adversary,
    )
