"""Proven bounds of a run's delta by two coarser views of its losses, in extended precision: a slow judge of brackets.

* Below: an attacker who rounds every step's loss to a multiple of h, sees the sum only, and says "present" where it
  reaches some number: looking at less never tells more.
* Above: the density ratio of every outcome between two multiples of h is spread to these two, its mean kept, which only
  raises the expectation of a convex function.

Both come closer with the square of h. Many equal steps are taken in tens, and these in tens: each sum is composed on a grid
of its own, as fine as its narrower range allows, and rounded or spread once more. Sums are composed on a circle by discrete Fourier transforms of masses
times exp(tilt * loss). Every error is counted: what wraps around (Chernoff), what lies beyond the ends of z, rounding
(Higham 2002, Accuracy and Stability, Theorem 24.2). Steps are (relative_norm, noise_multiplier, sample_rate, count).
"""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import fft, special

N_POINTS = (1 << 13, 1 << 16, 1 << 19)

_END = 10.0  # of z, in standard deviations
_BEYOND = 2 * float(
    special.ndtr(-_END)
)  # at least the probability of an outcome beyond the ends, in any law
_MESH = 0.01  # at most between knots of z, where 3 points of Gauss and Legendre err by (|z| mesh)^6 / 2e6, relative
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(3)
_MASS_ERROR = 1.5e-12  # relative, of a mass: that, and a sum of at most 10,000 positive terms in double precision
_FAINT = 60.0  # nepers by which the tilt damps losses that are all alike
_ROUNDOFF = float(np.finfo(np.longdouble).eps)
_TILTS = np.geomspace(1e-3, 1e11, 561)
_SLACK = (
    3.0  # nepers by which a Chernoff bound may be worse than the best one, for a shorter window
)
_LOG_LEAK = np.log(1e-12)  # of what may wrap around, relative to the Chernoff bound of delta
_MOST_PLACES = 1 << 23  # of one step's losses
_MANY = 100  # equal summands beyond which they are taken in tens
_SHARES_OF_TILT = np.array(
    [1.0, 0.5, 0.25, 0.12]
)  # smaller ones forgive more rounding far from the middle
_NOTHING = -35.0  # nepers, of a share that is no matter
_MARGIN = 16  # places that ten summands may be moved by, and a few
_OVERFLOWS = 600.0  # nepers; where a law on too coarse a grid has such masses, it says nothing


def delta_bounds(
    steps, epsilon, directions=("remove", "add"), *, precision=1e-6, n_points=N_POINTS
):
    """Lower and upper delta, the larger direction's; ever more points until they are as close, relative, as asked."""
    found = dict.fromkeys(directions, (0.0, 1.0))
    tens = (
        (True, False) if any(step[3] > _MANY for step in steps) else (False,)
    )  # which is closer depends on the run
    for n, in_tens in itertools.product(n_points, tens):
        least = max(lower for lower, _ in found.values())
        for direction, (lower, upper) in found.items():
            if upper - lower > precision * upper and upper > least:
                low, high = _bounds(steps, epsilon, direction, n, in_tens)
                found[direction] = max(low, lower), min(high, upper)
    return max(lower for lower, _ in found.values()), max(upper for _, upper in found.values())


