"""The steps of a run as pairs of laws, both ways: what tight epsilons come from. Sensitive.

laws.py has the losses of single steps, tight.py composes them; docs/explanation/proofs.md says why
no epsilon here is below the truth, and no lower end above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array, eye_array
from scipy.special import erf

from indpriv._types import FloatArray
from indpriv.accountant import tight
from indpriv.accountant.laws import Cells, Mixture, U, cells_of, tail_of
from indpriv.accountant.steps import StepKinds, Steps, clipped_steps, condensed
from indpriv.norm_log.norm_log import NormLog

_MOST_OWN = 256  # pairs; more are between nodes
# Ratios of neighbouring nodes above these shares of the largest one
_SHIFT_STEPS = ((0.1, 1.02), (0.005, 1.05), (0.0, 1.3))
_RATE_STEPS = ((0.0, 1.06),)
_LARGEST_SHIFT = 1e150  # far beyond what leaves a finite epsilon
_SMALLEST_SHIFT = 1e-12  # smaller ones, whose squares may be 0 for a float, count as this one


@dataclass(frozen=True)
class Pairs:
    """One-step pairs of laws of a run, both ways, and how often they are met.

    Poisson sampling, where an example is added or removed. Without sampling, a step is Gaussian.

    Attributes:
        kinds: (n,) of steps.
        delta: of the run.
        most_steps: of one example.
        steps: (n_counted, n) steps of one count of each kind that is counted; by default these.
    """

    kinds: StepKinds
    delta: float
    most_steps: float
    steps: csr_array | None = None

    @classmethod
    def of(cls, steps: Steps, delta: float) -> Pairs:
        """Those that the steps of a log are counted as."""
        return cls(steps.laws, delta, float(steps.norms.log.total_steps), steps.steps)

    def _losses(self, below: bool) -> tuple[tight.Losses, tight.Losses]:
        """With the example and without it, and the other way round."""
        shift, rate = self.kinds.shift, self.kinds.rate
        of_kind = csr_array(eye_array(len(shift)) if self.steps is None else self.steps)
        gaussian = rate >= 1
        laws = np.flatnonzero(~gaussian & (shift > 0))
        shifts, rates, blend = _nodes(np.maximum(shift[laws], _SMALLEST_SHIFT), rate[laws])
        if below:  # all of each law at the least revealing of its nodes
            first, n = blend.indptr[:-1], len(laws)
            parts = np.ones(n), blend.indices[first], np.arange(n + 1)
            blend = csr_array(parts, shape=blend.shape)
        squares = of_kind @ np.where(gaussian, np.square(np.minimum(shift, _LARGEST_SHIFT)), 0.0)
        with_it, tail = Mixture.sampled(shifts, rates), tail_of(self.delta, self.most_steps)
        without = Mixture.centred(len(shifts))
        removed, added = (
            tight.Losses(
                cells_of(*way, tail, below=below), blend, squares, csr_array(of_kind[:, laws])
            )
            for way in ((with_it, without), (without, with_it.mirrored()))
        )
        return removed, added

    @cached_property
    def above(self) -> tuple[tight.Losses, tight.Losses]:
        """Losses that are never below the truth, of removing an example and of adding it."""
        return self._losses(below=False)

    @cached_property
    def below(self) -> tuple[tight.Losses, tight.Losses]:
        """Losses that are never above the truth."""
        return self._losses(below=True)

    def epsilons(self, met: tight.Met) -> FloatArray:
        """(n,) epsilon at delta of what n examples met, the larger of both ways; may be inf.

        It is 0 for who is hardly ever drawn: if that has probability delta at most [5.2].
        """
        drawn = np.where(self.kinds.shift > 0, self.kinds.rate, 0.0)
        drawn = met.counts @ (drawn if self.steps is None else self.steps @ drawn)
        ever = (drawn * (1 + 1e-9) > self.delta) | (met.gaussian > 0)
        found = np.zeros(len(met))
        found[ever] = larger_epsilons(self.above, met.take(ever), self.delta)
        return found

    def lower_epsilons(self, met: tight.Met, upper: FloatArray) -> FloatArray:
        """(n,) epsilon from below; upper: (n,) the same from above."""
        ways = (tight.lower_epsilons(way, met, self.delta, upper) for way in self.below)
        return np.maximum(*ways)

    def deltas(self, met: tight.Met, epsilon: FloatArray, *, below: bool = False) -> FloatArray:
        """(n,) delta at an epsilon each, the larger of both ways; or from below."""
        ways = self.below if below else self.above
        return np.maximum(*(tight.deltas(way, met, epsilon, below=below) for way in ways))

    def true_positive_rates(self, met: tight.Met, false_positive_rate: float) -> FloatArray:
        """(n,) the most that any test for the example finds at this false-positive rate."""
        return tight.true_positive_rates(self.above[0], met, false_positive_rate)


def _nodes(shift: FloatArray, rate: FloatArray) -> tuple[FloatArray, FloatArray, csr_array]:
    """Few pairs (shift, rate), and the (n, n_pairs) probabilities of each for the pairs (n,) [1.9].

    They are the pairs themselves where these are few. Otherwise a step is at most as revealing as
    one with a neighbouring shift and rate at random: divergences are convex in the total variation
    of the shift, and in the rate.
    """
    n = len(shift)
    if n <= _MOST_OWN:
        return shift, rate, csr_array(np.eye(n))
    axes, parts = [], []
    for values, steps, curve in (
        (shift, _SHIFT_STEPS, lambda s: erf(s / np.sqrt(8))),
        (rate, _RATE_STEPS, np.positive),
    ):
        nodes = [float(values.max())]
        while nodes[-1] > values.min():
            ratio = next(step for share, step in steps if nodes[-1] > share * nodes[0])
            nodes.append(nodes[-1] / ratio)
        distinct = np.unique(values)
        axis = distinct if len(distinct) <= len(nodes) else np.array(nodes[::-1])
        axes.append(axis)
        above = np.clip(np.searchsorted(axis, values), min(1, len(axis) - 1), None)
        below = np.maximum(above - 1, 0)
        low, high = curve(axis[below]), curve(axis[above])
        up = np.divide(curve(values) - low, high - low, out=np.ones(n), where=high > low)
        # Differences cancel where the curve is all but level: at shifts of about 10 and more
        up += np.divide(16 * U * high, high - low, out=np.zeros(n), where=high > low)
        # Below a node, some of it stays at the one below, where lower ends come from
        most = np.where(values < axis[above], 1 - 2.0**-53, 1.0)
        up = np.where(values > axis[below], np.minimum(up * (1 + 1e-12) + 1e-12, most), 0.0)
        parts.append([(below, 1 - up), (above, up)])
    entries = [(i * len(axes[1]) + j, p * w) for i, p in parts[0] for j, w in parts[1]]
    places, weights = (np.stack(values, axis=1) for values in zip(*entries, strict=True))
    starts = np.arange(0, 4 * n + 1, 4)
    shape = (n, len(axes[0]) * len(axes[1]))
    blend = csr_array((weights.ravel(), places.ravel(), starts), shape=shape)
    blend.sum_duplicates()
    blend.eliminate_zeros()
    used = np.unique(blend.indices)
    first, second = np.divmod(used, len(axes[1]))
    return axes[0][first], axes[1][second], csr_array(blend[:, used])


def clipped_in_every_step(log: NormLog, delta: float, *, down: bool) -> tuple[Pairs, tight.Met]:
    """The steps of one example that is clipped in each; very many kinds are snapped up, or down."""
    kinds, counts = condensed(*clipped_steps(log), down=down)
    return Pairs(kinds, delta, float(log.total_steps)), tight.Met.of(counts[None])


def larger_epsilons(ways: Sequence[tight.Losses], met: tight.Met, delta: float) -> FloatArray:
    """(n,) epsilon at delta, the larger of both ways; may be inf."""
    removed, added = ways
    found = tight.epsilons(removed, met, delta)
    finite = np.flatnonzero(np.isfinite(found))
    found[finite] = tight.epsilons(added, met.take(finite), delta, found[finite])
    return found


def pair_epsilon(
    ways: tuple[Cells, Cells], steps: FloatArray, delta: float, squared_mu: float = 0.0
) -> float:
    """Epsilon of one example that met each of n laws, given both ways, in `steps` (n,) steps.

    squared_mu: of a Gaussian mechanism besides.
    """
    met = tight.Met.of(csr_array(steps[None]), np.array([squared_mu]))
    both = [tight.Losses.of_one(cells, met, delta) for cells in ways]
    return float(larger_epsilons(both, met, delta)[0])
