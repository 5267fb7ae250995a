"""Attacks that compare a model with reference models: LiRA, calibration and RMIA. Sensitive.

Carlini, Chien, Nasr, Song, Terzis and Tramer 2022, "Membership Inference Attacks From First
Principles" (arXiv:2112.03570), and a version for few references, whose variances and effects are
shrunk towards those of all examples. Zarifzadeh, Liu and Shokri 2024, "Low-Cost High-Power
Membership Inference Attacks" (arXiv:2312.03262), algorithm 1.

Each attack takes signals of the target and of its references, and the row of the target. How many
references it needs at least is in attacks.toml; the registry counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import expit

from indpriv._types import FloatArray, IntArray
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals

_PRIOR_DEGREES = 4.0  # weight of the median variance
_SMALLEST = 1e-12  # variance, where all references agree
_LEAST_OTHERS = 2  # non-members that RMIA ranks among
_OFFLINE_A = 0.3  # the paper's, of RMIA
_TIE = 1e-9  # weight of RMIA's ratio itself, which orders equal ranks


@dataclass(frozen=True)
class Moments:
    """(2, n_examples) each, of references with a signal: trained on the example, and without it.

    Their number, the means of their signals (0 where there is none), and the sums of squared
    deviations from these means.
    """

    count: IntArray
    means: FloatArray
    squares: FloatArray

    @property
    def mean(self) -> FloatArray:
        """(n_examples,) of all references; NaN where there is none."""
        total, count = (self.count * self.means).sum(axis=0), self.count.sum(axis=0)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)


@dataclass(frozen=True)
class Effects:
    """How far being trained on moves each example's signal, in standard deviations; (n,) each.

    The variance is pooled within and without, and shrunk to the median. The effect is Hedges' 1981
    standardised mean difference, NaN where no reference has the example, or all do; `error` is its
    variance, 1 / n_in + 1 / n_out.
    """

    variance: FloatArray
    effect: FloatArray
    error: FloatArray

    @property
    def shrunk(self) -> FloatArray:
        """Effects shrunk to their weighted mean (DerSimonian and Laird 1986); never NaN."""
        known = np.isfinite(self.effect)
        if not known.any():
            return np.zeros(len(self.effect))
        effect, weight = self.effect[known], 1 / self.error[known]
        mean = float(effect @ weight / weight.sum())
        excess = float(weight @ (effect - mean) ** 2) - (len(effect) - 1)
        scale = float(weight.sum() - weight @ weight / weight.sum())
        between = max(0.0, excess / scale) if scale > 0 else 0.0
        shrunk = np.full(len(self.effect), mean)
        shrunk[known] += (effect - mean) * between * weight / (1 + between * weight)
        return shrunk


def moments(signals: AttackSignals, target: int | None = None) -> Moments:
    """Moments over all models but the target."""
    count, total, squares = signals.sums
    if target is not None:
        count, total, squares = signals.sums - signals.own_sums(target)
    means = total / np.maximum(count, 1)
    # Signals are less their mean, which keeps what is subtracted small.
    squares = np.maximum(squares - count * means**2, 0.0)
    return Moments(
        count.astype(np.int64), np.where(count > 0, means + signals.centre, 0.0), squares
    )


def effects(found: Moments) -> Effects:
    """Effects of being trained on, from the moments of references."""
    degrees = (found.count - (found.count > 0)).sum(axis=0)
    variance = _shrunk_variance(found.squares.sum(axis=0), degrees)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = (1 / found.count).sum(axis=0)
        difference = (found.means[0] - found.means[1]) / np.sqrt(variance)
    unbiased = 1 - 3 / (4 * (degrees + _PRIOR_DEGREES) - 1)
    return Effects(variance, np.where(np.isfinite(error), unbiased * difference, np.nan), error)


def _shrunk_variance(squares: FloatArray, degrees: IntArray) -> FloatArray:
    """Variances from sums of squares, shrunk to their median as if it had four degrees more."""
    known = degrees > 0
    median = float(np.median(squares[known] / degrees[known])) if known.any() else 1.0
    shrunk = (squares + _PRIOR_DEGREES * median) / (degrees + _PRIOR_DEGREES)
    return np.maximum(shrunk, _SMALLEST)


def scores_of_target(
    signals: AttackSignals, target: int, scores: FloatArray, method: str = ""
) -> AttackScores:
    """Scores of one target, without those that are NaN.

    They are scores of fair coins where such coins were flipped for each example. The memberships of
    an audited run are not such: they are its training and test sets.
    """
    known = ~np.isnan(scores)
    by_coins = signals.coins and signals.share == 0.5 and target != signals.audited
    return AttackScores(
        scores=scores[known],
        member=np.array(signals.member[target][known]),
        method=method,
        fair_coins=by_coins and signals.unit_ids is None,
        example_ids=signals.example_ids[known],
        model=np.full(int(known.sum()), target, dtype=np.int64),
        adversary=signals.adversary,
    )


def lira(
    signals: AttackSignals, target: int, *, beside: Sequence[AttackSignals] = ()
) -> AttackScores:
    """Log-likelihood ratio of "in" and "out" at a common variance, with shrunk effects.

    With fewer than four references, each example's direction is mostly noise. beside: more signals
    of the same models, which make the laws normal in as many dimensions. All examples share the
    correlations between signals, pooled over references.
    """
    every = (signals, *beside)
    found = [moments(one, target) for one in every]
    of = [effects(each) for each in found]
    effect, deviation = np.stack([one.shrunk for one in of]), np.sqrt([one.variance for one in of])
    share_in = [each.count[0] / np.maximum(each.count.sum(axis=0), 1) for each in found]
    out = np.stack([each.mean for each in found]) - share_in * effect * deviation
    x = (np.stack([one.finite(target) for one in every]) - out) / deviation
    products = np.eye(len(every))
    for model in set(range(signals.n_models)) - {target} if beside else ():
        side = np.where(signals.member[model], 0, 1)
        means = [np.where(side, each.means[1], each.means[0]) for each in found]
        left = (np.stack([one.finite(model) for one in every]) - means) / deviation
        left = left[:, ~np.isnan(left).any(axis=0)]
        products += left @ left.T
    scale = np.sqrt(np.diag(products))
    # Shrunk a tenth towards none: signals that are functions of each other would be singular.
    correlations = 0.9 * products / np.outer(scale, scale) + 0.1 * np.eye(len(every))
    weights = np.linalg.solve(correlations, effect)
    return scores_of_target(signals, target, (weights * (x - effect / 2)).sum(axis=0))


def plain_lira(signals: AttackSignals, target: int, *, fixed: bool = False) -> AttackScores:
    """Carlini's online attack: two normal laws for each example; 64 references are recommended.

    Each example and side has a variance of its own (the common one of the side where fewer than two
    references know it); fixed: all of one side have that. Scores are log-likelihood ratios, 0 for
    an example without references on one side.
    """
    found, signal = moments(signals, target), signals.finite(target)
    logs = []
    for count, mean, squares in zip(found.count, found.means, found.squares, strict=True):
        common = max(squares.sum() / max((count - (count > 0)).sum(), 1), _SMALLEST)
        own = np.maximum(squares / np.maximum(count, 1), _SMALLEST)
        used = np.where((count >= 2) & (not fixed), own, common)
        logs.append(stats.norm.logpdf(signal, mean, np.sqrt(used)))
    both = (found.count > 0).all(axis=0)
    score = np.where(both, logs[0] - logs[1], np.where(np.isnan(signal), np.nan, 0.0))
    return scores_of_target(signals, target, score)


def offline_lira(signals: AttackSignals, target: int) -> AttackScores:
    """How far the signal lies above those of references without the example, standardised.

    Variances are shrunk to their median. An example that every reference was trained on is compared
    with these.
    """
    found = moments(signals, target)
    outside, every = np.minimum(found.count[1], 1), np.arange(signals.n_examples)
    mean = np.where(outside, found.means[1], found.mean)
    degrees = np.maximum(found.count[outside, every] - 1, 0)
    deviation = np.sqrt(_shrunk_variance(found.squares[outside, every], degrees))
    score = (signals.finite(target) - mean) / deviation
    return scores_of_target(signals, target, score)


def calibrated(signals: AttackSignals, target: int) -> AttackScores:
    """How far the signal lies above those of all references, standardised."""
    found = moments(signals, target)
    score = (signals.finite(target) - found.mean) / np.sqrt(effects(found).variance)
    return scores_of_target(signals, target, score)


def rmia(signals: AttackSignals, target: int, *, offline: bool = False) -> AttackScores:
    """Score each example by the share of non-members over which the model prefers it.

    One reference is enough, since only its mean enters and no spread; with one, the randomness of
    its training is in every score. Attacks that standardise by a spread refuse fewer than two.

    The ratio of an example is the target's probability of the true label over the mean of the
    references. Its score is the share of the target's non-members z with ratio_z at most its own
    (the paper's gamma is 1: another one would change no order). The order of the scores is that of
    the ratios, which no membership of the target enters. For an example that no reference was
    trained on, the mean over references of the probability p is taken to be ((1 + a) p + 1 - a) / 2
    with a = 0.3. offline: use only references that were not trained on the example.
    """
    ratio = _probability(signals, target) / _base(signals, target, offline)
    # A non-member counts in its own population. Leaving it out would score members above others
    # wherever ratios are equal, as they often are for labels.
    population = np.sort(ratio[~np.isnan(ratio) & ~signals.member[target]])
    beaten = np.searchsorted(population, ratio, side="right")
    score = beaten / len(population) + _TIE * ratio / (1 + ratio)  # NaN where the ratio is
    return scores_of_target(signals, target, score)


def lacks_for_rmia(signals: AttackSignals, *, offline: bool = False) -> str | None:
    """What the signals lack for RMIA on their audited row; None if nothing."""
    target = signals.audited or 0
    if signals.kind == "other":
        return "signals that are probabilities, of another kind than 'other'"
    others = ~np.isnan(signals.signal[target]) & ~signals.member[target]
    known = np.zeros(signals.n_examples, dtype=bool)
    for model in set(range(signals.n_models)) - {target}:
        known |= others & ~np.isnan(signals.signal[model]) & ~(offline & signals.member[model])
        if known.sum() >= _LEAST_OTHERS:
            return None
    return "two non-members with a signal of a reference that counts"


def _probability(signals: AttackSignals, model: int) -> FloatArray:
    """Probability of the true label, (n_examples,)."""
    signal = np.asarray(signals.signal[model], dtype=np.float64)
    p = expit(signal) if signals.kind == "confidence" else signal
    return np.asarray(np.maximum(p, np.finfo(np.float64).tiny))


def _base(signals: AttackSignals, target: int, offline: bool) -> FloatArray:
    """What the references make of each example, (n_examples,); NaN where none counts."""
    count, total = np.zeros((2, 2, signals.n_examples))  # over all references, and those without it
    for model in set(range(signals.n_models)) - {target}:
        p, outside = _probability(signals, model), ~signals.member[model]
        taken = np.stack([np.ones_like(outside), outside]) & ~np.isnan(p)
        count += taken
        total += np.where(taken, p, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, mean_out = total / count
    unseen = ((1 + _OFFLINE_A) * mean_out + 1 - _OFFLINE_A) / 2
    return np.asarray(np.where(offline | (count[1] == count[0]), unseen, mean))