def _bounds(steps, epsilon, direction, n_points, in_tens):
    counts = np.array([step[3] for step in steps], float)
    beyond = counts.sum() * _BEYOND
    transform = sum(step[3] * _Step.of(step, direction).log_transform(_TILTS) for step in steps)
    exponent = transform - _TILTS * epsilon
    chernoff = exponent - _TILTS * np.log1p(1 / _TILTS) - np.log1p(_TILTS)
    if chernoff.argmin() == len(_TILTS) - 1:  # epsilon lies above all losses
        return 0.0, float(np.exp(chernoff[-1])) + beyond
    tilts, exponent = np.append(0.0, _TILTS), np.append(0.0, exponent)
    window = min(
        (
            _Window.of(tilts, exponent, k + 1, epsilon, n_points)
            for k in np.flatnonzero(chernoff[:-1] <= chernoff.min() + _SLACK)
        ),
        key=lambda window: window.h,
    )
    h = window.h
    ends = [
        np.sort(_loss(np.array([-_END, step[0] / step[1] + _END]), step, direction))
        for step in steps
    ]
    origin = [0.0 if direction == "remove" else float(end[1]) for end in ends]
    lowest = [
        max(float(end[0]), zero - _FAINT / window.tilt)
        for end, zero in zip(ends, origin, strict=True)
    ]
    highest = (
        h * (window.first + n_points + 1) - counts @ lowest
    )  # a step of more loss leaves the window with its run
    offset, laws = 0.0, []
    for step, end, low in zip(steps, ends, lowest, strict=True):
        high = min(float(end[1]), highest + low)
        beyond += step[3] * _share_above(step, direction, high)
        found = _laws(step, direction, low, high, window, _MANY if in_tens else np.inf)
        if found is None:
            return 0.0, 1.0
        offset += found[0]
        laws += found[1]
    own, other, spread = zip(*laws, strict=True)
    n_steps = float(counts.sum())
    lower, upper = _below(own, other, offset, n_steps, window), _above(spread, n_steps, window)
    return lower, min(upper + beyond, 1.0)


def _share_above(step, direction, high):
    law = _Step.of(step, direction, [high])
    return float(law.mass[law.loss > high].sum())


def _laws(step, direction, low, high, window, many):
    """What a run's equal steps add up to, as laws of one step, of ten, of a hundred... where there are that many.

    Returns:
        the loss of the run at place 0 of the rounded laws, and a list of (rounded, the same without or with, spread); None
        where there are too many places.
    """
    digits, tens = [], step[3]
    while tens > many:
        digits.append(tens % 10)
        tens //= 10
    tilts = np.unique(np.concatenate([-_TILTS[::8], [0.0], _TILTS[::8], [window.tilt]]))
    transform = _Step.of(step, direction).log_transform(tilts) if digits else None
    blocks = [
        _Window.of_sum(tilts, transform, window, 10 ** (k + 1), step[3]) for k in range(len(digits))
    ]
    offset, laws = 0.0, []
    if not blocks or digits[0]:
        if (high - low) / window.h > _MOST_PLACES:
            return None
        offset, one = _one_step(step, direction, low, high, window.tilt, window.h)
        laws.append([replace(law, count=digits[0] if blocks else tens) for law in one])
        offset *= laws[0][0].count
    if blocks:
        if (high - low) / blocks[0].h > _MOST_PLACES:
            return None
        middle, one = _one_step(step, direction, low, high, window.tilt, blocks[0].h)
    for k, (block, number) in enumerate(zip(blocks, [*digits, tens][1:], strict=True)):
        moved = replace(block, first=block.first - int(np.rint(10 ** (k + 1) * middle / block.h)))
        if number:
            rounded = [law.block(10, moved, window.h, count=number) for law in one[:2]]
            laws.append([*rounded, one[2].block(10, block, window.h, count=number, spread=True)])
            offset += number * 10 ** (k + 1) * middle
        if k + 1 < len(blocks):
            h = blocks[k + 1].h
            one = [
                *(law.block(10, moved, h) for law in one[:2]),
                one[2].block(10, block, h, spread=True),
            ]
    return offset, laws


