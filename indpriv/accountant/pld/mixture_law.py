"""One step's privacy loss of a unit of several rows, with a law that provably lies above it.

As units.py proves, a step of a unit is dominated by P = E N(M, 1) against Q = N(0, 1), where M is
the sum of the shifts of the rows that are sampled. The ratio f = P/Q = E exp(M z - M^2 / 2)
increases in z. Because of three facts, log f has a law of a few thousand points above its own:

* A larger M is worse. If M is stochastically below M', then P(z > t) <= P'(z > t) for every t. The
  best test for removal rejects where z > t, that for addition where z < t, so the pair of M' has
  the larger hockey-stick divergences in both directions, and dominates. So values of M may be
  rounded up.
* Large values of M of probability p may be left out of P: what remains of f still increases, and
  removal gains at most p by them; addition only loses, since E (1 - c f)_+ falls in f.
* z is cut into short intervals. On each of them f lies between its ends and has a known mean, so
  that moving its mass to the ends, at the same mean, is a mean-preserving spread (loss_grid.py).

Rounding: logarithms of f and of means, which are sums of positive terms, err by far less than
_SLACK; each is moved by that much to the side that raises delta, and masses by a factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from indpriv._arrays import FloatArray
from indpriv.accountant.pld.loss_grid import LossGrid
from indpriv.accountant.pld.loss_sum import Direction

LARGEST_END = 37.5  # of z; N(0, 1) holds less than the smallest float beyond
_SLACK = 1e-11  # in a logarithm
_MOST_SUMS = 1024  # values of M that are kept apart; more are rounded up to a lattice
_LATTICE = 1 << 15  # its points
_WIDTH = 0.008  # of an interval of z
# The rule of five Gauss-Lobatto nodes errs on an interval of width w by less than
# 2e-7 ((|z - M| + 3) w / 2)^8 of a term's integral: below 1e-14 if this times w is at most _TURN
_TURN = 0.25
_NODES = np.array([-np.sqrt(3 / 7), 0.0, np.sqrt(3 / 7)])  # and both ends
_WEIGHTS, _END_WEIGHT = np.array([49 / 90, 32 / 45, 49 / 90]), 1 / 10
_LEAST_LOG = -660.0  # of a probability
_AT_ONCE = 1 << 21  # exponentials


@dataclass(frozen=True)
class SumLaw:
    """The law of M; arrays have shape (n,).

    Attributes:
        value: at least 0, rising.
        probability: of each value.
        beyond: of larger values, which are left out.
    """

    value: FloatArray
    probability: FloatArray
    beyond: float

    @classmethod
    def of(cls, shifts: FloatArray, rate: float, tail: float) -> SumLaw:
        """The sum of the shifts (k,) of rows that are sampled independently, or a larger one.

        rate: of sampling one row. tail: probability of large values that may be left out.
        """
        shift, copies = np.unique(shifts[shifts > 0], return_counts=True)
        if np.prod(copies + 1.0) > _MOST_SUMS:
            unit = float(shift @ copies) / _LATTICE * (1 + 1e-9)
            steps, place = np.unique(np.ceil(shift / unit), return_inverse=True)
            copies = np.bincount(place, weights=copies).astype(np.int64)
            shift = steps * unit
        value, probability = np.zeros(1), np.ones(1)
        for one, n in zip(shift, copies, strict=True):
            more = np.add.outer(value, one * np.arange(n + 1.0)).ravel()
            weights = np.outer(probability, _binomial(int(n), rate)).ravel()
            value, probability = _merged(more, weights)
        below = np.cumsum(probability[::-1])[::-1] > tail
        # With hundreds of rows that are nearly always sampled, nothing can be computed
        beyond = float(probability[~below].sum()) if probability.sum() > 0.999 else 1.0
        below &= probability > 0
        return cls(*_coarsened(value[below], probability[below]), beyond * (1 + 1e-9))


def _binomial(n: int, rate: float) -> FloatArray:
    """(n + 1,) probabilities of the number of sampled rows among n, by products alone.

    They are 0 where that of no row is too small for a float to have all its digits.
    """
    if rate >= 1:
        return np.append(np.zeros(n), 1.0)
    log_none = n * np.log1p(-rate)
    if log_none < _LEAST_LOG:
        return np.zeros(n + 1)
    number = np.arange(float(n))
    ratio = (n - number) / (number + 1) * (rate / (1 - rate))
    return np.asarray(np.exp(log_none) * np.append(1.0, np.cumprod(ratio)))


def _merged(value: FloatArray, probability: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Values that differ by rounding only are one, the largest of them."""
    order = np.argsort(value)
    value, probability = value[order], probability[order]
    last = np.append(np.diff(value) > 1e-12 * value[1:], True)
    starts = np.append(0, np.flatnonzero(last)[:-1] + 1)
    return value[last], np.add.reduceat(probability, starts)


