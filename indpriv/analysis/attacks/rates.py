"""What attacks achieve, as tidy tables: one row for each attack, part of the examples and rate.

Sensitive. indpriv/analysis/columns.toml describes the columns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import optimize, stats
from scipy.special import expit, logit

from indpriv._checks import check_positive_int
from indpriv._plain import records
from indpriv._types import FloatArray, IntArray
from indpriv.analysis import statistics
from indpriv.analysis.attacks.lower_bound import rates_bound
from indpriv.analysis.statistics import generator_of
from indpriv.analysis.summary import RATES, record
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError

UnequalAttack: Any = record("unequal_attack")
# What matters is the rate at few false positives (Carlini et al. 2022, arXiv:2112.03570).
FALSE_POSITIVE_RATES = (0.001, 0.01)
MIN_TRIALS = 10  # with fewer guesses the result says more about these examples than about the group
ALL, UPDATES = "all examples", "longest canaries"  # parts that are no groups of a column
_COMMON = 0.01  # false-positive rate of the threshold that all groups share
_ROC_POINTS = 50
INTERVALS = "a binomial interval over examples"
_NO_SIDES = "there are no scores of models, or an attacked model has no members or no non-members"
_OVER_MODELS = ("auc", *(f"tpr_{rate:g}" for rate in FALSE_POSITIVE_RATES))
_GROUPS = 8  # of models that a jackknife leaves out
_LEAST_MODELS = 2  # and each has a reference where one group is left out
_Row = dict[str, Any]


def interval(row: Any, prefix: str = "") -> statistics.Interval | None:
    """The interval of a row, by itself or ("joint_") with others; None where there is none."""
    low, high = (getattr(row, f"{prefix}{end}", None) for end in ("low", "high"))
    return None if low is None or high is None else statistics.Interval(low, high)


def achieved(rates: pd.DataFrame, **of: str) -> list[dict[str, Any]]:
    """One row for each attack, model and part of the rates whose columns have these values.

    A rate is three keys: "auc", "auc_interval" and "auc_joint", and "auc_n" is what it is of.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, value in of.items():
        rates = rates[rates[name] == value]
    for row in records(rates):
        key = {name: getattr(row, name) for name in ("attack", "model", "by", "part")}
        one = found.setdefault(tuple(key.values()), key)
        one |= {row.rate: row.value, f"{row.rate}_n": row.n}
        one |= {f"{row.rate}_interval": interval(row), f"{row.rate}_joint": interval(row, "joint_")}
        one |= {"n_members": row.n_members, "n_others": row.n_others}
    return list(found.values())


def bonferroni(tests: int) -> float:
    """Confidence of each of several intervals that hold together."""
    return 1 - (1 - statistics.CONFIDENCE) / max(1, tests)


def group_indices(scores: AttackScores) -> dict[str, IntArray]:
    """Positions of the scores of each group, by sorted name; empty without groups."""
    if scores.groups is None:
        return {}
    names = pd.Series(scores.groups.astype(str))
    indices: Any = names.groupby(names.to_numpy()).indices
    return dict(sorted(indices.items()))


def rates_of(
    scores: AttackScores,
    *,
    attack: str = "",
    model: str = "dp",
    by: str = "",
    part: str = ALL,
    tests: int | None = None,
) -> pd.DataFrame:
    """AUC, true-positive rates and advantage of one attack on one model, as rows of `RATES`.

    None for a part without members or without others. by: the column of the scores' groups, each
    measured by itself; part: what all scores together are called without it; tests: number of
    attacks in all, for which joint intervals hold. InputError for scores that are not independent.
    """
    scores.check_adversary(INTERVALS)
    every = {part: np.arange(len(scores.scores))}
    rows: list[_Row] = []
    for name, index in (group_indices(scores) if by else every).items():
        member, values = scores.member[index], scores.scores[index]
        key = {"attack": attack or scores.method, "model": model, "by": by, "part": name}
        rows += [key | row for row in separation(values[member], values[~member], tests=tests)]
    return RATES.of_rows(rows)


