"""Proven bounds of a run's delta by two coarser views of its losses, in extended precision: a slow judge of brackets.

* Below: an attacker who rounds every step's loss to a multiple of h, sees the sum only, and says "present" where it
  reaches some number: looking at less never tells more.
* Above: the density ratio of every outcome between two multiples of h is spread to these two, its mean kept, which only
  raises the expectation of a convex function.

Both come closer with the square of h. Their sums are composed on a circle by discrete Fourier transforms of masses
times exp(tilt * loss). Every error is counted: what wraps around (Chernoff), what lies beyond the ends of z, rounding
(Higham 2002, Accuracy and Stability, Theorem 24.2). Steps are (relative_norm, noise_multiplier, sample_rate, count).
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy import fft, special

N_POINTS = (1 << 13, 1 << 16, 1 << 19)

_END = 10.0  # of z, in standard deviations
_BEYOND = 2 * float(special.ndtr(-_END))  # at least the probability of an outcome beyond the ends, in any law
_MESH = 0.01  # at most between knots of z, where 3 points of Gauss and Legendre err by (|z| mesh)^6 / 2e6, relative
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(3)
_MASS_ERROR = 1.5e-12  # relative, of a mass: that, and a sum of at most 10,000 positive terms in double precision
_FAINT = 60.0  # nepers by which the tilt damps losses that are all alike
_ROUNDOFF = float(np.finfo(np.longdouble).eps)
_TILTS = np.geomspace(1e-3, 1e11, 561)
_SLACK = 3.0  # nepers by which a Chernoff bound may be worse than the best one, for a shorter window
_LOG_LEAK = np.log(1e-12)  # of what may wrap around, relative to the Chernoff bound of delta
_MOST_PLACES = 1 << 23  # of one step's losses
_OVERFLOWS = 600.0  # nepers; where a law on too coarse a grid has such masses, it says nothing


def delta_bounds(steps, epsilon, directions=("remove", "add"), *, precision=1e-6, n_points=N_POINTS):
    """Lower and upper delta, the larger direction's; ever more points until they are as close, relative, as asked."""
    found = dict.fromkeys(directions, (0.0, 1.0))
    for n in n_points:
        least = max(lower for lower, _ in found.values())
        for direction, (lower, upper) in found.items():
            if upper - lower > precision * upper and upper > least:
                low, high = _bounds(steps, epsilon, direction, n)
                found[direction] = max(low, lower), min(high, upper)
    return max(lower for lower, _ in found.values()), max(upper for _, upper in found.values())


def _bounds(steps, epsilon, direction, n_points):
    counts = np.array([step[3] for step in steps], float)
    beyond = counts.sum() * _BEYOND
    transform = sum(step[3] * _Step.of(step, direction).log_transform(_TILTS) for step in steps)
    exponent = transform - _TILTS * epsilon
    chernoff = exponent - _TILTS * np.log1p(1 / _TILTS) - np.log1p(_TILTS)
    if chernoff.argmin() == len(_TILTS) - 1:  # epsilon lies above all losses
        return 0.0, float(np.exp(chernoff[-1])) + beyond
    window = min(
        (_Window.of(exponent, k, epsilon, n_points) for k in np.flatnonzero(chernoff[:-1] <= chernoff.min() + _SLACK)),
        key=lambda window: window.h,
    )
    h = window.h
    ends = [np.sort(_loss(np.array([-_END, step[0] / step[1] + _END]), step, direction)) for step in steps]
    origin = [0.0 if direction == "remove" else float(end[1]) for end in ends]
    lowest = [max(float(end[0]), zero - _FAINT / window.tilt) for end, zero in zip(ends, origin, strict=True)]
    highest = h * (window.first + n_points + 1) - counts @ lowest  # a step of more loss leaves the window with its run
    rounded, spread = [], []
    for step, end, low in zip(steps, ends, lowest, strict=True):
        high = min(float(end[1]), highest + low)
        if (high - low) / h > _MOST_PLACES:
            return 0.0, 1.0
        grid = np.arange(np.floor(low / h) - 1, np.ceil(high / h) + 2)
        law = _Step.of(step, direction, h * grid)
        middle = law.mean_near_0(h)
        rounded.append(_Step.of(step, direction, middle + h * (grid + 0.5)).rounded(h, low, high, middle))
        spread.append(law.spread(h, low, high))
        beyond += step[3] * float(law.mass[law.loss > high].sum())
    lower, upper = _below(rounded, counts, window), _above(spread, counts, window)
    return lower, min(upper + beyond, 1.0)


