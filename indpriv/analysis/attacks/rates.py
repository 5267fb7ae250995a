"""What attacks achieve, as tidy tables: one row for each attack, part of the examples and rate.

Sensitive. indpriv/analysis/columns.toml describes the columns.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import expit, logit

from indpriv._checks import check_positive_int
from indpriv._plain import records
from indpriv._types import FloatArray, IntArray
from indpriv.analysis import statistics
from indpriv.analysis.statistics import generator_of
from indpriv.analysis.summary import RATES, record, table
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError

UnequalAttack: Any = record("unequal_attack")
# What matters is the rate at few false positives (Carlini et al. 2022, arXiv:2112.03570).
FALSE_POSITIVE_RATES = (0.001, 0.01)
MIN_TRIALS = 10  # with fewer guesses the result says more about these examples than about the group
ALL, UPDATES = "all examples", "longest canaries"  # parts that are no groups of a column
_COMMON = 0.01  # false-positive rate of the threshold that all groups share
_ROC_POINTS = 50
LARGEST_EXPONENT = 700.0  # e^700 is near the largest float
INTERVALS = "a binomial interval over examples"
_NO_SIDES = "there are no scores of models, or an attacked model has no members or no non-members"
_OVER_MODELS = ("auc", *(f"tpr_{rate:g}" for rate in FALSE_POSITIVE_RATES))
_GROUPS = 8  # of models that a jackknife leaves out
_LEAST_MODELS = 2  # and each has a reference where one group is left out
_Row = dict[str, Any]


def _rows_of(rates: pd.DataFrame, of: Mapping[str, str]) -> Iterator[Any]:
    for name, value in of.items():
        rates = rates[rates[name] == value]
    return records(rates)


def parts(rates: pd.DataFrame, **of: str) -> dict[str, dict[str, Any]]:
    """Part -> rate -> row, of those rows whose columns have these values; None for unknown."""
    found: dict[str, dict[str, Any]] = {}
    for row in _rows_of(rates, of):
        found.setdefault(row.part, {})[row.rate] = row
    return found


def interval(row: Any, prefix: str = "") -> statistics.Interval | None:
    """The interval of a row, by itself or ("joint_") with others; None where there is none."""
    low, high = (getattr(row, f"{prefix}{end}", None) for end in ("low", "high"))
    return None if low is None or high is None else statistics.Interval(low, high)


def achieved(rates: pd.DataFrame, **of: str) -> list[dict[str, Any]]:
    """One row for each attack, model and part of the rates whose columns have these values.

    A rate is three keys: "auc", "auc_interval" and "auc_joint", and "auc_n" is what it is of.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in _rows_of(rates, of):
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
    uniques, codes = np.unique(scores.groups.astype(str), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    cuts = np.searchsorted(codes[order], np.arange(1, len(uniques)))
    return dict(zip(uniques.tolist(), np.split(order, cuts), strict=True))


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
    return table(RATES, rows)


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
    return table(RATES, rows)


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
    return table(RATES, rows)


def _of_model(scores: AttackScores) -> FloatArray:
    """AUC and true-positive rates of one model, and how many members and others it has."""
    scores.check_adversary(INTERVALS)
    sides = [scores.scores[scores.member == side] for side in (True, False)]
    if not all(map(len, sides)):
        raise InputError(_NO_SIDES)
    curve = _curve(*sides)
    tprs = (curve.tpr[_strictest(curve, rate)] for rate in FALSE_POSITIVE_RATES)
    return np.array([_auc(curve)[0], *tprs, *map(len, sides)])


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


def exceeds(
    scores: AttackScores, guarantee: tuple[float, float], *, tests: int, seed: int = 0
) -> bool:
    """Whether accusations refute (epsilon, delta), corrected for `tests` attacks and thresholds.

    A random half of the non-members chooses each threshold. Members and non-members are examples of
    one model: the limit holds for each example over runs, and these rates are means over examples.
    """
    scores.check_adversary(INTERVALS, ("updates", "full"))
    members, others = (scores.scores[scores.member == side] for side in (True, False))
    if not len(members) or len(others) < 2:
        return False
    choosing, rest = halves(others, seed)
    level = bonferroni(tests * len(FALSE_POSITIVE_RATES))
    for rate in FALSE_POSITIVE_RATES:
        threshold = choosing[int(rate * len(choosing))]
        hits = int((members > threshold).sum()), int((others[rest] > threshold).sum())
        if refutes(guarantee, hits, (len(members), len(rest)), level):
            return True
    return False


def halves(others: FloatArray, seed: int) -> tuple[FloatArray, IntArray]:
    """Scores of a random half of the others, which choose thresholds, and positions of the rest.

    The largest score is first: one at [k] accuses k of them, but for ties.
    """
    order, half = np.random.default_rng(seed).permutation(len(others)), len(others) // 2
    return np.sort(others[order[:half]])[::-1], order[half:]


def refutes(
    guarantee: tuple[float, float], hits: tuple[int, int], n: tuple[int, int], level: float
) -> bool:
    """Whether accusations of members and of others, of so many each, refute (epsilon, delta)."""
    least = statistics.clopper_pearson(hits[0], n[0], level).low
    most = statistics.clopper_pearson(hits[1], n[1], level).high
    epsilon, delta = guarantee
    return least > math.exp(min(epsilon, LARGEST_EXPONENT)) * most + delta


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
    """How many members and others have each distinct score, smallest score first.

    fpr, tpr: of every threshold, of which the first accuses no example.
    """

    scores: FloatArray
    members: FloatArray
    others: FloatArray
    fpr: FloatArray
    tpr: FloatArray


def _curve(members: FloatArray, others: FloatArray) -> _Curve:
    distinct, codes = np.unique(np.concatenate([members, others]), return_inverse=True)
    sides = (codes[: len(members)], codes[len(members) :])
    counts = [np.bincount(side, minlength=len(distinct)).astype(np.float64) for side in sides]
    tpr, fpr = (np.concatenate([[0.0], np.cumsum(of[::-1])]) / of.sum() for of in counts)
    return _Curve(distinct, counts[0], counts[1], fpr, tpr)


def separation(
    members: FloatArray,
    others: FloatArray,
    *,
    confidence: float = statistics.CONFIDENCE,
    tests: int | None = None,
) -> Iterator[_Row]:
    """Rows of AUC, true-positive rates and advantage: how well scores tell members from others.

    "Member" is guessed at or above a threshold; there are no rows without members or others.
    `confidence` is that of low and high, `tests` the number of attacks for which joint ends hold.

    Intervals of the AUC: DeLong, DeLong and Clarke-Pearson 1988, on the logit scale; of 0 or 1 the
    exact binomial one over as many pairs as are independent; none where all scores are equal. Of
    true-positive rates: at that false-positive rate of all possible non-members, whose threshold
    lies between two order statistics of these ones. Each end is that of the exact binomial interval
    at one of them; so both must be missed, and at 95 percent each the whole covers 97 to 100
    percent (simulated). Of the advantage: valid for all thresholds together (Dvoretzky, Kiefer and
    Wolfowitz; Massart 1990).
    """
    n, n_others = len(members), len(others)
    if not n or not n_others:
        return
    curve = _curve(members, others)
    auc, advantage = _auc(curve), float(np.max(curve.tpr - curve.fpr))
    found: list[tuple[str, float, int, Any]] = [
        ("auc", auc[0], n + n_others, lambda level: _auc_interval(*auc, min(n, n_others), level))
    ]
    for at in FALSE_POSITIVE_RATES:
        hits = np.round(curve.tpr[_strictest(curve, at)] * n)
        found.append((f"tpr_{at:g}", float(hits) / n, n, partial(_tpr_interval, curve, at)))
    sides = {"n_members": n, "n_others": n_others}
    row: _Row
    for rate, value, trials, ends in found:
        row = {"rate": rate, "value": value, "n": trials, **sides, **_ends(ends(confidence))}
        yield row if tests is None else row | _ends(ends(bonferroni(tests)), "joint_")
    band = sum(np.sqrt(np.log(4 / (1 - confidence)) / (2 * side)) for side in sides.values())
    row = {"rate": "advantage", "value": advantage, "n": n + n_others, **sides}
    yield row | {"low": max(0.0, advantage - band), "high": min(1.0, advantage + band)}


def _strictest(curve: _Curve, rate: float) -> int:
    """Position of the last threshold whose false-positive rate is not above this one."""
    return int(np.searchsorted(curve.fpr, rate, side="right")) - 1


def _ends(interval: statistics.Interval | None, prefix: str = "") -> dict[str, float]:
    return {} if interval is None else {f"{prefix}{end}": x for end, x in vars(interval).items()}


def _tpr_interval(curve: _Curve, rate: float, confidence: float) -> statistics.Interval:
    n_members, n_others = int(curve.members.sum()), int(curve.others.sum())
    ends = np.array([1 - confidence, 1 + confidence]) / 2
    false = (stats.binom.ppf(ends, n_others, rate) - [1, 0]) / n_others
    place = np.maximum(np.searchsorted(curve.fpr, false, side="right") - 1, 0)
    hits = np.round(curve.tpr[place] * n_members).tolist()
    low, high = (statistics.clopper_pearson(n, n_members, confidence) for n in hits)
    return statistics.Interval(low.low, high.high)


def _auc(curve: _Curve) -> tuple[float, float]:
    """The AUC and its variance."""
    n_members, n_others = int(curve.members.sum()), int(curve.others.sum())
    # For each distinct score: the share of the other side below it (or above it); ties count half.
    beaten = (np.cumsum(curve.others) - curve.others / 2) / n_others
    beating = 1 - (np.cumsum(curve.members) - curve.members / 2) / n_members
    # A whole number, so that an AUC of 1/2 is exact.
    doubled = curve.members @ (2 * np.cumsum(curve.others) - curve.others)
    variance = _variance_of_mean(beaten, curve.members) + _variance_of_mean(beating, curve.others)
    return float(doubled) / (2.0 * n_members * n_others), variance


def _auc_interval(
    auc: float, variance: float, pairs: int, confidence: float
) -> statistics.Interval | None:
    if auc in (0.0, 1.0):
        return statistics.clopper_pearson(pairs * auc, pairs, confidence)
    if variance == 0:
        return None
    width = stats.norm.ppf((1 + confidence) / 2) * np.sqrt(variance) / (auc * (1 - auc))
    return statistics.Interval(float(expit(logit(auc) - width)), float(expit(logit(auc) + width)))


def _variance_of_mean(values: FloatArray, counts: FloatArray) -> float:
    """Variance of the mean of values in [0, 1]; the largest possible for a single value."""
    n = float(counts.sum())
    if n < 2:
        return 0.25
    deviations = values - counts @ values / n
    return float(counts @ deviations**2) / (n - 1) / n


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
    parts = group_indices(scores) if by else {None: np.arange(len(scores.scores))}
    for name, index in parts.items():
        member, values, rng = scores.member[index], scores.scores[index], generator_of(seed, name)
        mine, others = rng.permutation(values[member]), rng.permutation(values[~member])
        pairs = min(len(mine), len(others))
        half = pairs // 2
        pair = (mine[:half], others[:half]), (mine[half:pairs], others[half:pairs])
        right, n = _right(best_threshold(*pair[0]), pair[1]) if half else (0, 0)
        row: _Row = {"attack": attack or scores.method, "model": model, "by": by}
        row |= {"part": ALL if name is None else name, "rate": "success", "n": n}
        row |= {"n_members": len(mine), "n_others": len(others)}
        rows.append(
            row | ({"value": right / n, **vars(statistics.clopper_pearson(right, n))} if n else {})
        )
        if name is not None:
            halves[name] = pair
            readable |= {name: (right, n - right)} if n >= MIN_TRIALS else {}
    found, exposed = table(RATES, rows), next((one for one in by_epsilon if one in readable), None)
    if exposed is None or len(readable) < 2:
        return found, None
    own, rest = np.zeros(2, int), np.zeros(2, int)
    for chosen in (0, 1):
        pooled = (
            np.concatenate([pair[chosen][side] for pair in halves.values()]) for side in (0, 1)
        )
        threshold = best_threshold(*pooled)
        for name, pair in halves.items():
            counts = own if name == exposed else rest
            counts += _right(threshold, pair[1 - chosen])
    counted = np.array([(right, trials - right) for right, trials in (own, rest)])
    guesses, chi_squared = np.array(list(readable.values())), None
    if guesses.sum(axis=0).all():  # right and wrong ones
        chi_squared = float(stats.chi2_contingency(guesses).pvalue)
    one_sided = stats.fisher_exact(counted, alternative="greater").pvalue
    return found, UnequalAttack(
        model=model,
        by=by,
        exposed=exposed,
        trials=int(own[1]),
        successes=int(own[0]),
        rest_trials=int(rest[1]),
        rest_successes=int(rest[0]),
        p_value=min(1.0, float(one_sided)),
        chi_squared_p=chi_squared,
    )


def _right(threshold: float, half: _Half) -> tuple[int, int]:
    """How many guesses of a threshold are right, and their number."""
    members, others = half
    right = int((members >= threshold).sum()) + int((others < threshold).sum())
    return right, len(members) + len(others)


def best_threshold(members: FloatArray, nonmembers: FloatArray) -> float:
    """The threshold with the most right guesses, the highest of several; infinity accuses nobody.

    >>> best_threshold(np.array([3.0, 2.0]), np.array([1.0, 0.0]))
    2.0
    """
    curve = _curve(members, nonmembers)
    gains = np.cumsum((curve.members - curve.others)[::-1])
    best = int(np.argmax(gains))
    return float(curve.scores[::-1][best]) if gains[best] > 0 else float("inf")
