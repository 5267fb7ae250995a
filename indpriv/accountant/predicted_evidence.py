"""What an account predicts of the strongest attack on each example: sums of divergences. Sensitive.

The attacker's evidence about an example is the sum over steps of the log-likelihood ratio log f(z),
f(z) = 1 - q + q exp(z u - u**2 / 2), with shift u = relative_norm / noise_multiplier (see
`indpriv._likelihood`). With z ~ N(0, 1), its mean is the sum of KL(P||Q) = E[f log f] if the
example takes part, and minus the sum of KL(Q||P) = E[-log f] if it does not; its exponential
moments are the Rényi divergences that RDP accounts add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv._likelihood import log_likelihood_ratio
from indpriv.accountant.blocks import block_size, in_blocks
from indpriv.accountant.method import check_poisson_pairs
from indpriv.accountant.steps import StepKinds, Steps
from indpriv.norm_log.norm_log import NormLog

_SPACING = 1 / 16  # of the trapezoid rule, in standard deviations, over the largest shift above 1
_REACH = 9.0  # standard deviations beyond the outer peaks, 0 and u: 81 * exp(-81 / 2) is 2e-16
_AT_ONCE = 512  # shifts


@dataclass(frozen=True)
class PredictedEvidence:
    """Sums of divergences over the steps of a run, as an account counts them, for n examples.

    Attributes:
        with_example: (n,) mean evidence if the example takes part: the sum of KL(P||Q).
        without_example: (n,) minus the mean evidence if it does not: the sum of KL(Q||P).
        orders: (n_orders,) Rényi orders.
        renyi: (n_orders, n) sums of the divergences of P from Q.
    """

    with_example: FloatArray
    without_example: FloatArray
    orders: FloatArray
    renyi: FloatArray

    @property
    def separation(self) -> FloatArray:
        """(n,) mean evidence with less mean evidence without the example: the square of a mu."""
        return self.with_example + self.without_example

    def take(self, examples: IntArray | BoolArray) -> PredictedEvidence:
        """The sums of some examples."""
        return PredictedEvidence(
            self.with_example[examples],
            self.without_example[examples],
            self.orders,
            self.renyi[:, examples],
        )

    @classmethod
    def concatenated(cls, parts: Sequence[PredictedEvidence]) -> PredictedEvidence:
        """The sums of the examples of all parts, at equal orders."""
        return cls(
            np.concatenate([part.with_example for part in parts]),
            np.concatenate([part.without_example for part in parts]),
            parts[0].orders,
            np.hstack([part.renyi for part in parts]),
        )


def predicted_evidence(
    log: NormLog, *, between_records: str = "last", orders: tuple[float, ...] = (1.5, 2.0)
) -> PredictedEvidence:
    """What the account of a log predicts of the strongest attack on each of its examples.

    Args:
        log: the norm log of the run.
        between_records: as of `indpriv.account`.
        orders: Rényi orders, above 1.

    >>> log = NormLog.from_arrays([[0.5, 2.0]], [0], total_steps=4, noise_multiplier=2.0,
    ...                           max_grad_norm=1.0, sample_rate=1.0)
    >>> predicted_evidence(log).separation
    array([0.25, 1.  ])
    """
    check_poisson_pairs(log, log.neighbouring, "predicted_evidence")
    steps = Steps.of(log, between_records)
    wanted = np.asarray(orders, dtype=np.float64)
    kl = steps.per_count(kl_divergences(steps.laws))
    table = np.vstack([kl, steps.divergences(wanted)])

    def sums(block: NormLog) -> FloatArray:
        return steps.counts(block).totals(table)

    size = block_size(steps.bytes_per_example)
    found = np.vstack(list(in_blocks(log, sums, size=size))).T
    return PredictedEvidence(found[0], found[1], wanted, found[2:])


def kl_divergences(kinds: StepKinds) -> FloatArray:
    """(2, n) KL(P||Q) and KL(Q||P) of one step of each kind, by the trapezoid rule.

    The integrand is analytic in the strip |Im z| < pi / u, so the rule converges exponentially.
    """
    pairs = np.stack([kinds.rate, kinds.shift], axis=1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    found = np.empty((2, len(distinct)))
    rates, first = np.unique(distinct[:, 0], return_index=True)
    for rate, begin, end in zip(rates, first, [*first[1:], len(distinct)], strict=True):
        for start in range(begin, end, _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, end))
            found[:, part] = _kl_at_rate(distinct[part, 1], float(rate))
    return found[:, inverse.ravel()]


def _kl_at_rate(shifts: FloatArray, rate: float) -> FloatArray:
    """(2, n) divergences at rising shifts (n,) and one sample rate."""
    largest = float(shifts[-1])
    step = _SPACING / max(largest, 1.0)
    z = np.arange(-_REACH, _REACH + largest + step, step)
    ratio = log_likelihood_ratio(
        z, relative_norm=shifts[:, None], noise_multiplier=1, sample_rate=rate
    )
    outside = np.exp(-(z**2) / 2) * (step / np.sqrt(2 * np.pi))
    inside = np.exp(ratio - z**2 / 2) * (step / np.sqrt(2 * np.pi))
    # E[f] - 1 = 0 is taken off each: its terms cancel most of the rounding.
    return np.stack(
        [
            np.sum(inside * ratio - (inside - outside), axis=1),
            np.sum((inside - outside) - outside * ratio, axis=1),
        ]
    )
