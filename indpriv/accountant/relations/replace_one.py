"""Rényi divergences where an example is replaced, with secret Poisson sampling. Sensitive.

Given which other examples are sampled, a step of an example with clipped gradient g that another
with gradient h replaces has the laws P = (1 - q) N(0, 1) + q N(g, 1) and Q = (1 - q) N(0, 1) + q
N(h, 1), in units of the noise, with |g| <= a and |h| <= b. Of all these pairs the one in one
dimension with g = a and h = -b is the worst, for every f-divergence: with x = exp(<z, g> - g^2 / 2)
and y likewise for h, it is E F(x, y) for z ~ N(0, 1) and F(x, y) = r f(p / r), p = 1 - q + q x,
r = 1 - q + q y, a convex function, homogeneous in (p, r), so that F_12 <= 0 <= F_11, F_22. By the
heat equation its derivative in <g, h> is E[x y F_12] <= 0: opposite directions are the worst. Along
them its derivative in a is E[a x^2 F_11 - b x y F_12] >= 0, and likewise in b. These laws compose
over steps (Zhu, Dong and Wang 2022, arXiv:2106.08567v4, Theorem 10).

The replacement is unknown, so b is max_grad_norm, whatever the example's own norm is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from indpriv._arrays import FloatArray
from indpriv.accountant.engine import Epsilons
from indpriv.accountant.histogram.counts import Counts, DenseCounts
from indpriv.accountant.histogram.histogram import Histogram
from indpriv.accountant.histogram.mechanisms import Mechanisms
from indpriv.accountant.rdp_orders import RdpAccountant
from indpriv.accountant.worst_case import worst_case_steps
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

if TYPE_CHECKING:
    from indpriv.accountant.method import Method

_SLACK = 1e-9  # relative; sums of the two spacings agree within a tenth of this
_REACH = 10.0  # standard deviations beyond the outer peaks
_WIDEST = 250.0  # order * (a + b) beyond which the bound without sampling is used
_ORDERS_AT_ONCE = 16  # orders of similar size share a grid


def replaced_divergences(
    own: FloatArray, other: FloatArray, sample_rate: FloatArray, orders: FloatArray
) -> FloatArray:
    """Rényi divergences of one step, of P from Q; never too small. Swap a and b for Q from P.

    Args:
        own: (n,) a, the example's contribution over the noise.
        other: (n,) b, that of its replacement, which points the other way.
        sample_rate: (n,) in (0, 1].
        orders: (n_orders,) above 1.

    Returns:
        (n_orders, n) nats.
    """
    # By quasi-convexity, revealing whether the example was sampled can only raise the divergence.
    found = orders[:, None] * np.square(own + other) / 2
    for row in np.flatnonzero((sample_rate < 1) & (own + other > 0)):
        a, b, q = float(own[row]), float(other[row]), float(sample_rate[row])
        ranking = np.argsort(orders)
        near = ranking[orders[ranking] * (a + b) <= _WIDEST]
        for chosen in np.array_split(near, -(-len(near) // _ORDERS_AT_ONCE) or 1):
            values = _divergences(a, b, q, orders[chosen])
            found[chosen, row] = np.minimum(found[chosen, row], values)
    return found


def _divergences(a: float, b: float, q: float, orders: FloatArray) -> FloatArray:
    """(n_orders,) divergences of P from Q by the trapezoid rule, refined until it settles."""
    if not len(orders):
        return np.zeros(0)
    spacing = 0.25 / max(1.0, a, b)
    values = _log_moments(a, b, q, orders, spacing)
    while spacing > 1e-4:
        spacing /= 2
        finer = _log_moments(a, b, q, orders, spacing)
        settled = np.abs(finer - values) <= 0.1 * _SLACK * np.abs(finer) + 1e-17
        values = finer
        if settled.all():
            return np.asarray(values * (1 + _SLACK) / (orders - 1))
    return np.full(len(orders), np.inf)


def _log_moments(a: float, b: float, q: float, orders: FloatArray, spacing: float) -> FloatArray:
    """(n_orders,) log E_z [p^order r^(1 - order)], by sums over z ~ N(0, 1)."""
    end = float(orders.max()) * (a + b) + _REACH
    z = np.arange(-_REACH - b, end + spacing, spacing)
    log_weight = -np.square(z) / 2 + np.log(spacing / np.sqrt(2 * np.pi))
    log_p, rise = _log_ratio(z * a - a * a / 2, q)
    log_r, other_rise = _log_ratio(-z * b - b * b / 2, q)
    order = orders[:, None]
    exponent = order * log_p + (1 - order) * log_r
    peak = (exponent + log_weight).max(axis=1, keepdims=True)
    result = np.log(np.exp(exponent + log_weight - peak).sum(axis=1)) + peak[:, 0]
    small = np.flatnonzero((result < 1e-2) & (exponent.max(axis=1) < 50))
    if len(small):
        # Less its tangent at (1, 1), whose mean is 0, so that a small moment keeps its precision.
        tangent = order[small] * rise + (1 - order[small]) * other_rise
        excess = np.expm1(exponent[small]) - tangent
        result[small] = np.log1p((np.exp(log_weight) * excess).sum(axis=1))
    return np.asarray(np.maximum(result, 0.0))


def _log_ratio(tilt: FloatArray, q: float) -> tuple[FloatArray, FloatArray]:
    """log(1 - q + q exp(tilt)), and what is inside less 1, up to e^50."""
    rise = q * np.expm1(np.minimum(tilt, 50.0))
    far = np.logaddexp(np.log1p(-q), np.log(q) + tilt)
    return np.where(tilt < 1.0, np.log1p(np.maximum(rise, -q)), far), rise


@dataclass(frozen=True)
class _Direction:
    """Divergences of cells in one neighbouring direction; see Divergences.

    Attributes:
        histogram: None for mechanisms that are counted themselves.
        own, other: (n_mechanisms,) contributions over the noise; the divergence is of the law of
            own from that of other.
    """

    histogram: Histogram | None
    own: FloatArray
    other: FloatArray
    sample_rate: FloatArray

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Divergences."""
        triples = np.stack([self.own, self.other, self.sample_rate], axis=1)
        distinct, inverse = np.unique(triples, axis=0, return_inverse=True)
        own, other, rates = distinct.T
        values = replaced_divergences(own, other, rates, orders)[:, inverse.ravel()]
        return values if self.histogram is None else self.histogram.per_count(values)