def _one_step(step, direction, low, high, tilt, h):
    """Loss at place 0 of the rounded laws, and the three laws of one step on a grid of this spacing."""
    grid = np.arange(np.floor(low / h) - 1, np.ceil(high / h) + 2)
    law = _Step.of(step, direction, h * grid)
    middle = law.mean_near_0(h)
    places, own, other = _Step.of(step, direction, middle + h * (grid + 0.5)).rounded(
        h, low, high, middle
    )
    spread = _Law.of(*law.spread(h, low, high), tilt, h)
    return middle, [_Law.of(places, own, tilt, h), _Law.of(places, other, tilt + 1, h), spread]


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
        knots = np.unique(
            np.append(knots, np.clip(_z_at(np.asarray(losses), step, direction), first, last))
        )
        half = np.diff(knots)[:, None] / 2
        z = (knots[:-1, None] + half * (1 + _NODES)).ravel()
        weight = (half * _WEIGHTS).ravel() / np.sqrt(2 * np.pi)
        without = weight * np.exp(-(z**2) / 2)
        with_ = (1 - rate) * without + rate * weight * np.exp(-((z - shift) ** 2) / 2)
        laws = (with_, without) if direction == "remove" else (without, with_)
        return cls(_loss(z, step, direction), *laws)

    def log_transform(self, tilts):
        kept = self.mass > 0
        exponent = np.outer(tilts, self.loss[kept]) + np.log(self.mass[kept])
        peak = exponent.max(axis=1)
        exponent -= peak[:, None]
        return peak + np.log(np.exp(exponent, out=exponent).sum(axis=1))

    def mean_near_0(self, h):
        """Mean of the losses near 0, which one place holds where participation is rare."""
        near = np.abs(self.loss) < h / 2
        return float(self.mass[near] @ self.loss[near] / max(self.mass[near].sum(), 1e-300))

    def rounded(self, h, low, high, middle):
        """Places, whose losses lie h apart and at place 0 in the middle, and their masses under both laws.

        Losses beyond low or high count as these.
        """
        place = np.rint((self.loss.clip(low, high) - middle) / h).astype(np.int64)
        first = place.min()
        laws = np.bincount(place - first, self.mass), np.bincount(place - first, self.other)
        return first + np.arange(len(laws[0])), *laws

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
        exponent = np.where(
            exponent < 1, np.log1p(rate * np.expm1(np.minimum(exponent, 1.0))), large
        )
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
    def of(cls, tilts, exponent, k, epsilon, n, log_leak=_LOG_LEAK, margin=0):
        """The shortest one at the k-th tilt; exponent is log E[exp(tilt * (loss - epsilon))] at all tilts.

        Places of the margin are added on both sides.
        """
        goal = exponent[k] + log_leak
        below, above = tilts[:k], tilts[k + 1 :]
        left = (exponent[:k] - goal) / (tilts[k] - below)
        right = (exponent[k + 1 :] - goal) / (above - tilts[k])
        h = (
            1.1 * (left.min() + right.min()) / (n - 2 * margin)
        )  # a tenth more, since the laws on the grid are wider
        first = int(np.floor((epsilon - 1.1 * left.min()) / h)) - margin
        return cls(epsilon, tilts[k], below[left.argmin()], above[right.argmin()], h, first, n)

    @classmethod
    def of_sum(cls, tilts, transform, whole, size, count):
        """One for the sum of some of a run's steps, whose log transform at all tilts is given."""
        k = int(np.searchsorted(tilts, whole.tilt))
        middle = size * (transform[k + 1] - transform[k]) / (tilts[k + 1] - tilts[k])
        exponent = size * transform - tilts * middle
        return cls.of(tilts, exponent, k, middle, whole.n, _LOG_LEAK - np.log(count), _MARGIN)

    @property
    def excess(self):
        return self.h * (self.first + np.arange(self.n)) - self.epsilon