def accused(scores: AttackScores, *, attack: str, by: str) -> pd.DataFrame:
    """Whom one threshold accuses: the one at which one non-member in a hundred is accused.

    In a group it accuses another share of them, which stands beside. Every interval is for one row
    alone. The scores are of one model, and `by` is the column of their groups.
    """
    others = np.sort(scores.scores[~scores.member])[::-1]
    rows: list[_Row] = []
    for name, index in group_indices(scores).items() if len(others) else ():
        above = scores.scores[index] > others[int(_COMMON * len(others))]
        sides = [above[scores.member[index] == side] for side in (True, False)]
        for rate, side in zip(("accused", "falsely_accused"), sides, strict=True):
            row: _Row = {"attack": attack, "model": "dp", "by": by, "part": name, "rate": rate}
            row |= {"n": len(side), "n_members": len(sides[0]), "n_others": len(sides[1])}
            row |= {"value": float(side.mean())} if len(side) else {}
            if rate == "accused" and len(side):
                row |= vars(statistics.clopper_pearson(int(side.sum()), len(side)))
            rows.append(row)
    return RATES.of_rows(rows)


def rates_on_updates(scores: AttackScores) -> pd.DataFrame:
    """Rates of gradient canaries of the largest length; no rows without members or others.

    Scores of the white-box attack are refused: those of one run are computed with the true noise,
    which they share. Ranked among each other, they give memberships away.
    """
    if scores.groups is not None:
        lengths = scores.groups.astype(np.float64)
        scores = scores.take(lengths == lengths.max(initial=0.0))
    return rates_of(scores, part=UPDATES)


def rates_over_models(
    scores: Iterable[AttackScores],
    again: Callable[[IntArray], Iterable[AttackScores]] | None = None,
) -> pd.DataFrame:
    """Means over models, each attacked with the others as references, with 95 percent intervals.

    Examples of one model share its noise, so that errors are over models, by Student's t. For
    attacks without references that is all. Models that are each other's references are not
    independent: `again` gives the scores of a study of these models alone (their positions, in
    order), and errors are a jackknife's, which leaves out one of up to eight groups of models after
    the other, both as targets and as references. They are never shorter than Student's. Simulated
    with 8 to 45 models (benchmarks/intervals.py), they cover 96 to 98 percent for AUCs and 94 to 99
    for true-positive rates, Student's alone 90 to 95; 99 and 80 for the AUC where nothing leaks.

    A rate that is the same in all models has none. One model's scores are held at once. InputError
    for no scores, a model with one side only, or scores that share the noise of training.
    """
    methods, of_models = list[str](), list[FloatArray]()
    for one in scores:
        methods.append(one.method)
        of_models.append(_of_model(one))
    if not methods:
        raise InputError(_NO_SIDES)
    (values, sides), n = np.split(np.stack(of_models), [-2], axis=1), len(methods)
    error = values.std(axis=0, ddof=min(1, n - 1)) / np.sqrt(n)
    width = statistics.student_quantile(n - 1) * error
    if again is not None and n > _LEAST_MODELS:
        width = np.maximum(width, _jackknife(values, again))
    key: _Row = {"attack": methods[0], "model": "dp", "by": "", "part": ALL, "n": n}
    key |= dict(zip(("n_members", "n_others"), sides.sum(axis=0).astype(int).tolist(), strict=True))
    rows = []
    for rate, mean, off in zip(_OVER_MODELS, values.mean(axis=0), width, strict=True):
        row = key | {"rate": rate, "value": float(mean)}
        row |= (
            {"low": max(0.0, float(mean - off)), "high": min(1.0, float(mean + off))}
            if n > 1 and off > 0
            else {}
        )
        rows.append(row)
    return RATES.of_rows(rows)


def _of_model(scores: AttackScores) -> FloatArray:
    """AUC and true-positive rates of one model, and how many members and others it has."""
    scores.check_adversary(INTERVALS)
    sides = [scores.scores[scores.member == side] for side in (True, False)]
    if not all(map(len, sides)):
        raise InputError(_NO_SIDES)
    curve = _curve(*sides)
    tprs = curve.tpr[curve.strictest(np.array(FALSE_POSITIVE_RATES))]
    return np.array([_auc(*sides)[0], *tprs, *map(len, sides)])