@dataclass(frozen=True)
class ReplaceOneEngine:
    """See Engine. Norms and settings between nodes are rounded up.

    Attributes:
        histogram: how norms are counted.
        accountants: of both directions.
        alike: of a replacement with the example's own norms, which is no bound.
        worst_case: of the run.
    """

    numerical_noise: ClassVar[str] = "1e-9"

    histogram: Histogram
    accountants: tuple[RdpAccountant, RdpAccountant]
    alike: RdpAccountant
    worst_case: Epsilons

    @classmethod
    def prepare(cls, log: NormLog, method: Method) -> ReplaceOneEngine:
        """See Engine."""
        histogram = Histogram.of(log, method.between_records, "up")
        found = histogram.mechanisms
        own, other, rates = found.shifts, _clipped_shifts(found, log), found.sample_rate
        clipped, steps = worst_case_steps(log, "up")
        shift = _clipped_shifts(clipped, log)
        worst = RdpAccountant(_Direction(None, shift, shift, clipped.sample_rate), method)
        return cls(
            histogram,
            (
                RdpAccountant(_Direction(histogram, own, other, rates), method),
                RdpAccountant(_Direction(histogram, other, own, rates), method),
            ),
            RdpAccountant(_Direction(histogram, own, own, rates), method),
            _finite(_larger((worst, worst), DenseCounts(steps[None]))),
        )

    @property
    def bytes_per_example(self) -> int:
        """See Engine."""
        return self.histogram.bytes_per_example + 8192

    def block(self, block: NormLog) -> Epsilons:
        """See Engine."""
        counts = self.histogram.counts(block)
        found = _larger(self.accountants, counts)
        epsilon = np.minimum(found.epsilon, self.worst_case.epsilon)
        alike = np.minimum(self.alike.epsilons(counts).epsilon, epsilon)
        details = {**found.details, "epsilon_if_replaced_alike": alike}
        return Epsilons(epsilon, found.epsilon_lower, details)


def _clipped_shifts(mechanisms: Mechanisms, log: NormLog) -> FloatArray:
    """(n,) shift of a gradient at max_grad_norm in the steps of each mechanism, or a larger one.

    Nodes of a lattice are not those of one noise multiplier: then it is that of the smallest.
    """
    noise = np.unique(log.settings.noise_multiplier)
    if np.isin(mechanisms.noise_multiplier, noise).all():
        return 1 / mechanisms.noise_multiplier
    return np.full(len(mechanisms), 1 / noise[0])


def _larger(accountants: tuple[RdpAccountant, RdpAccountant], counts: Counts) -> Epsilons:
    """The larger epsilon of both directions."""
    one, two = (accountant.epsilons(counts) for accountant in accountants)
    epsilon = np.maximum(one.epsilon, two.epsilon)
    first = one.epsilon >= two.epsilon
    details = {
        "best_order": np.where(first, one.best_order, two.best_order),
        "order_at_boundary": np.where(first, one.order_at_boundary, two.order_at_boundary),
    }
    return Epsilons(epsilon, np.zeros(len(epsilon)), details)


def _finite(worst: Epsilons) -> Epsilons:
    if not np.isfinite(worst.epsilon).all():
        raise InputError("this noise_multiplier leaves no finite epsilon; check the optimizer")
    return worst