@dataclass(frozen=True)
class _Step:
    """Losses at nodes of z, and the nodes' masses under the law of the loss and under the law without or with."""

    loss: np.ndarray
    mass: np.ndarray
    other: np.ndarray

    @classmethod
    def of(cls, step, direction, losses=()):
        """Nodes between knots, among which are those at which the loss takes given values."""
        shift, rate = step[0] / step[1], step[2]
        first, last = -_END, shift + _END
        knots = np.linspace(first, last, int((last - first) / _MESH) + 2)
        knots = np.unique(np.append(knots, np.clip(_z_at(np.asarray(losses), step, direction), first, last)))
        half = np.diff(knots)[:, None] / 2
        z = (knots[:-1, None] + half * (1 + _NODES)).ravel()
        weight = (half * _WEIGHTS).ravel() / np.sqrt(2 * np.pi)
        without = weight * np.exp(-(z**2) / 2)
        with_ = (1 - rate) * without + rate * weight * np.exp(-((z - shift) ** 2) / 2)
        laws = (with_, without) if direction == "remove" else (without, with_)
        return cls(_loss(z, step, direction), *laws)

    def log_transform(self, tilts):
        return special.logsumexp(np.outer(tilts, self.loss), b=self.mass, axis=1)

    def mean_near_0(self, h):
        """Mean of the losses near 0, which one place holds where participation is rare."""
        near = np.abs(self.loss) < h / 2
        return float(self.mass[near] @ self.loss[near] / max(self.mass[near].sum(), 1e-300))

    def rounded(self, h, low, high, middle):
        """Loss at place 0, places, and their masses under both laws; losses beyond low or high count as these."""
        place = np.rint((self.loss.clip(low, high) - middle) / h).astype(np.int64)
        first = place.min()
        laws = np.bincount(place - first, self.mass), np.bincount(place - first, self.other)
        return middle, first + np.arange(len(laws[0])), *laws

    def spread(self, h, low, high):
        """Places and their masses: X = exp(loss) keeps its mean under the other law, whose masses times X are these.

        Losses below low count as low; those above high are left out.
        """
        loss, mass = self.loss.clip(low, high), np.where(self.loss <= high, self.mass, 0.0)
        place = np.floor(loss / h).astype(np.int64)
        share = np.clip(np.expm1(loss - h * place) / np.expm1(h), 0.0, 1.0)
        first, n = place.min(), np.ptp(place) + 2
        down = np.bincount(place - first, mass * (1 - share) * np.exp(h * place - loss), n)
        up = np.bincount(place + 1 - first, mass * share * np.exp(h * (place + 1) - loss), n)
        return first + np.arange(n), down + up


def _loss(z, step, direction):
    shift, rate = step[0] / step[1], step[2]
    exponent = z * shift - shift**2 / 2
    if rate < 1:
        large = np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
        exponent = np.where(exponent < 1, np.log1p(rate * np.expm1(np.minimum(exponent, 1.0))), large)
    return exponent if direction == "remove" else -exponent


def _z_at(loss, step, direction):
    """The z at which a step has this loss, -inf where it has none."""
    shift, rate = step[0] / step[1], step[2]
    ratio = loss if direction == "remove" else -loss
    if rate < 1:
        inner = np.expm1(np.minimum(ratio, 600.0)) / rate
        ratio = np.where(inner > -1, np.log1p(np.where(inner > -1, inner, 0.0)), -np.inf)
    return ratio / shift + shift / 2


@dataclass(frozen=True)
class _Window:
    """Places first to first + n of sums of losses about epsilon, and the tilts that bound what lies outside."""

    epsilon: float
    tilt: float
    smaller: float
    larger: float
    h: float
    first: int
    n: int

    @classmethod
    def of(cls, exponent, k, epsilon, n):
        """The shortest one at the k-th tilt; exponent is log E[exp(tilt * (loss - epsilon))] at all tilts."""
        goal = exponent[k] + _LOG_LEAK
        below, above = np.append(0.0, _TILTS[:k]), _TILTS[k + 1 :]
        left = (np.append(0.0, exponent[:k]) - goal) / (_TILTS[k] - below)
        right = (exponent[k + 1 :] - goal) / (above - _TILTS[k])
        h = 1.1 * (left.min() + right.min()) / n  # a tenth more, since the laws on the grid are wider
        first = int(np.floor((epsilon - 1.1 * left.min()) / h))
        return cls(epsilon, _TILTS[k], below[left.argmin()], above[right.argmin()], h, first, n)

    @property
    def excess(self):
        return self.h * (self.first + np.arange(self.n)) - self.epsilon