def _jackknife(
    values: FloatArray, again: Callable[[IntArray], Iterable[AttackScores]]
) -> FloatArray:
    """(n_rates,) half the width of intervals of the means of rates of models (n, n_rates).

    Of groups of unequal size, by pseudo-values (Busing, Meijer and van der Leeden 1999). What the
    rates have of pairs of models, a jackknife counts twice (Efron and Stein 1981). That errs on the
    safe side, and is little of an AUC. It is most of a true-positive rate, since a threshold jumps
    with each reference: there it is estimated, and counted once.
    """
    n = len(values)
    groups = np.array_split(np.arange(n), min(n, _GROUPS))
    k, size = len(groups), np.array([[n / len(group)] for group in groups])
    means = np.empty((k, values.shape[1]))  # without each group
    moved = np.full((k, *means.shape), np.nan)  # how far rates of one group are by another one
    for out, group in enumerate(groups):
        kept = np.delete(np.arange(n), group)
        found = np.stack([_of_model(one)[:-2] for one in again(kept)])
        means[out], by_group = found.mean(axis=0), np.full_like(values, np.nan)
        by_group[kept] = values[kept] - found
        for other in set(range(k)) - {out}:
            moved[other, out] = by_group[groups[other]].mean(axis=0)
    pseudo = size * values.mean(axis=0) - (size - 1) * means
    variance = ((pseudo - pseudo.mean(axis=0)) ** 2 / (size - 1)).mean(axis=0)
    if k > 3:
        variance[1:] -= _of_pairs(moved)[1:]
    return np.asarray(statistics.student_quantile(k - 1) * np.sqrt(np.maximum(variance, 0.0)))


def _of_pairs(moved: FloatArray) -> FloatArray:
    """(n_rates,) variance of a mean that comes from pairs of groups, and not from each alone.

    moved: (k, k, n_rates) how far the rates of a group are moved by another one, its references;
    NaN on the diagonal. A pair adds to the sum of all rates what each moves the other, beyond what
    other groups do. Least squares of two main effects, the same ones, leave what is the pair's own.
    """
    k = len(moved)
    effect = (k - 2) * (moved - np.nanmean(moved, axis=1, keepdims=True))
    pair = (effect + effect.transpose(1, 0, 2)) / 2
    total = np.nansum(pair, axis=1)
    alone = (total - total.sum(axis=0) / (2 * (k - 1))) / (k - 2)
    squares = np.nansum((pair - alone[:, None] - alone[None]) ** 2, axis=(0, 1)) / 2
    freedom = k * (k - 3) / 2  # pairs less main effects
    return np.asarray(2 * squares / freedom / (k * (k - 1)))


def exceeds(scores: AttackScores, guarantee: tuple[float, float], *, tests: int) -> bool:
    """Whether accusations refute (epsilon, delta), corrected for `tests` attacks: `rates_bound`.

    Members and non-members are examples of one model: the limit holds for each example over runs,
    and these rates are means over examples.
    """
    scores.check_adversary(INTERVALS, ("updates", "full"))
    epsilon, delta = guarantee
    return rates_bound(scores.scores, scores.member, delta, bonferroni(tests)) > epsilon


def roc(scores: AttackScores) -> tuple[tuple[float, float], ...]:
    """(false-positive rate, true-positive rate) of up to 50 thresholds, strictest first."""
    members, others = (scores.scores[scores.member == side] for side in (True, False))
    if not len(members) or not len(others):
        return ()
    curve = _curve(members, others)
    at = np.geomspace(1 / len(others), 1.0, _ROC_POINTS)
    shown = np.unique(np.searchsorted(curve.fpr, at, side="right") - 1)
    return tuple(zip(curve.fpr[shown].tolist(), curve.tpr[shown].tolist(), strict=True))


class _Curve(NamedTuple):
    """Rates of every threshold, strictest first: infinity, then each distinct score."""

    thresholds: FloatArray
    tpr: FloatArray
    fpr: FloatArray

    def strictest(self, rate: float | FloatArray) -> Any:
        """Position of the last threshold whose false-positive rate is not above this one."""
        return np.maximum(np.searchsorted(self.fpr, rate, side="right") - 1, 0)


def _curve(members: FloatArray, others: FloatArray) -> _Curve:
    distinct = np.unique(np.concatenate([members, others]))[::-1]
    counts = (len(side) - np.searchsorted(np.sort(side), distinct) for side in (members, others))
    rates = (np.concatenate([[0], of]) / of[-1] for of in counts)
    return _Curve(np.concatenate([[np.inf], distinct]), *rates)