def _coarsened(value: FloatArray, probability: FloatArray) -> tuple[FloatArray, FloatArray]:
    """At most 4 _MOST_SUMS values: more are rounded up, by at most about 1 / _MOST_SUMS."""
    if len(value) <= 2 * _MOST_SUMS:
        return value, probability
    some = value[value > 0]
    fine = min(float(some[0]), float(some[-1]) / _MOST_SUMS)
    nodes = np.append(0.0, np.geomspace(fine, some[-1], 4 * _MOST_SUMS - 1))
    nodes[-1] = some[-1]
    place = np.searchsorted(nodes, value)
    summed = np.bincount(place, weights=probability, minlength=len(nodes))
    weights = np.asarray(summed, np.float64)
    return nodes[weights > 0], weights[weights > 0]


@dataclass(frozen=True)
class MixtureLoss:
    """A law above that of one step's loss, in one direction.

    Attributes:
        loss: (n,) log f at its points, rising.
        mass: (n,) probability under Q; under P it is mass * exp(loss).
        missed: what a step can add to delta beyond these points.
        direction: "remove" or "add".
    """

    loss: FloatArray
    mass: FloatArray
    missed: float
    direction: Direction

    @classmethod
    def of(
        cls, law: SumLaw, tail: float, direction: Direction, against: SumLaw | None = None
    ) -> MixtureLoss | None:
        """The loss of a step with this law of M; None if it cannot be followed.

        z may not reach beyond LARGEST_END, and the law of M must have been computed.

        Args:
            law: of M.
            tail: probability of z on either side that is not followed.
            direction: of the loss; "remove" if `against` is given.
            against: the law of M of Q, at most 0, by default 0: log f is then the difference of two
                such logarithms, and increases in z all the same.
        """
        if not len(law.value):
            return None
        against = SumLaw(np.zeros(1), np.ones(1), 0.0) if against is None else against
        least, largest = float(against.value[0]), float(law.value[-1])
        low, high = least + float(ndtri(tail)), largest - float(ndtri(tail))
        if max(high, -low) > LARGEST_END:
            return None
        reach = 3 + high - least  # of |z - M| + 3
        n = int(np.ceil((high - low) / min(_WIDTH, _TURN / reach)))
        ends = np.linspace(low, high, n + 1)
        half = np.diff(ends) / 2
        inner = (ends[:-1] + half)[:, None] + half[:, None] * _NODES
        p, log_p = _masses(law, ends, inner, half)
        q, log_q = _masses(against, ends, inner, half)
        loss = log_p - log_q
        side = _SLACK if direction == "remove" else -_SLACK
        to_end = np.expm1(np.maximum(np.log(p / q) + side - loss[:-1], 0.0))
        upper = q * np.clip(to_end / np.maximum(np.expm1(np.diff(loss)), 1e-300), 0.0, 1.0)
        mass = np.append(q - upper, 0.0)
        mass[1:] += upper
        if direction == "remove":
            mass[0] += against.probability @ ndtr(low - against.value)
            missed = law.beyond + float(law.probability @ ndtr(law.value - high))
        else:
            mass[-1] += ndtr(-high)
            missed = float(ndtr(low))
        return cls(loss + side, mass * (1 + _SLACK), missed * (1 + 1e-9), direction)

    @classmethod
    def mixed(cls, weights: list[float], laws: list[MixtureLoss]) -> MixtureLoss:
        """The loss of a step that is one of several, with these probabilities, and tells which."""
        loss = np.concatenate([law.loss for law in laws])
        mass = np.concatenate([w * law.mass for w, law in zip(weights, laws, strict=True)])
        missed = sum(w * law.missed for w, law in zip(weights, laws, strict=True))
        order = np.argsort(loss, kind="stable")
        return cls(loss[order], mass[order], missed, laws[0].direction)

    def symmetric(self) -> MixtureLoss:
        """The law whose delta is this one's at epsilons of at least 0, whichever way it is taken.

        So it has this law's losses above 0 and, with the laws exchanged, their opposites. The rest
        of its mass is at 0.
        """
        loss, mass = (values[self.loss > 0] for values in (self.loss, self.mass))
        opposite = mass * np.exp(loss)
        rest = max(0.0, 1.0 - float(mass.sum() + opposite.sum()))
        points = np.concatenate([-loss[::-1], [0.0], loss])
        masses = np.concatenate([opposite[::-1], [rest], mass])
        return MixtureLoss(points, masses, self.missed, "remove")

    def transforms(self, tilts: FloatArray) -> FloatArray:
        """(n_tilts,) log E exp(tilt loss), with the sign and the law of the direction."""
        power = tilts + 1 if self.direction == "remove" else -tilts
        exponent = np.outer(power, self.loss)
        peak = exponent.max(axis=1, keepdims=True)
        return np.asarray(np.log(np.exp(exponent - peak) @ self.mass) + peak[:, 0])

    def grid(self, spacing: float) -> LossGrid:
        """The law with its masses moved to points of a grid, at the same mean."""
        side = _SLACK if self.direction == "remove" else -_SLACK
        offset = float(self.loss[0]) - _SLACK
        above = self.loss - offset
        point = np.floor(above / spacing).astype(np.int64)
        inside = np.clip(above - point * spacing + side, 0.0, spacing)
        upper = self.mass * (np.expm1(inside) / np.expm1(spacing))
        size = int(point[-1]) + 2
        mass = np.bincount(point, weights=self.mass - upper, minlength=size)
        mass += np.bincount(point + 1, weights=upper, minlength=size)
        return LossGrid(offset, np.asarray(mass, np.float64))


