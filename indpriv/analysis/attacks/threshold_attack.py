"""The paper's membership test: the success rate of one threshold on an attack's scores, by group.

Sensitive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from indpriv._arrays import FloatArray
from indpriv._checks import check_positive_int
from indpriv._plain import Count, Share
from indpriv.analysis.attacks.rates import ALL, MIN_TRIALS, RATES, group_indices, table
from indpriv.analysis.statistics.intervals import clopper_pearson
from indpriv.analysis.statistics.resampling import generator_of
from indpriv.attack_scores import AttackScores

PROTOCOL = (
    "In each group, as many random members as non-members are taken. A random half of each chooses "
    "the threshold; the success rate is measured on the other half. Chance is 50 %."
)


@dataclass(frozen=True)
class UnequalAttack:
    """One-sided test of the most exposed group against all others, on all scores of the protocol.

    The group is chosen by mean individual epsilon, not by what the attack achieved. One threshold
    for all groups is chosen on each half and measured on the other, so that every score is guessed
    once. Fisher's exact test compares the two success rates.

    Attributes:
        model: "dp", or "non_dp" for the non-private baseline.
        by: the column of the groups.
        exposed: the group with the largest mean epsilon among those large enough to read.
        trials, successes: guesses on that group, and how many of them were right.
        rest_trials, rest_successes: the same of all other groups together.
        p_value: one-sided; not corrected for the number of groupings and models.
        chi_squared_p: of equal success rates of all readable groups of the table (one half of the
            scores, each group at its own threshold), by the chi-squared test; None where it is
            undefined.
    """

    model: str
    by: str
    exposed: str
    trials: Count
    successes: Count
    rest_trials: Count
    rest_successes: Count
    p_value: Share
    chi_squared_p: Share | None


_Half = tuple[FloatArray, FloatArray]  # scores of members and of as many non-members


def threshold_attack(
    scores: AttackScores,
    *,
    attack: str = "",
    model: str = "dp",
    by: str = "",
    seed: int = 0,
    by_epsilon: Sequence[str] = (),
) -> tuple[pd.DataFrame, UnequalAttack | None]:
    """Success rate of the best threshold, chosen on half of the scores and measured on the rest.

    After Yu et al., "Individual Privacy Accounting for Differentially Private Stochastic Gradient
    Descent" (arXiv 2206.02617v7): all non-members and as many random members.

    Args:
        scores: higher means more likely a member. Of two groups of different size the smaller is
            used whole.
        attack: its name; by default the method of the scores.
        model: which model the scores are of, "dp" or "non_dp".
        by: the column of the scores' groups, each of which is attacked by itself; "" for all
            examples together.
        seed: of the random choices. A group's choices depend only on the seed, its name and its
            size, so the same examples are drawn for a model and its non-private baseline.
        by_epsilon: groups that are large enough to read, the largest mean epsilon first; the first
            one with enough scores is tested against all others.

    Returns:
        rows of `RATES`, of the rate "success"; and the test of the most exposed group, None where
        there are no two groups to compare.

    Raises:
        InputError: a negative seed, scores of an adversary whose scores are not independent, or of
            several models.
    """
    check_positive_int("seed", seed, minimum=0)
    scores.check_adversary("a binomial interval over examples")
    scores.check_one_model("a binomial interval over examples")
    rows, counts, halves = [], {}, {}
    parts = group_indices(scores) if by else {None: np.arange(len(scores.scores))}
    for name, index in parts.items():
        member, values, rng = scores.member[index], scores.scores[index], generator_of(seed, name)
        mine, others = rng.permutation(values[member]), rng.permutation(values[~member])
        pairs = min(len(mine), len(others))
        half = pairs // 2
        chosen, rest = ((side[:half], side[half:pairs]) for side in (mine, others))
        pair = (chosen[0], rest[0]), (chosen[1], rest[1])
        right, n = _right(best_threshold(*pair[0]), pair[1]) if half else (0, 0)
        row: dict[str, Any] = {"attack": attack or scores.method, "model": model, "by": by}
        row |= {"part": ALL if name is None else name, "rate": "success", "n": n}
        row |= {"n_members": len(mine), "n_others": len(others)}
        row |= {"value": right / n, **vars(clopper_pearson(right, n))} if n else {}
        rows.append(row)
        if name is not None:
            counts[name], halves[name] = (right, n), pair
    return table(RATES, rows), _unequal(model, by, counts, halves, by_epsilon)


def _right(threshold: float, half: _Half) -> tuple[int, int]:
    """How many guesses of a threshold are right, and their number."""
    members, others = half
    right = int((members >= threshold).sum()) + int((others < threshold).sum())
    return right, len(members) + len(others)


def _unequal(
    model: str,
    by: str,
    counts: Mapping[str, tuple[int, int]],
    halves: Mapping[str, tuple[_Half, _Half]],
    by_epsilon: Sequence[str],
) -> UnequalAttack | None:
    """The test of the most exposed group; see `UnequalAttack`."""
    readable = {name: found for name, found in counts.items() if found[1] >= MIN_TRIALS}
    exposed = next((name for name in by_epsilon if name in readable), None)
    if exposed is None or len(readable) < 2:
        return None
    own, rest = np.zeros(2, int), np.zeros(2, int)
    for chosen in (0, 1):
        pooled = [
            np.concatenate([pair[chosen][side] for pair in halves.values()]) for side in (0, 1)
        ]
        threshold = best_threshold(*pooled)
        for name, pair in halves.items():
            guesses = np.array(_right(threshold, pair[1 - chosen]))
            own, rest = (own + guesses, rest) if name == exposed else (own, rest + guesses)
    counted = np.array([(right, trials - right) for right, trials in (own, rest)])
    p_value = stats.fisher_exact(counted, alternative="greater").pvalue
    return UnequalAttack(
        model=model,
        by=by,
        exposed=exposed,
        trials=int(own[1]),
        successes=int(own[0]),
        rest_trials=int(rest[1]),
        rest_successes=int(rest[0]),
        p_value=min(1.0, float(p_value)),
        chi_squared_p=_chi_squared(list(readable.values())),
    )


def _chi_squared(rows: Sequence[tuple[int, int]]) -> float | None:
    """Of a table of successes and failures; None where a row or a column would be empty."""
    right, trials = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0)
    if len(rows) < 2 or not 0 < right < trials:
        return None
    table = [(hits, n - hits) for hits, n in rows]
    return float(stats.chi2_contingency(table).pvalue)


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