def separation(
    members: FloatArray, others: FloatArray, *, tests: int | None = None
) -> Iterator[_Row]:
    """Rows of AUC, true-positive rates and advantage: how well scores tell members from others.

    "Member" is guessed at or above a threshold; there are no rows without members or others. Ends
    are at 95 percent; `tests` is the number of attacks for which joint ends hold.

    Intervals of the AUC: DeLong, DeLong and Clarke-Pearson 1988, on the logit scale, whose spread
    few or nearly separate scores understate, so not within that of Newcombe 2006 (method 5); of 0
    or 1 the exact binomial one over as many pairs as are independent; none where all scores are
    equal. At 95 percent they cover 92 or more (simulated, 2 to 1,000 scores of a side). Of
    true-positive rates: at that false-positive rate of all possible non-members, whose threshold
    lies between two order statistics of these ones. Each end is that of the exact binomial interval
    at one of them; so both must be missed, and at 95 percent each the whole covers 97 to 100
    percent (simulated). Of the advantage: valid for all thresholds together (Dvoretzky, Kiefer and
    Wolfowitz; Massart 1990).
    """
    n, n_others = len(members), len(others)
    if not n or not n_others:
        return
    curve, (auc, variance) = _curve(members, others), _auc(members, others)
    sides = {"n_members": n, "n_others": n_others}
    ends = partial(_auc_ends, auc, variance, n, n_others)
    found: list[tuple[str, float, int, Any]] = [("auc", auc, n + n_others, ends)]
    for at in FALSE_POSITIVE_RATES:
        tpr = float(curve.tpr[curve.strictest(at)])
        found.append((f"tpr_{at:g}", tpr, n, partial(_tpr_ends, curve, at, n, n_others)))
    levels = {"": statistics.CONFIDENCE} | ({} if tests is None else {"joint_": bonferroni(tests)})
    for rate, value, trials, ends in found:
        row: _Row = {"rate": rate, "value": value, "n": trials, **sides}
        for prefix, level in levels.items():
            row |= zip((f"{prefix}low", f"{prefix}high"), ends(level), strict=True)
        yield row
    advantage = float(np.max(curve.tpr - curve.fpr))
    band = sum(np.sqrt(np.log(4 / (1 - levels[""])) / (2 * side)) for side in sides.values())
    row = {"rate": "advantage", "value": advantage, "n": n + n_others, **sides}
    yield row | {"low": max(0.0, advantage - band), "high": min(1.0, advantage + band)}


def _tpr_ends(
    curve: _Curve, rate: float, n: int, n_others: int, confidence: float
) -> tuple[float, float]:
    ends = np.array([1 - confidence, 1 + confidence]) / 2
    false = (stats.binom.ppf(ends, n_others, rate) - [1, 0]) / n_others
    hits = np.round(curve.tpr[curve.strictest(false)] * n).tolist()
    low, high = (statistics.clopper_pearson(of, n, confidence) for of in hits)
    return low.low, high.high


def _auc(members: FloatArray, others: FloatArray) -> tuple[float, float]:
    """The AUC and its variance, the largest possible for a single value of one side."""
    n, n_others, ranks = len(members), len(others), stats.rankdata(np.r_[members, others])
    # For each score, the share of the other side below it (or above it); ties count half.
    beaten = (ranks[:n] - stats.rankdata(members)) / n_others
    beating = 1 - (ranks[n:] - stats.rankdata(others)) / n
    sides = ((of.var(ddof=1) if len(of) > 1 else 0.25) / len(of) for of in (beaten, beating))
    pairs = float(ranks[:n].sum()) - n * (n + 1) / 2  # exact, so that an AUC of 1/2 is exact
    return pairs / (n * n_others), float(sum(sides))