def _integral(ends: FloatArray, inside: FloatArray) -> FloatArray:
    """(n,) over intervals of half width 1, from the (n + 1,) ends and (n, 3) nodes inside."""
    return np.asarray(inside @ _WEIGHTS + _END_WEIGHT * (ends[:-1] + ends[1:]))


def _masses(
    law: SumLaw, ends: FloatArray, inner: FloatArray, half: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Probability of each interval of z under E N(M, 1), and log of its ratio to N(0, 1) at ends.

    ends: (n + 1,). inner: (n, 3) nodes inside. half: (n,) half widths.
    """
    log_ends = _log_ratio(law, ends)
    log_inner = _log_ratio(law, inner.ravel()).reshape(inner.shape)
    at_ends, inside = np.exp(log_ends - ends**2 / 2), np.exp(log_inner - inner**2 / 2)
    return half / np.sqrt(2 * np.pi) * _integral(at_ends, inside), log_ends


def _log_ratio(law: SumLaw, z: FloatArray) -> FloatArray:
    """(n,) log f(z)."""
    found = np.empty(len(z))
    size = max(1, _AT_ONCE // len(law.value))
    constant = (np.log(law.probability) - np.square(law.value) / 2)[:, None]
    for start in range(0, len(z), size):
        part = z[start : start + size]
        exponent = np.outer(law.value, part) + constant
        peak = exponent.max(axis=0)
        found[start : start + size] = np.log(np.exp(exponent - peak).sum(axis=0)) + peak
    return found
