"""What the reference models of an attack say about each example. Sensitive."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals


@dataclass(frozen=True)
class Moments:
    """Signals of the references by example, with it ("in") and without it ("out").

    Attributes:
        n_in, n_out: (n_examples,) number of references with a signal.
        mean_in, mean_out: (n_examples,) of their signals; 0 where there is none.
        squares_in, squares_out: (n_examples,) sums of squared deviations from these means.
    """

    n_in: IntArray
    n_out: IntArray
    mean_in: FloatArray
    mean_out: FloatArray
    squares_in: FloatArray
    squares_out: FloatArray

    @property
    def mean(self) -> FloatArray:
        """Mean of all references; NaN where there is none."""
        total: FloatArray = self.n_in * self.mean_in + self.n_out * self.mean_out
        count = self.n_in + self.n_out
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    @property
    def degrees(self) -> IntArray:
        """Degrees of freedom of the pooled variance."""
        return self.n_in + self.n_out - (self.n_in > 0) - (self.n_out > 0)


def reference_signals(
    signals: AttackSignals, target: int | None
) -> Iterator[tuple[FloatArray, BoolArray]]:
    """Signal (finite, or NaN) and membership of each model but the target, (n_examples,) each."""
    for model in range(signals.n_models):
        if model != target:
            yield finite_signal(signals, model), signals.member[model]


def finite_signal(signals: AttackSignals, model: int) -> FloatArray:
    """The signal of a model in float64, with infinities at its largest and smallest finite value.

    A loss that is 0 in the precision of training has an infinite signal; its true value lies
    somewhere above the largest finite one.
    """
    signal = np.array(signals.signal[model], dtype=np.float64)
    infinite = np.isinf(signal)
    if infinite.any():
        finite = signal[np.isfinite(signal)]
        low, high = (finite.min(), finite.max()) if len(finite) else (-1.0, 1.0)
        signal[infinite] = np.where(signal[infinite] > 0, high, low)
    return np.asarray(signal)


def moments(signals: AttackSignals, target: int | None = None) -> Moments:
    """Moments over all models but the target, in two passes over the signals."""
    n = signals.n_examples
    count, total, squares = np.zeros((2, n), dtype=np.int64), np.zeros((2, n)), np.zeros((2, n))
    for signal, member in reference_signals(signals, target):
        for side, inside in enumerate((member, ~member)):
            taken = inside & ~np.isnan(signal)
            count[side] += taken
            total[side] += np.where(taken, signal, 0.0)
    mean = total / np.maximum(count, 1)
    for signal, member in reference_signals(signals, target):
        for side, inside in enumerate((member, ~member)):
            taken = inside & ~np.isnan(signal)
            squares[side] += np.where(taken, signal - mean[side], 0.0) ** 2
    return Moments(*count, *mean, *squares)


def scores_of_target(
    signals: AttackSignals, target: int, scores: FloatArray, method: str
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