@dataclass(frozen=True)
class _Sum:
    """Masses at the places of a window in units of exp(scale - tilt * loss), and a bound of their rounding (2-norm)."""

    tilt: float
    scale: float
    masses: np.ndarray
    rounding: float

    @classmethod
    def of(cls, laws, counts, tilt, window):
        n, exponent, scale, rounding = window.n, 0, 0.0, 0.0
        for (places, mass), count in zip(laws, counts, strict=True):
            kept = mass > 0
            log_mass = np.log(mass[kept].astype(np.longdouble)) + np.longdouble(tilt * window.h) * places[kept]
            peak = log_mass.max()
            tilted = np.exp(log_mass - peak)
            circle = np.zeros(n, np.longdouble)
            np.add.at(circle, places[kept] % n, tilted / tilted.sum())
            transform = fft.rfft(circle)
            exponent = exponent + count * np.log(np.where(transform == 0, np.longdouble("1e-4000"), transform))
            scale += count * float(peak + np.log(tilted.sum()))
            rounding += count * 10 * np.log2(n) * float(np.linalg.norm(circle))
        size = np.exp(exponent.real) * (4 * counts.sum() + 4 * np.abs(exponent.real) + 8)
        rounding += float(np.sqrt(np.sum(size**2) * 2 / n))  # of the powers
        masses = fft.irfft(np.exp(exponent), n)
        rounding += 10 * np.log2(n) * float(np.linalg.norm(masses))
        return cls(tilt, scale, np.roll(masses, -(window.first % n)), rounding * _ROUNDOFF)

    def beyond(self, laws, counts, tilt, window, place):
        """Chernoff bound by another tilt of the tilted law's share beyond a place: above if larger, below if smaller."""
        transforms = [special.logsumexp(tilt * window.h * places, b=mass) for places, mass in laws]
        return np.exp(min(counts @ transforms - self.scale - (tilt - self.tilt) * window.h * place, 0.0))


def _below(rounded, counts, window):
    """Delta of the best attacker who says "present" from some place of the window on."""
    offset = float(counts @ [law[0] for law in rounded])
    epsilon, first = window.epsilon, window.first - int(np.rint(offset / window.h))
    window = replace(window, epsilon=epsilon - offset, first=first)
    reach = min(2 / window.tilt, 20.0)
    near = np.abs(window.excess) <= reach  # where thresholds are looked for
    granted = np.exp(counts.sum() * _MASS_ERROR)
    own, other = [(law[1], law[2]) for law in rounded], [(law[1], law[3]) for law in rounded]
    true = _Sum.of(own, counts, window.tilt, window)
    false = _Sum.of(other, counts, window.tilt + 1, window)  # under which the same losses matter
    wrapped = true.beyond(own, counts, window.smaller, window, window.first)
    wrapped += true.beyond(own, counts, window.larger, window, window.first + window.n)
    units = true.scale - true.tilt * window.epsilon, epsilon + false.scale - false.tilt * window.epsilon
    if max(units) > _OVERFLOWS:
        return 0.0
    present = []
    for side, unit, error, factor in ((true, units[0], -1, 1 / granted), (false, units[1], 1, granted)):
        fall = np.exp(-side.tilt * window.excess.clip(-1.1 * reach))
        tail = np.cumsum((side.masses * fall)[::-1])[::-1]
        tail += error * side.rounding * np.sqrt(np.cumsum(np.square(fall)[::-1])[::-1])
        tail -= wrapped * fall if side is true else 0.0  # folded into the window; it never lowers what is false
        present.append(np.exp(unit) * tail * factor)
    return max(float((present[0] - present[1])[near].max(initial=0.0)), 0.0)


def _above(spread, counts, window):
    """Delta of the spread losses, and what may lie beyond the window."""
    total = _Sum.of(spread, counts, window.tilt, window)
    excess = window.excess.clip(0.0)
    weight = np.exp(-window.tilt * excess) * -np.expm1(-excess)
    found = np.sum(total.masses * weight) + total.rounding * np.linalg.norm(weight)
    end = window.first + window.n
    missing = total.beyond(spread, counts, window.larger, window, end) * np.exp(
        window.tilt * (window.epsilon - window.h * end)
    )
    unit = total.scale - window.tilt * window.epsilon
    return float(np.exp(unit) * (found + missing) * np.exp(counts.sum() * _MASS_ERROR)) if unit < _OVERFLOWS else 1.0
