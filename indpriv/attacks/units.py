"""Scores of people with several rows, from the scores of their rows. Sensitive."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._checks import check_choice
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError


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
    rows, inside = np.bincount(codes, minlength=n), np.bincount(codes, scores.member, n)
    if split := int(((inside > 0) & (inside < rows)).sum()):
        raise InputError(
            f"{split} units have both members and non-members; attack whole units, whose rows are "
            "all in the training data or all outside"
        )
    return replace(
        scores,
        scores=UNIT_RULES[rule](scores.scores, codes, n),
        member=inside > 0,
        groups=None,
        example_ids=np.asarray(units),
        model=None if scores.model is None else scores.model[:1].repeat(n),
    )
