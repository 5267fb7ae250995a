"""Privacy losses of single steps, as cells above or below the truth. Sensitive.

A step is a pair of laws on the line, `first` with and `second` without the example (or the other
way round), each a mixture of normal laws of variance 1, in units of the noise. No mean of the first
is below one of the second, so the loss L = log(first / second) increases in the noise z, and a cell
of z is one of L. Numbers in brackets are lines of docs/explanation/proofs.md, which has the proofs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize.elementwise import find_root
from scipy.special import erfcx, erfinv, log_ndtr, logsumexp, ndtr, ndtri

from indpriv._types import BoolArray, FloatArray, IntArray
from indpriv.errors import InputError

U = 2.0**-53  # unit roundoff, of [1.5], [1.6], [3.4] and [4]
TILTS = 2.0 ** np.arange(-12, 24.5, 0.5)  # Rényi orders less 1 [2.2] [5.1]
_CELL = 1 / 40  # width of a cell between means, in standard deviations of the noise [1.4]
_WIDEST = 1e4  # in standard deviations; of pairs that are wider, everything is missed [1.4]
_TAIL = 1e-6  # share of delta that the cells of all steps may leave out [1.4]
LEAST_DELTA = 1e-290  # below it tails of the normal law are no normal floats [1.6]
_LEAST = 1e-300  # smaller masses are not followed: floats of all digits [1.6] [3.4]
_LEAST_LOG = -660.0  # of a probability [1.7]
_IN_LARGEST = 64  # least number of points that a unit's largest row has on the lattice [1.7]
_MOST_SUMS = 2048  # on the lattice, which is wider where it needed more [1.7]
_FEW_MEANS = 4  # of both laws of a pair; sums of rows have more [1.4]
_NEAR = 3.0  # standard deviations below its means within which a law of sums has narrow cells [1.4]
_AT_ONCE = 1 << 20  # numbers of a batch of laws


@dataclass(frozen=True)
class Mixture:
    """Mixtures of normal laws of variance 1, of n steps."""

    # (n, k) in standard deviations of the noise; (1, k) where all steps have the same
    mean: FloatArray
    weight: FloatArray  # (n, k) of each mean; they add up to 1 with `beyond`
    beyond: FloatArray  # (n,) weight of means that are left out; 1 where nothing could be computed
    error: float = 0.0  # relative error of weights, besides a few roundings

    @classmethod
    def sampled(cls, shift: FloatArray, rate: FloatArray) -> "Mixture":
        """A mean of `shift` (n,) that is there with probability `rate` (n,), and else 0."""
        mean = np.stack([np.zeros(len(shift)), shift], axis=1)
        return cls(mean, np.stack([1 - rate, rate], axis=1), np.zeros(len(shift)))

    @classmethod
    def centred(cls, n: int) -> "Mixture":
        """N(0, 1), n times."""
        return cls(np.zeros((n, 1)), np.ones((n, 1)), np.zeros(n))

    @classmethod
    def of_rows(cls, shifts: FloatArray, rate: FloatArray, tail: float) -> "Mixture":
        """Sums of shifts (n, k) of rows, sampled at rates (n,) below 1, or larger laws [1.7].

        tail: weight of large sums that may be left out, and of noise far below 0.
        """
        n_rows = shifts.shape[1]
        numbers = [_binomial(n_rows, q) for q in rate]  # of the rows that are sampled
        nothing = np.array([number.sum() < 0.999 for number in numbers])
        # With hundreds of rows that are nearly always sampled, nothing can be computed
        if not shifts.any() or nothing.any():
            beyond = np.full(len(rate), float(nothing.any()))
            return cls(np.zeros((1, 1)), np.ones((len(rate), 1)), beyond)
        most = max(1, *(_rarely(number, tail)[0] for number in numbers))
        one = float(shifts.max())
        largest = min(float(shifts.sum(axis=1).max()), most * one) * (1 + 1e-9)
        most_parts = _MOST_SUMS * one // largest or 1
        parts = min(max(_IN_LARGEST, most_parts // 4), most_parts)
        spacing = max(one / parts, largest / _MOST_SUMS)
        size = int(largest / spacing) + most + 1  # the sums of `most` rows [1.7]
        steep = (largest + most * spacing - float(ndtri(tail))) * spacing * (1 + 1e-9)
        weight, error = np.zeros((len(rate), size)), 0
        weight[:, 0] = 1
        for step, (row, q) in enumerate(zip(shifts, rate.tolist(), strict=True)):
            each, copies = np.unique(row[row > 0], return_counts=True)
            # Factors and terms of each weight [1.7]
            error = max(error, 32 * len(each) + 8 * int(np.minimum(copies, 1050).sum()))
            weight[step] = _added(weight[step], each / spacing, copies, q, steep)
        kept = max(_rarely(law, tail)[0] for law in weight) + 1
        too_small = (size + n_rows) * _LEAST  # what has fewer digits, here and among the numbers
        weight = np.where(weight < _LEAST, 0.0, weight)
        left_out = [
            _rarely(number, tail, most + 1)[1] + _rarely(law, tail, kept)[1] + tail + too_small
            for number, law in zip(numbers, weight, strict=True)
        ]
        used = np.flatnonzero((weight[:, :kept] > 0).any(axis=0))
        error += 1024 + 32 * float(-np.log1p(-rate).max()) * n_rows
        mean = np.asarray(used[None] * (spacing * (1 + 5e-13)), np.float64)
        return cls(mean, weight[:, used], np.array(left_out), U * error)

    def mirrored(self) -> "Mixture":
        """The same with the opposite means."""
        return Mixture(-self.mean[:, ::-1], self.weight[:, ::-1], self.beyond, self.error)

    def without(self, steps: BoolArray) -> "Mixture":
        """The same, but of some steps (n,) nothing is known."""
        mean, beyond = np.where(steps[:, None], 0.0, self.mean), np.where(steps, 1.0, self.beyond)
        return Mixture(mean, self.weight, beyond, self.error)

    def part(self, steps: slice) -> "Mixture":
        """Some of the steps, or of what has means of its own."""
        alike = len(self.weight) // max(len(self.mean), 1)
        part = slice(steps.start * alike, steps.stop * alike)
        return Mixture(self.mean[steps], self.weight[part], self.beyond[part], self.error)

    def _summed(
        self, z: FloatArray, term: Callable[[FloatArray, FloatArray], FloatArray]
    ) -> FloatArray:
        """(n, m) mean of terms of z and each mean, at z (n, m) or the same of all (1, m)."""
        weight = self.weight.reshape(
            len(self.mean), -1 if len(self.weight) else 0, self.mean.shape[1]
        )
        size, mean = max(1, _AT_ONCE // max(self.mean.size, 1)), self.mean[:, :, None]
        starts = range(0, max(z.shape[1], 1), size)
        parts = [np.matmul(weight, term(z[:, None, k : k + size], mean)) for k in starts]
        return np.concatenate(parts, axis=2).reshape(len(self.weight), z.shape[1])

    @property
    def slack(self) -> float:
        """Relative error of weights, and of sums over them [1.5] [1.7]."""
        return float(U * (16 + 8 * self.mean.shape[1]) + self.error)

    def log_ratio(self, z: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(n, m) log density over that of N(0, 1) at z (n, m), and an error bound (n, 1) [1.5]."""
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            found = np.log(self._summed(z, lambda z, mean: np.exp(mean * z - mean**2 / 2)))
            log_weight = np.abs(np.log(self.weight))
        if not (np.abs(found) < 600).all():  # floats may have been 0 or infinite: one by one
            alike, pieces = (
                len(self.weight) // len(self.mean),
                1 + z.shape[1] * self.mean.shape[1] // _AT_ONCE,
            )
            for step, weight in enumerate(self.weight):
                mean, weight = self.mean[step // alike][:, None], weight[:, None]
                found[step] = np.concatenate(
                    [
                        logsumexp(mean * part - mean**2 / 2, axis=0, b=weight)
                        for part in np.array_split(z[step // alike], pieces)
                    ]
                )
        most = np.abs(self.mean).max(axis=1, keepdims=True)
        size = most * (np.abs(z).max(axis=1, keepdims=True) + most / 2)
        size = size + np.where(self.weight > 0, log_weight, 0).max(axis=1)[:, None]
        return found, 64 * U * (1 + size) + self.slack

    def masses(self, z: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(n, m - 1) masses between successive z (n, m), from below and from above [1.6]."""
        right = z > 0
        # Of what lies on this side of z
        tail = self._summed(z, lambda z, mean: ndtr(np.where(z > 0, mean - z, z - mean)))
        left, other = tail[:, :-1], tail[:, 1:]
        across = right[:, 1:] & ~right[:, :-1]
        ends = self.mean.min(axis=1), self.mean.max(axis=1)
        size = np.max([np.square(z - end[:, None]) for end in ends], axis=0)
        size = 1 + np.maximum(size[:, :-1], size[:, 1:])
        mass = np.where(across, self.weight.sum(axis=1)[:, None] - left - other, abs(left - other))
        error = (32 + self.mean.shape[1]) * U * size * np.where(across, 1.0, left + other) + _LEAST
        least = np.maximum(mass - error, 0) * (1 - self.slack)
        return np.where(least < _LEAST, 0.0, least), (mass + error) * (1 + self.slack)

    def highest(
        self, low: FloatArray, high: FloatArray, tails: Sequence[tuple[float, float]]
    ) -> FloatArray:
        """(n, 1) from low to high (n, 1): x with at most these tails beyond x + distance each."""
        x = low + (high - low) * np.linspace(0, 1, 17)
        little = np.ones(x.shape, bool)
        for distance, tail in tails:
            mass = self._summed(x + distance, lambda z, mean: ndtr(mean - z)) <= tail
            little &= mass.reshape(len(x), -1, x.shape[1]).all(axis=1)
        little[:, -1] = True
        return np.take_along_axis(x, little.argmax(axis=1)[:, None], axis=1)

    def below(self, z: FloatArray) -> FloatArray:
        """(n,) mass below z (n,), from above."""
        found = self._summed(z[:, None], lambda z, mean: ndtr(z - mean))[:, 0]
        return np.asarray(found * 1.001 + _LEAST)


@lru_cache(maxsize=4096)
def _binomial(n: int, rate: float) -> FloatArray:
    """(n + 1,) probabilities of the number of sampled rows among n, by products; 0 if tiny."""
    log_none = n * np.log1p(-rate)
    if log_none < _LEAST_LOG:
        return np.zeros(n + 1)
    number = np.arange(float(n))
    ratio = (n - number) / (number + 1) * (rate / (1 - rate))
    return np.asarray(np.exp(log_none) * np.append(1.0, np.cumprod(ratio)))


def _rarely(law: FloatArray, tail: float, start: int = 0) -> tuple[int, float]:
    """The last number, from `start` - 1 on, beyond which a law has `tail` at most, and how much."""
    rest = np.cumsum(law[::-1])[::-1]
    last = max(int(np.count_nonzero(rest > tail)), start, 1) - 1
    return last, float(rest[last + 1 :].max(initial=0.0)) * (1 + 1e-9) + _LEAST


def _added(
    law: FloatArray, shifts: FloatArray, copies: IntArray, rate: float, steep: float
) -> FloatArray:
    """A law on whole numbers, and further shifts, `copies` of each: between two of these [1.7]."""
    numbers = [_binomial(n, rate) for n in copies.tolist()]
    each = np.concatenate([np.arange(1, n + 1) for n in copies.tolist()] or [copies])
    at = each * np.repeat(shifts, copies)
    below = (at * (1 + 1e-13)).astype(np.int64)
    rest = np.where(at - below > 1e-13 * at, at - below, 0.0)
    up = np.minimum(np.expm1(-steep * rest) / np.expm1(-steep) * (1 + 1e-9), 1.0)
    places, n = zip(below.tolist(), up.tolist(), strict=True), len(law)
    for number in numbers:
        total = number[0] * law
        for share, (place, high) in zip(number[1:].tolist(), places, strict=False):
            if share > _LEAST and place < n:
                total[place:] += share * (1 - high) * law[: n - place]
                total[place + 1 :] += share * high * law[: max(n - place - 1, 0)]
        law = total
    return law


def upper_share(
    low: FloatArray, gap: FloatArray, mass: FloatArray, other: FloatArray
) -> FloatArray:
    """Mass to put at the upper end of cells, the rest at the lower one, to raise delta [1.1] [1.2].

    low: (...) lower end. gap: upper end less lower end. mass, other: under first and second.
    """
    even = other * np.exp(np.minimum(low, 700.0)) * (1 - 32 * U * (1 + np.abs(low)))
    with np.errstate(all="ignore"):
        share = (mass - even) / -np.expm1(-gap) * (1 + 32 * U)
    return np.where(gap > 0, np.clip(share, 0.0, mass), mass)


@dataclass(frozen=True)
class Cells:
    """One-step losses of n laws in one direction, each cell of the noise put on its ends."""

    loss: FloatArray  # (n, n_points) points, which rise but for rounding
    mass: FloatArray  # (n, n_points) of the first law at each
    miss: FloatArray  # (n,) mass of the first law that no cell has: its loss may be infinite

    def __len__(self) -> int:
        return len(self.loss)

    @classmethod
    def joined(cls, parts: "Sequence[Cells]") -> "Cells":
        """The laws of all parts, padded with points without mass."""
        width = max(part.loss.shape[1] for part in parts)
        more = [((0, 0), (0, width - part.loss.shape[1])) for part in parts]
        return cls(
            np.concatenate([np.pad(p.loss, m, "edge") for p, m in zip(parts, more, strict=True)]),
            np.concatenate([np.pad(p.mass, m) for p, m in zip(parts, more, strict=True)]),
            np.concatenate([part.miss for part in parts]),
        )

    @classmethod
    def mixed(cls, weights: Sequence[float], laws: "Sequence[Cells]") -> "Cells":
        """One law of a step that is one of several, with these weights, and tells which [1.9]."""
        parts = list(zip(weights, laws, strict=True))
        loss = np.concatenate([law.loss for law in laws], axis=1)
        mass = np.concatenate([weight * law.mass for weight, law in parts], axis=1)
        order = np.argsort(loss, axis=1)
        loss, mass = (np.take_along_axis(values, order, axis=1) for values in (loss, mass))
        return cls(loss, mass * (1 + 4 * U), np.sum([w * law.miss for w, law in parts], axis=0))

    def symmetric(self) -> "Cells":
        """The law whichever way the pair is taken: losses above 0 and their opposites [1.8]."""
        # Of a loss x that is all but 0, a share x / tiny at `tiny` does as well [1.8]
        tiny, loss = 1e-9, np.maximum(self.loss, 0.0)
        mass = self.mass * np.minimum(loss / tiny * (1 + 2e-9), 1.0)
        loss = np.maximum(loss, tiny * (loss > 0))
        opposite = mass * np.exp(-loss)
        least = np.where(opposite < _LEAST, 0.0, opposite * (1 - 16 * U * (1 + loss)))
        rest = np.clip(1 - mass.sum(axis=1) - least.sum(axis=1), 0, 1)[:, None] + 1e-12
        opposite *= 1 + 64 * U * (1 + loss)
        points = np.concatenate([-loss[:, ::-1], np.zeros_like(rest), loss], axis=1)
        masses = np.concatenate([opposite[:, ::-1], rest, mass], axis=1)
        return Cells(points, masses, self.miss)

    def moments(self) -> FloatArray:
        """(n, n_tilts) log E exp(tilt L), from above [5.1]."""
        found = np.empty((len(self), len(TILTS)))
        size = max(1, _AT_ONCE // max(self.loss.shape[1], 1))
        for start in range(0, len(self), size):
            laws = slice(start, start + size)
            loss, reach = self.loss[laws], np.abs(self.loss[laws]).max(axis=1)
            with np.errstate(divide="ignore"):
                log_mass = np.log(self.mass[laws])
                for column, tilt in enumerate(TILTS):
                    exponent = log_mass + tilt * loss
                    peak = np.maximum(exponent.max(axis=1, keepdims=True), -1e300)
                    total = np.log(np.exp(exponent - peak).sum(axis=1)) + peak[:, 0]
                    found[laws, column] = total + 64 * U * tilt * (1 + reach)
        return np.asarray(found + 1e-12 + 4 * U * self.loss.shape[1])


def tail_of(delta: float, steps: float) -> float:
    """Mass on either side that one of these many steps may leave out [1.4]."""
    if not LEAST_DELTA < delta < 1:
        raise InputError(f"delta={delta}: tight accounts take a delta between 1e-290 and 1")
    return _TAIL * delta / max(steps, 1.0)


def cells_of(first: Mixture, second: Mixture, tail: float, *, below: bool = False) -> Cells:
    """The losses of n pairs; no mean of the first is below one of the second [1.3].

    tail: mass of the first law on either side that is not followed. below: cells whose delta is
    never above the truth [3.1], instead of never below it.
    """
    reach = float(-ndtri(tail))
    means = np.concatenate([first.mean, second.mean], axis=1)
    wide = np.ptp(means, axis=1) > _WIDEST
    if wide.any():
        first, second = first.without(wide), second.without(wide)
    # Cells are wider below all means, where losses hardly differ, and beyond what delta shows
    fine, k = float(-ndtri(min(tail / _TAIL, 0.5))), means.shape[1]
    low_ends, high_ends = _ends(reach, 0.0, 1 / 8), _ends(reach, fine, 1 / 4)
    lowest, highest = means.min(axis=1)[:, None], first.mean.max(axis=1)[:, None]
    if k > _FEW_MEANS:  # sums of rows, of which the largest are hardly ever met
        lowest = np.maximum(lowest, first.mean.min(axis=1)[:, None] - _NEAR)
        highest = first.highest(lowest, highest, [(reach, tail), (fine, tail / _TAIL)])
    n_halves = int(np.ceil((highest - lowest).max(initial=0.0) / _CELL / 2))
    share = np.linspace(0, 1, 2 * n_halves + 1)  # with the middle, where losses may be 0 [1.8]
    size = max(1, _AT_ONCE // ((len(low_ends) + len(high_ends) + len(share)) * k))
    parts = []
    for start in range(0, max(len(means), 1), size):
        some = slice(start, start + size)
        pairs, begin, end = (first.part(some), second.part(some)), lowest[some], highest[some]
        inside = begin + (end - begin) * share[1:-1]
        z = np.concatenate([begin - low_ends[::-1], inside, end + high_ends], axis=1)
        parts.append(_cells(*pairs, z, below))
    return Cells.joined(parts)


def _ends(reach: float, fine: float, least: float) -> FloatArray:
    """Ends of cells from 0 to `reach`: wider beyond `fine`, by at most 1 / `least` [1.4]."""
    x = np.linspace(0, reach, 4096)
    density = np.maximum(np.exp(-np.square(np.maximum(x - fine, 0)) / 6), least)
    number = np.append(0, np.cumsum(density[1:])) * (x[1] / _CELL)
    return np.interp(np.linspace(0, number[-1], int(np.ceil(number[-1])) + 1), number, x)


def _cells(first: Mixture, second: Mixture, z: FloatArray, below: bool) -> Cells:
    (p_least, p_most), (q_least, q_most) = first.masses(z), second.masses(z)
    if below:
        with np.errstate(divide="ignore", invalid="ignore"):
            log_p, log_q = np.log(p_least), np.log(q_most + second.beyond[:, None])
            loss = log_p - log_q - 16 * U * (1 + np.abs(log_p) + np.abs(log_q))
        empty = ~np.isfinite(loss) | (p_least < _LEAST)
        loss, mass = np.where(empty, 0.0, loss), np.where(empty, 0.0, p_least)
        return Cells(loss, mass, np.zeros(len(loss)))
    (log_p, p_error), (log_q, q_error) = first.log_ratio(z), second.log_ratio(z)
    loss, margin = log_p - log_q, p_error + q_error
    low, high = loss - margin, loss + margin
    up = upper_share(low[:, :-1], high[:, 1:] - low[:, :-1], p_most, q_least)
    # What is put at the lower end of a cell is moved to the upper end of the one before, which is
    # a little higher. What lies below the least z has less loss than there; what lies beyond the
    # largest is missed. Means of the first that are left out are missed too; of the second, its
    # mass only falls [1.4].
    mass = np.pad(up, ((0, 0), (1, 0))) + np.pad(p_most - up, ((0, 0), (0, 1)))
    mass[:, 0] += first.below(z[:, 0])
    miss = (first.mirrored().below(-z[:, -1]) + first.beyond) * 1.001 + (second.beyond >= 1)
    return Cells(high, mass * (1 + 4 * U), miss)


# --- Gaussian mechanisms: mu is the sensitivity over the noise's standard deviation. Delta has a
# closed form, and epsilon(mu) is convex: a chord is never below it, a tangent never above it [9.8].

GAUSSIAN_ERROR = 1e-11  # relative, of delta [9.8]; a wide margin over rounding
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(8)
_LARGEST_MU = 1e12  # that is looked for [9.8]
_MOST_EXACT = 8192  # values of mu that are inverted one by one; more lie on chords [9.8]
_CELL_BITS = 11  # that follow the first one of mu: 2048 chords between powers of 2 [9.8]
_MU_AT_ONCE = 1 << 15  # values of mu: what is made of them stays in cache


def gaussian_delta(epsilon: FloatArray, mu: FloatArray | float) -> FloatArray:
    """Delta of Gaussian mechanisms at any real epsilon, within GAUSSIAN_ERROR; mu: at least 0."""
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, np.float64), np.asarray(mu, np.float64))
    size, some = np.abs(epsilon), np.where(mu > 0, mu, 1.0)
    near, far = np.clip(size / some - some / 2, -1e8, 1e8), size / some + some / 2
    # delta is the normal tail at `near` less exp(size) times that at `far`; with the ratio m of
    # tail to density, that is density(near) * (m(near) - m(far)).
    density = np.exp(-np.square(near) / 2) / np.sqrt(2 * np.pi)
    inside = np.maximum(near, -1.0)
    difference = _tail_ratio(inside) - _tail_ratio(far)
    integral = np.zeros_like(density)  # of minus the derivative of m, where differences cancel
    for node, weight in zip(_GAUSS_NODES, _GAUSS_WEIGHTS, strict=True):
        point = inside + some / 2 * (1 + node)
        integral += weight * (1 - point * _tail_ratio(point))
    difference = np.where(some < 0.5, some / 2 * np.maximum(integral, 0.0), difference)
    direct = ndtr(-near) - density * _tail_ratio(far)  # m(near) overflows far below 0
    delta = np.where(mu > 0, np.where(near < -1.0, direct, density * difference), 0.0)
    # This pair is symmetric: delta(-x) = 1 - exp(-x) + exp(-x) delta(x).
    below = np.minimum(epsilon, 0.0)
    return np.asarray(np.clip(np.exp(below) * delta - np.expm1(below), 0.0, 1.0))


def _tail_ratio(x: FloatArray) -> FloatArray:
    return np.asarray(np.sqrt(np.pi / 2) * erfcx(x / np.sqrt(2.0)))


def gaussian_mu(epsilon: FloatArray, delta: FloatArray) -> FloatArray:
    """(n,) mu of Gaussian mechanisms with these deltas (n,), from above; 0 where delta is 0."""
    target = np.clip(delta * (1 + GAUSSIAN_ERROR), 1e-300, 1 - 1e-15)
    inverse, _ = _crossing(
        lambda inverse, epsilon: gaussian_delta(epsilon, 1 / inverse),
        epsilon,
        target,
        low=1 / _LARGEST_MU,
    )
    return np.where(delta > 0, 1 / inverse, 0.0)


def gaussian_epsilons(mu: FloatArray, delta: float) -> tuple[FloatArray, FloatArray]:
    """(n,) lower and upper bounds of epsilon(delta) of Gaussian mechanisms; mu: (n,) finite.

    For up to 8192 values of mu they differ by about 1e-11 of epsilon. For more, both are within
    1e-6 of epsilon, or of mu where epsilon is smaller.
    """
    if len(mu) <= _MOST_EXACT:
        return _inverted(mu, delta)
    least = _largest_free(delta)
    largest = max(least, float(mu.max()))
    smallest = max(least, float(mu.min(where=mu > 0, initial=largest)))
    first, last = (np.array([smallest, largest]).view(np.int64) >> 52).tolist()
    tables = [_octave(octave, delta) for octave in range(first, last + 1)]
    left, low, high, slope, rise = np.concatenate(tables, axis=1)
    lower, upper = np.empty((2, len(mu)))
    for start in range(0, len(mu), _MU_AT_ONCE):
        part = slice(start, start + _MU_AT_ONCE)
        some = np.maximum(mu[part], smallest)
        cell = (some.view(np.int64) >> 52 - _CELL_BITS) - (first << _CELL_BITS)
        above = some - left[cell]
        chord = (high[cell] + above * rise[cell]) * (1 + 1e-13)
        tangent = (low[cell] + above * slope[cell]) * (1 - 1e-9)
        upper[part] = np.where(mu[part] > 0, chord, 0.0)
        lower[part] = np.clip(tangent, 0.0, upper[part])
    return lower, upper


def _largest_free(delta: float) -> float:
    """A mu, as large as possible, whose epsilon is 0: its delta at epsilon 0 is at most delta."""
    return float(2 * np.sqrt(2) * erfinv(delta) * (1 - 1e-12))


@lru_cache(maxsize=256)
def _octave(exponent: int, delta: float) -> FloatArray:
    """(5, n_cells) left end, bounds of epsilon there, slopes of tangent and chord, by cell."""
    cells = np.arange((1 << _CELL_BITS) + 1) + (exponent << _CELL_BITS)
    nodes = (cells << 52 - _CELL_BITS).view(np.float64)
    low, high = _inverted(nodes, delta)
    nodes = np.maximum(nodes, _largest_free(delta))
    b = low / nodes + nodes / 2
    slope = np.exp(-np.square(b) / 2 - log_ndtr(-b)) / np.sqrt(2 * np.pi)
    low -= 1e-11 * nodes * slope  # epsilon may begin to rise right after a node
    rise = np.diff(high) / np.maximum(np.diff(nodes), 1e-300)
    return np.stack([nodes[:-1], low[:-1], high[:-1], slope[:-1], rise])


def _inverted(mu: FloatArray, delta: float) -> tuple[FloatArray, FloatArray]:
    """(n,) bounds, by solving for each."""
    lower, upper = np.zeros((2, len(mu)))
    some = mu > delta  # the delta at epsilon 0 of a smaller mu is below 0.4 mu
    if not some.any():
        return lower, upper
    for out, side, error in ((upper, 1, -GAUSSIAN_ERROR), (lower, 0, GAUSSIAN_ERROR)):
        target = np.full(int(some.sum()), delta * (1 + error))
        out[some] = _crossing(gaussian_delta, mu[some], target)[side]
    return lower, upper


def _crossing(
    delta_of: Callable[[FloatArray, FloatArray], FloatArray],
    given: FloatArray,
    target: FloatArray,
    low: float = 0.0,
) -> tuple[FloatArray, FloatArray]:
    """(n,) ends, within 1e-13 of each other, between which delta_of(x, given) meets the target.

    delta_of falls in x: it is above the target at the lower end, and not at the upper end. Both
    are `low` where it is not above the target there.
    """
    end = np.ones_like(target)
    while np.any(above := delta_of(end, given) > target):
        end = np.where(above, 2 * end, end)

    def excess(x: FloatArray, given: FloatArray, target: FloatArray, /, **_: Any) -> FloatArray:
        tiny = np.finfo(np.float64).tiny  # replaces a delta of 0
        ratio = np.log(np.maximum(delta_of(x, given), tiny) / target)
        return np.where(ratio > 0, ratio, np.minimum(ratio, -tiny))

    found = find_root(
        excess,
        (np.full_like(target, low), end),
        args=(given, target),
        tolerances={"xatol": 0.0, "xrtol": 1e-13, "fatol": 0.0, "frtol": 0.0},
    )
    (lower, upper), (at_lower, at_upper) = found.bracket, found.f_bracket
    return np.where(at_upper > 0, upper, lower), np.where(at_lower <= 0, lower, upper)