@dataclass(frozen=True)
class _Law:
    """Masses at places h apart times exp(tilt * loss - scale), 1 in all; of `count` equal summands of a run.

    Attributes:
        error: bound of the sum of all errors of the masses.
        parts: another law, of which each loss is a sum of so many, moved by at most h, and the window of the sum.
        known: transforms by tilt.
    """

    places: np.ndarray
    masses: np.ndarray
    scale: float
    tilt: float
    h: float
    count: int = 1
    error: float = 0.0
    parts: tuple | None = None
    known: dict = field(default_factory=dict)

    @classmethod
    def of(cls, places, mass, tilt, h):
        """From masses that are not tilted yet."""
        places, mass = places[mass > 0], mass[mass > 0]
        return cls._normed(
            places, np.log(mass.astype(np.longdouble)) + np.longdouble(tilt * h) * places, tilt, h
        )

    @classmethod
    def _normed(cls, places, log_mass, tilt, h, **more):
        peak = log_mass.max()
        tilted = np.exp(log_mass - peak)
        total = tilted.sum()
        return cls(places, tilted / total, float(peak + np.log(total)), tilt, h, **more)

    def transform(self, tilt):
        """Log of E[exp(tilt * loss)], from above."""
        if tilt not in self.known:
            self.known[tilt] = self._transform(tilt)
        return self.known[tilt]

    def _transform(self, tilt):
        inside = self.scale + self._log_mean(tilt, self.h * self.places, self.masses.astype(float))
        if self.parts is None:
            return inside
        law, size, window = self.parts
        moved = (abs(tilt) + 1) * self.h
        ends = window.h * np.array([window.first, window.first + window.n])
        wrong = self.scale + self._log_mean(tilt, ends, np.full(2, max(self.error, 1e-300)))
        least, most = (bound + self.tilt - window.tilt for bound in (window.smaller, window.larger))
        least, most = min(least, tilt), max(most, tilt)
        below = size * law.transform(least) + (tilt - least) * ends[0]
        above = size * law.transform(most) - (most - tilt) * ends[1]
        found = float(np.logaddexp.reduce([inside, wrong + moved, below + moved, above + moved]))
        return min(found, size * law.transform(tilt) + moved)

    def _log_mean(self, tilt, losses, masses):
        exponent = (tilt - self.tilt) * losses + np.log(masses)
        peak = exponent.max()
        return float(peak + np.log(np.exp(exponent - peak).sum()))

    def block(self, size, window, h, *, count=1, spread=False):
        """The sum of so many of these, composed on a window and then rounded to multiples of h or spread between them."""
        parts = [replace(self, count=size)]
        total = _Sum.of(parts, window)
        smaller, larger = (
            tilt + self.tilt - window.tilt for tilt in (window.smaller, window.larger)
        )
        leak = total.beyond(parts, smaller, window, window.first)
        leak += total.beyond(parts, larger, window, window.first + window.n)
        error = total.error + 2 * leak + total.rounding * np.sqrt(window.n)
        kept = total.masses > 0
        loss = (window.h * (window.first + np.arange(window.n)))[kept]
        mass = total.masses[kept].astype(float)
        place = np.floor(loss / h) if spread else np.rint(loss / h)
        first, n = int(place.min()), int(np.ptp(place)) + 2
        index, above = place.astype(np.int64) - first, loss - h * place
        if spread:
            share = np.clip(np.expm1(above) / np.expm1(h), 0.0, 1.0)
            moved = np.bincount(index, mass * (1 - share) * np.exp(-(self.tilt + 1) * above), n)
            moved += np.bincount(index + 1, mass * share * np.exp((self.tilt + 1) * (h - above)), n)
        else:
            moved = np.bincount(index, mass * np.exp(-self.tilt * above), n)
        filled = np.flatnonzero(moved)
        log_moved = np.log(moved[filled].astype(np.longdouble)) + total.scale
        more = {
            "count": count,
            "error": error * np.exp(2 * (self.tilt + 1) * h),
            "parts": (self, size, window),
        }
        return self._normed(first + filled, log_moved, self.tilt, h, **more)


