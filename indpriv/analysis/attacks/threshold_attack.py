"""The paper's membership test: the success rate of one threshold on an attack's scores, by group.

Sensitive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

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
class UnequalAttack:
    """One-sided test of the most exposed group against all others, on all scores of the protocol.

    The group is chosen by mean individual epsilon, not by what the attack achieved. One threshold
    for all groups is chosen on each half and measured on the other, so that every score is guessed
    once. Fisher's exact test compares the two success rates.

    Attributes:
        exposed: the group with the largest mean epsilon among those large enough to read.
        trials, successes: guesses on that group, and how many of them were right.
        rest_trials, rest_successes: the same of all other groups together.
        p_value: one-sided; not corrected for the number of groupings and models.
        chi_squared_p: of equal success rates of all readable groups of the table (one half of the
            scores, each group at its own threshold), by the chi-squared test; None where it is
            undefined.
    """

    exposed: str
    trials: Count
    successes: Count
    rest_trials: Count
    rest_successes: Count
    p_value: Share
    chi_squared_p: Share | None


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
        unequal: test of the most exposed group against all others; None where there are no two
            groups to compare.
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
    unequal: UnequalAttack | None = None


def threshold_attack(
    scores: AttackScores,
    *,
    model: str = "dp",
    by: str = "",
    caveat: str = "",
    seed: int = 0,
    overall: AttackRow | None = None,
    by_epsilon: Sequence[str] = (),
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
        by_epsilon: groups that are large enough to read, the largest mean epsilon first; the first
            one with enough scores is tested against all others.

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
        unequal=_unequal(scores, dict(zip(names, indices, strict=True)), rows, by_epsilon, seed),
    )


def _unequal(
    scores: AttackScores,
    indices: dict[str, NDArray[np.int64]],
    rows: Sequence[AttackRow],
    by_epsilon: Sequence[str],
    seed: int,
) -> UnequalAttack | None:
    """The test of the most exposed group; see `UnequalAttack`."""
    readable = {row.name: row for row in rows if not row.too_small}
    exposed = next((name for name in by_epsilon if name in readable), None)
    if exposed is None or len(readable) < 2:
        return None
    halves = {
        name: _halves(*_shuffled(name, scores, index, seed)) for name, index in indices.items()
    }
    counts = {True: [0, 0], False: [0, 0]}
    for chosen in (0, 1):
        pooled = [
            np.concatenate([pair[chosen][side] for pair in halves.values()]) for side in (0, 1)
        ]
        threshold = best_threshold(*pooled)
        for name, pair in halves.items():
            members, nonmembers = pair[1 - chosen]
            right = int((members >= threshold).sum()) + int((nonmembers < threshold).sum())
            own = counts[name == exposed]
            own[0], own[1] = own[0] + right, own[1] + len(members) + len(nonmembers)
    table = [(row.successes, row.trials) for row in readable.values()]
    (own_right, own_n), (rest_right, rest_n) = counts[True], counts[False]
    return unequal_attack(exposed, (own_right, own_n), (rest_right, rest_n), table)


def unequal_attack(
    exposed: str, own: tuple[int, int], rest: tuple[int, int], rows: Sequence[tuple[int, int]]
) -> UnequalAttack:
    """Test whether an attack succeeds more often on one group than on all others.

    Args:
        exposed: the group, chosen before the attack.
        own: (successes, trials) on it.
        rest: the same on all other groups together.
        rows: the same of each readable group of the table, for the chi-squared test.

    >>> unequal_attack("a", (60, 100), (45, 100), [(30, 50), (20, 50)]).p_value < 0.05
    True
    """
    counts = np.array([(right, trials - right) for right, trials in (own, rest)])
    return UnequalAttack(
        exposed=exposed,
        trials=own[1],
        successes=own[0],
        rest_trials=rest[1],
        rest_successes=rest[0],
        p_value=min(1.0, float(stats.fisher_exact(counts, alternative="greater").pvalue)),
        chi_squared_p=_chi_squared(rows),
    )


def _chi_squared(rows: Sequence[tuple[int, int]]) -> float | None:
    """Of a table of successes and failures; None where a row or a column would be empty."""
    right, trials = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0)
    if len(rows) < 2 or not 0 < right < trials:
        return None
    table = [(hits, n - hits) for hits, n in rows]
    return float(stats.chi2_contingency(table).pvalue)


_Half = tuple[FloatArray, FloatArray]  # scores of members and of as many non-members


def _halves(members: FloatArray, nonmembers: FloatArray) -> tuple[_Half, _Half]:
    """Two halves of as many members as non-members, of scores in random order."""
    pairs = min(len(members), len(nonmembers))
    half = pairs // 2
    return (members[:half], nonmembers[:half]), (members[half:pairs], nonmembers[half:pairs])


def _shuffled(
    group: str | None, scores: AttackScores, index: NDArray[np.int64], seed: int
) -> _Half:
    """Scores of members and of non-members of a group, in random order."""
    member, values = scores.member[index], scores.scores[index]
    rng = generator_of(seed, group)
    return rng.permutation(values[member]), rng.permutation(values[~member])


def _attack_group(
    group: str | None, scores: AttackScores, index: NDArray[np.int64], seed: int
) -> AttackRow:
    """The row of one group, or of all examples where group is None."""
    members, nonmembers = _shuffled(group, scores, index, seed)
    (choosing, others), (mine, theirs) = _halves(members, nonmembers)
    trials = successes = 0
    if len(choosing):
        threshold = best_threshold(choosing, others)
        trials = 2 * len(mine)
        successes = int((mine >= threshold).sum()) + int((theirs < threshold).sum())
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
