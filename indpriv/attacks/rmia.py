"""RMIA: is the model surer of an example than references are, more than for others? Sensitive.

Zarifzadeh, Liu and Shokri 2024, "Low-Cost High-Power Membership Inference Attacks"
(arXiv:2312.03262), algorithm 1.
"""

import numpy as np
from scipy.special import expit

from indpriv._arrays import BoolArray, FloatArray
from indpriv._checks import check_row
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.references import scores_of_target
from indpriv.errors import InputError

RMIA = "RMIA"
RMIA_OFFLINE = "RMIA, offline"
_NO_PROBABILITY = "other"  # the kind of signals that have no ratios
_LEAST_OTHERS = 2  # non-members, to rank among
_TIE = 1e-9  # weight of the ratio itself, which orders equal ranks


def rmia(
    signals: AttackSignals,
    target: int,
    *,
    gamma: float = 1.0,
    offline_a: float = 0.3,
    offline: bool = False,
) -> AttackScores:
    """Score each example by the share of non-members over which the model prefers it.

    One reference is enough, since only its mean enters and no spread; with one, the randomness of
    its training is in every score. Attacks that standardise by a spread refuse fewer than two.

    The ratio of an example is the target's probability of the true label over the mean of the
    references. Its score is the share of the target's non-members z with ratio / ratio_z at least
    gamma. The order of the scores is that of the ratios, which no membership of the target enters.

    Args:
        signals: of the target and at least one reference.
        target: the row of the attacked model.
        gamma: how much more the model must prefer an example.
        offline_a: for an example that no reference was trained on, the mean over references of the
            probability p is taken to be ((1 + a) p + 1 - a) / 2.
        offline: use only references that were not trained on the example.

    Returns:
        scores of the examples with a signal of the target and of a reference that counts.

    Raises:
        InputError: no reference, fewer than two non-members, or signals of the kind "other".
    """
    check_row("gamma", gamma, lambda x: x > 0, "above 0")
    check_row("offline_a", offline_a, lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
    signals.check_references(target, 1)
    ratio = _probability(signals, target) / _base(signals, target, offline_a, offline)
    known = ~np.isnan(ratio)
    score = np.full(len(ratio), np.nan)
    score[known] = _rank(ratio[known], signals.member[target][known], gamma)
    return scores_of_target(signals, target, score, RMIA_OFFLINE if offline else RMIA)


def needs_of(signals: AttackSignals, *, offline: bool = False) -> str | None:
    """What the signals lack for an attack on their audited row; None if nothing."""
    target = signals.audited or 0
    if signals.kind == _NO_PROBABILITY:
        return "signals that are probabilities, of another kind than 'other'"
    known = np.zeros(signals.n_examples, dtype=bool)
    for model in set(range(signals.n_models)) - {target}:
        known |= ~np.isnan(signals.signal[model]) & ~(offline & signals.member[model])
    known &= ~np.isnan(signals.signal[target]) & ~signals.member[target]
    if known.sum() < _LEAST_OTHERS:
        return "two non-members with a signal of a reference that counts"
    return None


def _rank(ratio: FloatArray, member: BoolArray, gamma: float) -> FloatArray:
    """Share of the non-members whose ratio is at most ratio / gamma: a function of the ratio alone.

    A non-member counts in its own population. Leaving it out would score members above non-members
    wherever ratios are equal, as they often are for labels.
    """
    population = np.sort(ratio[~member])
    if len(population) < _LEAST_OTHERS:
        raise InputError("RMIA compares with non-members, and the target has fewer than two")
    beaten = np.searchsorted(population, ratio / gamma, side="right")
    return np.asarray(beaten / len(population) + _TIE * ratio / (1 + ratio))


def _probability(signals: AttackSignals, model: int) -> FloatArray:
    """Probability of the true label, (n_examples,)."""
    if signals.kind == _NO_PROBABILITY:
        raise InputError(
            "RMIA takes ratios of probabilities, and these signals are of the kind 'other'; use "
            "calibrated or lira"
        )
    signal = np.asarray(signals.signal[model], dtype=np.float64)
    p = expit(signal) if signals.kind == "confidence" else signal
    return np.asarray(np.maximum(p, np.finfo(np.float64).tiny))


def _base(signals: AttackSignals, target: int, offline_a: float, offline: bool) -> FloatArray:
    """What the references make of each example, (n_examples,); NaN where none counts."""
    total, total_out, count, count_out = np.zeros((4, signals.n_examples))
    for model in range(signals.n_models):
        if model == target:
            continue
        p = _probability(signals, model)
        taken = ~np.isnan(p)
        out = taken & ~signals.member[model]
        count += taken
        count_out += out
        total[taken] += p[taken]
        total_out[out] += p[out]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, mean_out = total / count, total_out / count_out
    unseen = ((1 + offline_a) * mean_out + 1 - offline_a) / 2
    return unseen if offline else np.where(count_out == count, unseen, mean)