@dataclass(frozen=True)
class _Sum:
    """Masses at the places of a window in units of exp(scale - tilt * loss).

    rounding bounds the 2-norm of their rounding, error the sum of what else they may be wrong by.
    """

    tilt: float
    scale: float
    masses: np.ndarray
    rounding: float
    error: float

    @classmethod
    def of(cls, laws, window):
        """Of all summands of some laws of one tilt."""
        n, exponent, scale, rounding, error = window.n, 0, 0.0, 0.0, 0.0
        for law in laws:
            circle = np.zeros(n, np.longdouble)
            np.add.at(circle, law.places % n, law.masses)
            transform = fft.rfft(circle)
            exponent = exponent + law.count * np.log(
                np.where(transform == 0, np.longdouble("1e-4000"), transform)
            )
            scale += law.count * law.scale
            rounding += law.count * 10 * np.log2(n) * float(np.linalg.norm(circle))
            error += law.count * law.error
        n_summands = sum(law.count for law in laws)
        size = np.exp(exponent.real) * (4 * n_summands + 4 * np.abs(exponent.real) + 8)
        rounding += float(np.sqrt(np.sum(size**2) * 2 / n))  # of the powers
        masses = fft.irfft(np.exp(exponent), n)
        rounding += 10 * np.log2(n) * float(np.linalg.norm(masses))
        rolled = np.roll(masses, -(window.first % n))
        return cls(
            laws[0].tilt, scale, rolled, rounding * _ROUNDOFF, 1.1 * error if error < 0.1 else 1e300
        )

    def beyond(self, laws, tilt, window, place):
        """Chernoff bound by tilts up to another one of the share of the tilted law beyond a place.

        Above it if the other tilt is larger, below it if that is smaller.
        """
        found = 0.0
        for shift in (tilt - self.tilt) * _SHARES_OF_TILT:
            transform = sum(law.count * law.transform(self.tilt + shift) for law in laws)
            found = min(found, transform - self.scale - shift * window.h * place)
            if found < _NOTHING:
                break
        return np.exp(found)


def _below(own, other, offset, n_steps, window):
    """Delta of the best attacker who says "present" from some place of the window on; place 0 has the loss `offset`."""
    epsilon, first = window.epsilon, window.first - int(np.rint(offset / window.h))
    window = replace(window, epsilon=epsilon - offset, first=first)
    reach = min(2 / window.tilt, 20.0)
    near = np.abs(window.excess) <= reach  # where thresholds are looked for
    granted = np.exp(n_steps * _MASS_ERROR)
    true, false = (
        _Sum.of(own, window),
        _Sum.of(other, window),
    )  # the latter tilted by 1 more: the same losses matter
    wrapped = true.beyond(own, window.smaller, window, window.first)
    wrapped += true.beyond(own, window.larger, window, window.first + window.n)
    units = (
        true.scale - true.tilt * window.epsilon,
        epsilon + false.scale - false.tilt * window.epsilon,
    )
    if max(units) > _OVERFLOWS:
        return 0.0
    present = []
    for side, unit, error, factor in (
        (true, units[0], -1, 1 / granted),
        (false, units[1], 1, granted),
    ):
        fall = np.exp(-side.tilt * window.excess.clip(-1.1 * reach))
        tail = np.cumsum((side.masses * fall)[::-1])[::-1]
        tail += error * side.rounding * np.sqrt(np.cumsum(np.square(fall)[::-1])[::-1])
        # what is folded into the window never lowers what is false
        tail += error * (side.error + (wrapped if side is true else 0.0)) * fall
        present.append(np.exp(unit) * tail * factor)
    return max(float((present[0] - present[1])[near].max(initial=0.0)), 0.0)


def _above(spread, n_steps, window):
    """Delta of the spread losses, and what may lie beyond the window."""
    total = _Sum.of(spread, window)
    excess = window.excess.clip(0.0)
    weight = np.exp(-window.tilt * excess) * -np.expm1(-excess)
    found = np.sum(total.masses * weight) + total.rounding * np.linalg.norm(weight) + total.error
    end = window.first + window.n
    missing = total.beyond(spread, window.larger, window, end) * np.exp(
        window.tilt * (window.epsilon - window.h * end)
    )
    unit = total.scale - window.tilt * window.epsilon
    return (
        float(np.exp(unit) * (found + missing) * np.exp(n_steps * _MASS_ERROR))
        if unit < _OVERFLOWS
        else 1.0
    )