def _auc_ends(
    auc: float, variance: float, n: int, n_others: int, confidence: float
) -> tuple[float, float] | tuple[None, None]:
    if auc in (0.0, 1.0):
        exact = statistics.clopper_pearson((pairs := min(n, n_others)) * auc, pairs, confidence)
        return exact.low, exact.high
    if variance == 0:
        return None, None
    quantile, more = float(stats.norm.ppf((1 + confidence) / 2)), (n + n_others) / 2 - 1
    width = quantile * np.sqrt(variance) / (auc * (1 - auc))

    def excess(end: float) -> float:  # beyond the spread of exponential scores with this AUC
        of_pairs = 1 + more * ((1 - end) / (2 - end) + end / (1 + end))
        return (auc - end) ** 2 - quantile**2 * end * (1 - end) * of_pairs / (n * n_others)

    low, high = optimize.brentq(excess, 0.0, auc), optimize.brentq(excess, auc, 1.0)
    return min(low, float(expit(logit(auc) - width))), max(high, float(expit(logit(auc) + width)))


# --- the paper's membership test: the success rate of one threshold


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
    Descent" (arXiv 2206.02617v7): all non-members and as many random members; of two groups of
    different size the smaller is used whole. A group's choices depend only on the seed, its name
    and its size, so the same examples are drawn for a model and its non-private baseline.

    Returns rows of `RATES`, of the rate "success", and the test of the first group of `by_epsilon`
    (those large enough to read, the largest mean epsilon first) with enough scores against all
    others, None where there are no two groups. InputError for a negative seed or scores that are
    not independent.
    """
    check_positive_int("seed", seed, minimum=0)
    scores.check_adversary(INTERVALS)
    rows: list[_Row] = []
    readable, halves = dict[str, tuple[int, int]](), dict[str, tuple[_Half, _Half]]()
    parts = group_indices(scores) if by else {ALL: np.arange(len(scores.scores))}
    for name, index in parts.items():
        member, values = scores.member[index], scores.scores[index]
        rng = generator_of(seed, name if by else None)
        mine, others = (rng.permutation(values[member == side]) for side in (True, False))
        half = (pairs := min(len(mine), len(others))) // 2
        n = 2 * (pairs - half) if half else 0
        pair = (mine[:half], others[:half]), (mine[half:pairs], others[half:pairs])
        right = _right(best_threshold(*pair[0]), pair[1]) if n else 0
        row: _Row = {"attack": attack or scores.method, "model": model, "by": by, "part": name}
        row |= {"rate": "success", "n": n, "n_members": len(mine), "n_others": len(others)}
        exact = {"value": right / n, **vars(statistics.clopper_pearson(right, n))} if n else {}
        rows.append(row | exact)
        halves[name] = pair
        readable |= {name: (right, n - right)} if n >= MIN_TRIALS else {}
    found, exposed = RATES.of_rows(rows), next((one for one in by_epsilon if one in readable), None)
    if not by or exposed is None or len(readable) < 2:
        return found, None
    counts = {True: [0, 0], False: [0, 0]}  # right and wrong guesses on the exposed, and the rest
    for chosen in (0, 1):
        pooled = (np.concatenate([of[chosen][side] for of in halves.values()]) for side in (0, 1))
        threshold = best_threshold(*pooled)
        for name, pair in halves.items():
            right, n = _right(threshold, of := pair[1 - chosen]), len(of[0]) + len(of[1])
            counts[name == exposed][0] += right
            counts[name == exposed][1] += n - right
    guesses, chi_squared = np.array(list(readable.values())), None
    if guesses.sum(axis=0).all():  # right and wrong ones
        chi_squared = float(stats.chi2_contingency(guesses).pvalue)
    own, rest = counts[True], counts[False]
    one_sided = stats.fisher_exact(np.array([own, rest]), alternative="greater").pvalue
    return found, UnequalAttack(
        model=model,
        by=by,
        exposed=exposed,
        trials=sum(own),
        successes=own[0],
        rest_trials=sum(rest),
        rest_successes=rest[0],
        p_value=min(1.0, float(one_sided)),
        chi_squared_p=chi_squared,
    )


def _right(threshold: float, half: _Half) -> int:
    """How many guesses of a threshold are right."""
    members, others = half
    return int((members >= threshold).sum()) + int((others < threshold).sum())


def best_threshold(members: FloatArray, nonmembers: FloatArray) -> float:
    """The threshold with the most right guesses, the highest of several; infinity accuses nobody.

    >>> best_threshold(np.array([3.0, 2.0]), np.array([1.0, 0.0]))
    2.0
    """
    curve = _curve(members, nonmembers)
    gains = np.round(curve.tpr * len(members)) - np.round(curve.fpr * len(nonmembers))
    return float(curve.thresholds[np.argmax(gains)])
