"""How well scores separate members from non-members: ROC, AUC, true-positive rates and advantage.

Sensitive.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import expit, logit

from indpriv._arrays import FloatArray
from indpriv._plain import Share
from indpriv.analysis.statistics.binomial import clopper_pearson
from indpriv.analysis.statistics.bootstrap import CONFIDENCE, Interval

# What matters is the rate at few false positives (Carlini et al. 2022, arXiv:2112.03570).
FALSE_POSITIVE_RATES = (0.001, 0.01)
_ROC_POINTS = 50


@dataclass(frozen=True)
class Discrimination:
    """What thresholds on a score achieve; "member" is guessed at or above the threshold.

    Attributes:
        auc: probability that a member scores above a non-member; ties count half.
        auc_interval: DeLong, DeLong and Clarke-Pearson 1988, on the logit scale; for an AUC of 0 or
            1 the exact binomial interval over as many pairs as are independent; None where all
            scores are equal.
        tpr_at_fpr: true-positive rate of the lowest threshold whose false-positive rate is at most
            "0.001" and "0.01".
        tpr_at_fpr_intervals: of the true-positive rate at that false-positive rate of all possible
            non-members, whose threshold lies between two order statistics of these ones. Each end
            is that of the exact binomial interval at one of them; so both must be missed, and at 95
            percent each the whole covers 97 to 100 percent (simulated).
        advantage: largest difference of true- and false-positive rate over all thresholds. It is
            chosen on these scores, so it is above 0 even by chance.
        advantage_interval: valid for all thresholds together (Dvoretzky, Kiefer and Wolfowitz;
            Massart 1990).
        roc: (false-positive rate, true-positive rate) of up to 50 thresholds, strictest first;
            empty if not requested.
    """

    auc: Share
    auc_interval: Interval | None
    tpr_at_fpr: Mapping[str, float]
    tpr_at_fpr_intervals: Mapping[str, Interval]
    advantage: Share
    advantage_interval: Interval
    roc: tuple[tuple[float, float], ...]


def discriminate(
    members: FloatArray,
    nonmembers: FloatArray,
    *,
    with_roc: bool = True,
    confidence: float = CONFIDENCE,
) -> Discrimination | None:
    """Measure how well scores separate members from non-members; None without either.

    Args:
        members: (n_members,) their scores.
        nonmembers: (n_nonmembers,) their scores.
        with_roc: whether to include the points of the curve.
        confidence: of each interval.

    >>> discriminate(np.array([3.0, 2.0]), np.array([1.0, 0.0])).auc
    1.0
    """
    if not len(members) or not len(nonmembers):
        return None
    counts = _count(members, nonmembers)
    auc, interval = _auc(counts, confidence)
    fpr, tpr = _roc(counts)
    advantage = float(np.max(tpr - fpr))
    band = sum(
        np.sqrt(np.log(4 / (1 - confidence)) / (2 * len(side))) for side in (members, nonmembers)
    )
    at_fpr, at_fpr_intervals = {}, {}
    ends = np.array([1 - confidence, 1 + confidence]) / 2
    for rate in FALSE_POSITIVE_RATES:
        accused = (stats.binom.ppf(ends, len(nonmembers), rate) - [1, 0]) / len(nonmembers)
        place = np.searchsorted(fpr, [rate, *accused], side="right") - 1
        hits = np.round(tpr[np.maximum(place, 0)] * len(members)).tolist()
        low, high = (clopper_pearson(n, len(members), confidence) for n in hits[1:])
        at_fpr[f"{rate:g}"] = hits[0] / len(members)
        at_fpr_intervals[f"{rate:g}"] = Interval(low.low, high.high)
    shown = np.unique(
        np.searchsorted(fpr, np.geomspace(1 / len(nonmembers), 1.0, _ROC_POINTS), side="right") - 1
    )
    return Discrimination(
        auc=auc,
        auc_interval=interval,
        tpr_at_fpr=at_fpr,
        tpr_at_fpr_intervals=at_fpr_intervals,
        advantage=advantage,
        advantage_interval=Interval(max(0.0, advantage - band), min(1.0, advantage + band)),
        roc=tuple(zip(fpr[shown].tolist(), tpr[shown].tolist(), strict=True)) if with_roc else (),
    )


@dataclass(frozen=True)
class _Counts:
    """How many members and non-members have each distinct score, smallest score first."""

    members: FloatArray
    nonmembers: FloatArray


def _count(members: FloatArray, nonmembers: FloatArray) -> _Counts:
    distinct, codes = np.unique(np.concatenate([members, nonmembers]), return_inverse=True)
    sides = (codes[: len(members)], codes[len(members) :])
    found = [np.bincount(side, minlength=len(distinct)).astype(np.float64) for side in sides]
    return _Counts(found[0], found[1])


def _roc(counts: _Counts) -> tuple[FloatArray, FloatArray]:
    """False- and true-positive rates of every threshold; the first accuses no example."""
    rates = [
        np.concatenate([[0.0], np.cumsum(side[::-1])]) / side.sum()
        for side in (counts.nonmembers, counts.members)
    ]
    return rates[0], rates[1]


def _auc(counts: _Counts, confidence: float) -> tuple[float, Interval | None]:
    n_members, n_nonmembers = int(counts.members.sum()), int(counts.nonmembers.sum())
    # For each distinct score: the share of the other side below it (or above it); ties count half.
    beaten = (np.cumsum(counts.nonmembers) - counts.nonmembers / 2) / n_nonmembers
    beating = 1 - (np.cumsum(counts.members) - counts.members / 2) / n_members
    # A whole number, so that an AUC of 1/2 is exact.
    doubled = counts.members @ (2 * np.cumsum(counts.nonmembers) - counts.nonmembers)
    auc = float(doubled) / (2.0 * n_members * n_nonmembers)
    if auc in (0.0, 1.0):
        pairs = min(n_members, n_nonmembers)
        return auc, clopper_pearson(pairs * auc, pairs, confidence)
    variance = _variance_of_mean(beaten, counts.members) + _variance_of_mean(
        beating, counts.nonmembers
    )
    if variance == 0:
        return auc, None
    width = stats.norm.ppf((1 + confidence) / 2) * np.sqrt(variance) / (auc * (1 - auc))
    return auc, Interval(float(expit(logit(auc) - width)), float(expit(logit(auc) + width)))


def _variance_of_mean(values: FloatArray, counts: FloatArray) -> float:
    """Variance of the mean of values in [0, 1]; the largest possible for a single value."""
    n = float(counts.sum())
    if n < 2:
        return 0.25
    deviations = values - counts @ values / n
    return float(counts @ deviations**2) / (n - 1) / n
