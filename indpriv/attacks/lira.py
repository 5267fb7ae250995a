"""LiRA and calibration: is the model surer of an example than other models are? Sensitive.

Carlini, Chien, Nasr, Song, Terzis and Tramer 2022, "Membership Inference Attacks From First
Principles" (arXiv:2112.03570), and a version for few references, whose variances and effects are
shrunk towards those of all examples.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from indpriv._arrays import FloatArray, IntArray
from indpriv._checks import check_choice
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.references import Moments, finite_signal, moments, scores_of_target

LIRA, LIRA_PLAIN, LIRA_FIXED = "LiRA, shrunk", "LiRA", "LiRA, fixed variance"
LIRA_OFFLINE, CALIBRATED = "LiRA, offline", "calibrated confidence"
_LEAST = 4  # references; with fewer, each example's direction is mostly noise
_PRIOR_DEGREES = 4.0  # weight of the median variance
_SMALLEST = 1e-12  # variance, where all references agree


@dataclass(frozen=True)
class Effects:
    """How far being trained on moves each example's signal, in standard deviations.

    Attributes:
        variance: (n_examples,) pooled within and without, shrunk to the median.
        effect: (n_examples,) standardised mean difference (Hedges 1981); NaN where an example has
            no reference with it, or none without it.
        error: (n_examples,) variance of the effect, 1 / n_in + 1 / n_out.
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
        if between > 0:
            precision = weight + 1 / between
            shrunk[known] = (effect * weight + mean / between) / precision
        return shrunk


def effects(found: Moments) -> Effects:
    """Effects of being trained on, from the moments of references."""
    degrees = found.degrees
    squares = found.squares_in + found.squares_out
    variance = _shrunk_variance(squares, degrees)
    weight = degrees + _PRIOR_DEGREES
    with np.errstate(divide="ignore", invalid="ignore"):
        error = 1 / found.n_in + 1 / found.n_out
        difference = (found.mean_in - found.mean_out) / np.sqrt(variance)
    effect = np.where(np.isfinite(error), (1 - 3 / (4 * weight - 1)) * difference, np.nan)
    return Effects(variance, effect, error)


def _shrunk_variance(squares: FloatArray, degrees: IntArray) -> FloatArray:
    """Variances from sums of squares, shrunk to their median as if it had four degrees more."""
    known = degrees > 0
    median = float(np.median(squares[known] / degrees[known])) if known.any() else 1.0
    shrunk = (squares + _PRIOR_DEGREES * median) / (degrees + _PRIOR_DEGREES)
    return np.maximum(shrunk, _SMALLEST)


def lira(signals: AttackSignals, target: int) -> AttackScores:
    """Log-likelihood ratio of "in" and "out" at a common variance, with shrunk effects.

    Args:
        signals: of the target and at least four references.
        target: the row of the attacked model.

    Raises:
        InputError: fewer than four references.
    """
    signals.check_references(target, _LEAST)
    found = moments(signals, target)
    of = effects(found)
    effect, deviation = of.shrunk, np.sqrt(of.variance)
    share_in = found.n_in / np.maximum(found.n_in + found.n_out, 1)
    out = found.mean - share_in * effect * deviation
    x = (finite_signal(signals, target) - out) / deviation
    return scores_of_target(signals, target, effect * x - effect**2 / 2, LIRA)


def plain_lira(signals: AttackSignals, target: int, *, variance: str = "each") -> AttackScores:
    """Carlini's online attack: two normal laws for each example.

    Args:
        signals: of the target and at least four references; 64 or more are recommended.
        target: the row of the attacked model.
        variance: "each" for a variance of each example and side (the common one of the side where
            fewer than two references know it), "fixed" for one of each side.

    Returns:
        log-likelihood ratios; 0 for an example without references on one side.

    Raises:
        InputError: fewer than four references.
    """
    check_choice("variance", variance, ("each", "fixed"))
    signals.check_references(target, _LEAST)
    found, signal = moments(signals, target), finite_signal(signals, target)
    sides = (
        (found.mean_in, found.squares_in, found.n_in),
        (found.mean_out, found.squares_out, found.n_out),
    )
    logs = []
    for mean, squares, count in sides:
        common = max(squares.sum() / max((count - (count > 0)).sum(), 1), _SMALLEST)
        own = np.maximum(squares / np.maximum(count, 1), _SMALLEST)
        used = np.where((variance == "each") & (count >= 2), own, common)
        logs.append(stats.norm.logpdf(signal, mean, np.sqrt(used)))
    both = (found.n_in > 0) & (found.n_out > 0)
    score = np.where(both, logs[0] - logs[1], np.where(np.isnan(signal), np.nan, 0.0))
    return scores_of_target(
        signals, target, score, LIRA_PLAIN if variance == "each" else LIRA_FIXED
    )


def offline_lira(signals: AttackSignals, target: int) -> AttackScores:
    """How far the signal lies above those of references without the example, standardised.

    Variances are shrunk to their median. An example that every reference was trained on is compared
    with these.

    Args:
        signals: of the target and at least two references.
        target: the row of the attacked model.

    Raises:
        InputError: fewer than two references.
    """
    signals.check_references(target, 2)
    found = moments(signals, target)
    seen = found.n_out == 0
    mean = np.where(seen, found.mean, found.mean_out)
    squares = np.where(seen, found.squares_in, found.squares_out)
    degrees = np.maximum(np.where(seen, found.n_in, found.n_out) - 1, 0)
    deviation = np.sqrt(_shrunk_variance(squares, degrees))
    score = (finite_signal(signals, target) - mean) / deviation
    return scores_of_target(signals, target, score, LIRA_OFFLINE)


def calibrated(signals: AttackSignals, target: int) -> AttackScores:
    """How far the signal lies above those of all references, standardised.

    Args:
        signals: of the target and at least two references.
        target: the row of the attacked model.

    Raises:
        InputError: fewer than two references.
    """
    signals.check_references(target, 2)
    found = moments(signals, target)
    score = (finite_signal(signals, target) - found.mean) / np.sqrt(effects(found).variance)
    return scores_of_target(signals, target, score, CALIBRATED)
