"""The Laplace transform of one step's privacy loss, on the real axis and along a vertical line.

With f = 1 - q + q exp(z shift - shift^2 / 2) and z from N(0, 1), the transform K(w) = log E[exp(w loss)] is
log E[f^a], where a = w + 1 in the remove direction and a = -w in the add direction. At real w = alpha - 1 the first is
(alpha - 1) times the Renyi divergence of order alpha.

All integrals over z are of analytic functions with Gaussian tails. On the whole line the trapezoid rule converges
exponentially (Trefethen and Weideman 2014, SIAM Review 56(3), Theorem 5.1), with an error bounded through the growth of
the integrand off the real axis. A law may also be cut off at the z beyond which a run is so unlikely to go that delta
is not touched: rare huge losses would otherwise own the transform where the bulk of the loss decides delta. It is then
integrated by Gauss-Legendre panels, each so narrow that the integrand varies by a bounded factor around it
(Trefethen 2013, Approximation Theory and Approximation Practice, Theorem 19.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, ndtr, ndtri

from indpriv._arrays import FloatArray
from indpriv.accountant.pld.loss_sum import Direction, log_density_ratio

ComplexArray = NDArray[np.complex128]

UNIT_ROUNDOFF = 2.0**-53
QUADRATURE_ERROR = (
    1e-16  # relative to E[exp(tilt loss)], of the quadrature and of the cut tails together
)
_HALF_WINDOW = 9.5  # a Gaussian holds 2e-21 beyond it
_LOG_ERROR = 42.0  # -log of the error allowed to the trapezoid rule, 6e-19
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(16)
_PANEL_VARIATION = 4.0  # of the logarithm of the integrand: exp(4.3) on the ellipse of parameter 4 around a panel, 4^-32
_CHUNK = 1 << 18  # numbers held at a time: 4 MB
_NODES_AT_ONCE = 1024  # summed by one matrix product; sums of sums err less than one long sum


@dataclass(frozen=True)
class Kinds:
    """One-step laws.

    Attributes:
        shift: (n_kinds,) above 0.
        sample_rate: (n_kinds,) in (0, 1).
        cut: (n_kinds,) the law is cut off where z is above cut (remove) or below -cut (add); None is nowhere.
    """

    shift: FloatArray
    sample_rate: FloatArray
    cut: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.shift)

    def select(self, kinds: NDArray[np.bool_]) -> Kinds:
        """Some kinds only."""
        return Kinds(
            self.shift[kinds],
            self.sample_rate[kinds],
            None if self.cut is None else self.cut[kinds],
        )

    def cut_at(self, probability: float, direction: Direction) -> Kinds:
        """The same laws, cut so that a step goes beyond with at most this probability (under P or Q, see loss_sum).

        In the remove direction z has law P, which lies below N(shift, 1) in its upper tail; in the add direction Q.
        """
        if direction == "add":
            return Kinds(
                self.shift, self.sample_rate, np.full_like(self.shift, -ndtri(probability))
            )
        by_mixture = -ndtri(probability / 2)
        sampled = self.shift - ndtri(np.minimum(probability / 2 / self.sample_rate, 0.5))
        by_component = np.where(probability / 2 < self.sample_rate / 2, sampled, self.shift)
        return Kinds(self.shift, self.sample_rate, np.maximum(by_mixture, by_component))


@dataclass(frozen=True)
class Tilted:
    """The loss of each kind under its law tilted by exp(tilt * loss), on quadrature nodes in z.

    Attributes:
        losses: (n_kinds, n_nodes) loss at each node.
        weights: (n_kinds, n_nodes) probabilities; each row sums to 1.
        log_transform: (n_kinds,) K(tilt).
        error: (n_kinds,) bound of the relative rounding error of E[exp(w loss)], per unit of |w| + 1.
    """

    losses: FloatArray
    weights: FloatArray
    log_transform: FloatArray
    error: FloatArray


def exponent_of(tilt: float, direction: Direction) -> float:
    """The power a of the density ratio that belongs to a real w."""
    return tilt + 1.0 if direction == "remove" else -tilt


def is_representable(kinds: Kinds, tilt: float, direction: Direction) -> NDArray[np.bool_]:
    """(n_kinds,) whether the tilted law is near enough to be of use; a transform beyond this counts as infinite."""
    a = exponent_of(tilt, direction)
    rate = kinds.sample_rate
    growth = a * (a - 1) / 2 * np.square(kinds.shift)
    growth = (
        np.minimum(growth, a * np.log1p(-rate)) if direction == "add" else growth + np.log(rate)
    )
    if kinds.cut is not None and direction == "remove":
        growth = np.minimum(growth, a * log_density_ratio(kinds.cut, kinds.shift, rate))
    result: NDArray[np.bool_] = growth < 1000.0 + 20.0 * kinds.shift
    return result


def tilted_law(
    kinds: Kinds, tilt: float, direction: Direction, *, highest_frequency: float = 0.0
) -> Tilted:
    """Nodes and weights that integrate exp((tilt + i omega) loss) for all |omega| <= highest_frequency.

    Args:
        kinds: all must be representable at this tilt.
        tilt: real part of w, above 0.
        direction: "remove" or "add".
        highest_frequency: the largest |imaginary part| of w.

    Returns:
        the tilted law; with n nodes enough for every kind.
    """
    a = exponent_of(tilt, direction)
    low, high = tilted_window(kinds, tilt, direction)
    n_nodes = int(count_nodes(kinds, tilt, direction, highest_frequency).max())
    if kinds.cut is None:
        step = (high - low) / (n_nodes - 1)
        z = low[:, None] + step[:, None] * np.arange(n_nodes)
        weight = np.broadcast_to(step[:, None], z.shape)
    else:
        edges = _narrow_panels(kinds, a, highest_frequency, low, high, n_nodes // len(_GAUSS_NODES))
        half = np.diff(edges, axis=1)[:, :, None] / 2
        z = (edges[:, :-1, None] + half * (1 + _GAUSS_NODES)).reshape(len(kinds), -1)
        weight = (half * _GAUSS_WEIGHTS).reshape(len(kinds), -1)
    return law_on(z, weight, kinds, a, direction)


def count_nodes(
    kinds: Kinds, tilt: float, direction: Direction, highest_frequency: float
) -> NDArray[np.int64]:
    """(n_kinds,) nodes that `tilted_law` needs for each kind; together they take the most that one of them needs."""
    a = exponent_of(tilt, direction)
    low, high = tilted_window(kinds, tilt, direction)
    if kinds.cut is None:
        intervals = np.ceil((high - low) / _trapezoid_step(kinds, a, highest_frequency, low, high))
        return intervals.astype(np.int64) + 1
    ends = np.stack([low, high], axis=1)
    variation = _log_variation(ends, kinds, np.hypot(a, highest_frequency))
    panels = np.ceil((variation[:, 1] - variation[:, 0]) / _PANEL_VARIATION) + 1
    return len(_GAUSS_NODES) * panels.astype(np.int64)


def _log_variation(z: FloatArray, kinds: Kinds, size: float) -> FloatArray:
    """Rises with z at least at the rate at which the logarithm of the integrand may vary around a real z.

    That is |z| + shift + size |(log f)'| for a power of f of this size; all integrate in closed form.
    """
    shift, rate = kinds.shift[:, None], kinds.sample_rate[:, None]
    result: FloatArray = (
        z * np.abs(z) / 2 + z * (1 + shift) + 1.5 * size * log_density_ratio(z, shift, rate)
    )
    return result


def _narrow_panels(
    kinds: Kinds, a: float, frequency: float, low: FloatArray, high: FloatArray, n_panels: int
) -> FloatArray:
    """(n_kinds, n_panels + 1) edges between which the logarithm of the integrand varies equally little."""
    size = float(np.hypot(a, frequency))
    z = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, 1025)
    variation = _log_variation(z, kinds, size)
    goals = np.linspace(variation[:, 0], variation[:, -1], n_panels + 1, axis=1)
    edges = np.stack([np.interp(*row) for row in zip(goals, variation, z, strict=True)])
    for _ in range(3):  # Newton, since the grid is coarse for many panels
        found = _log_variation(edges, kinds, size)
        shift = kinds.shift[:, None]
        ratio = log_density_ratio(edges, shift, kinds.sample_rate[:, None])
        posterior = np.exp(
            np.log(kinds.sample_rate[:, None]) + edges * shift - np.square(shift) / 2 - ratio
        )
        slope = np.abs(edges) + 1 + shift + 1.5 * size * shift * posterior
        edges = np.clip(edges + (goals - found) / slope, low[:, None], high[:, None])
    return np.maximum.accumulate(edges, axis=1)


def law_on(
    z: FloatArray, weight: FloatArray, kinds: Kinds, a: float, direction: Direction
) -> Tilted:
    """The law tilted by f^a on given nodes z (n_kinds, n_nodes) with quadrature weights of the same shape."""
    shift, rate = kinds.shift[:, None], kinds.sample_rate[:, None]
    log_ratio = log_density_ratio(z, shift, rate)
    log_gauss = -np.square(z) / 2 - np.log(2 * np.pi) / 2 + np.log(weight)
    log_mass = log_gauss + a * log_ratio
    peak = log_mass.max(axis=1, keepdims=True)
    mass = np.exp(log_mass - peak)
    total = mass.sum(axis=1, keepdims=True)
    # log E[f^a] = log1p(E[f^a - 1 - a (f - 1)]), since E[f] = 1: nothing cancels when the step is nearly free
    power = a * log_ratio
    excess = rate * np.expm1(np.minimum(z * shift - np.square(shift) / 2, 600.0))
    small = np.sum(np.exp(log_gauss) * (np.expm1(np.minimum(power, 600.0)) - a * excess), axis=1)
    if kinds.cut is not None:
        small += _missing(kinds, a, direction)
    direct = peak[:, 0] + np.log(total[:, 0])
    stable = (power.max(axis=1) < 600.0) & (direct < 1.0)
    if direction == "add":
        stable &= z[:, -1] > _full_window(kinds) - 0.5
    log_transform = np.where(stable, np.log1p(np.where(stable, small, 0.0)), direct)
    losses = log_ratio if direction == "remove" else -log_ratio
    weights = mass / total
    spread = np.sum(weights * np.abs(losses), axis=1) + 2 * rate[:, 0] * erf(
        shift[:, 0] / np.sqrt(8.0)
    )
    # sums of so many terms in any order, each of three products (Higham 2002, section 3.1), with a margin
    longest = min(z.shape[1], _NODES_AT_ONCE) + z.shape[1] // _NODES_AT_ONCE
    error = (
        (3 * longest + 64) * UNIT_ROUNDOFF * (spread + np.where(stable, 0.0, 1.0 + np.abs(direct)))
    )
    return Tilted(losses, weights, log_transform, error)


def _missing(kinds: Kinds, a: float, direction: Direction) -> FloatArray:
    """What the cut takes from E[1 + a (f - 1)], which is 1 on the whole line; (n_kinds,), at most 0 in effect."""
    cut = np.zeros(len(kinds)) if kinds.cut is None else kinds.cut
    if direction == "remove":
        alone, sampled = ndtr(-cut), ndtr(kinds.shift - cut)
    else:
        alone, sampled = ndtr(-cut), ndtr(-kinds.shift - cut)
    result: FloatArray = -alone - a * kinds.sample_rate * (sampled - alone)
    return result


@dataclass(frozen=True)
class ContourTable:
    """One step's transform along a contour.

    Attributes:
        logarithm: (n_kinds, n_frequencies) K(tilt + i omega) - K(tilt).
        error: (n_kinds,) bound of the rounding of E[exp(w loss)], relative to its size at the tilt, per unit of |w| + 1.
    """

    logarithm: ComplexArray
    error: FloatArray


def contour_table(
    kinds: Kinds, tilt: float, direction: Direction, frequencies: FloatArray
) -> ContourTable:
    """The transform of each kind at equally spaced frequencies from 0; kinds that need like many nodes go together."""
    highest = float(frequencies[-1])
    size = np.ceil(np.log2(count_nodes(kinds, tilt, direction, highest)))
    logarithm, error = np.empty((len(kinds), len(frequencies)), np.complex128), np.empty(len(kinds))
    for value in np.unique(size):
        alike = size == value
        law = tilted_law(kinds.select(alike), tilt, direction, highest_frequency=highest)
        logarithm[alike], error[alike] = characteristic_log(law, frequencies), law.error
    return ContourTable(logarithm, error)


def characteristic_log(law: Tilted, frequencies: FloatArray) -> ComplexArray:
    """K(tilt + i omega) - K(tilt) for each kind at equally spaced frequencies from 0: (n_kinds, n_frequencies).

    With every omega the sum of a coarse and a fine one, exp(i omega loss) - 1 = A B + A + B of the two parts' own, so
    that all nodes of a contour are one matrix product for each kind. Nothing is added to 1 before the logarithm: near
    omega = 0 all terms are small, so that thousands of equal steps keep full precision.
    """
    n_kinds, n_nodes = law.losses.shape
    fine = int(np.ceil(np.sqrt(len(frequencies))))
    coarse = -(-len(frequencies) // fine)
    spacing = float(frequencies[1]) if len(frequencies) > 1 else 0.0
    sums = np.zeros((n_kinds, coarse, fine), np.complex128)
    kinds_at_a_time = max(1, _CHUNK // (min(n_nodes, _NODES_AT_ONCE) * (fine + coarse)))
    for start in range(0, n_kinds, kinds_at_a_time):
        rows = slice(start, start + kinds_at_a_time)
        for first in range(0, n_nodes, _NODES_AT_ONCE):
            nodes = slice(first, first + _NODES_AT_ONCE)
            losses, weights = law.losses[rows, nodes], law.weights[rows, nodes]
            near, far = (
                _turns(spacing * losses, fine),
                _turns(fine * spacing * losses, coarse) * weights[:, None],
            )
            sums[rows] += far @ near.transpose(0, 2, 1)
            sums[rows] += far.sum(axis=2)[:, :, None] + (near @ weights[:, :, None]).transpose(
                0, 2, 1
            )
    return _complex_log1p(sums.reshape(n_kinds, -1)[:, : len(frequencies)])


def _turns(angle: FloatArray, n_turns: int) -> ComplexArray:
    """(n_kinds, n_turns, n_nodes) exp(i k angle) - 1 for k from 0, to full relative precision, by doubling."""
    turns = np.zeros((len(angle), n_turns, angle.shape[1]), np.complex128)
    n_done = 1
    while n_done < n_turns:
        half = angle * (n_done / 2)
        sine = np.sin(half)
        turn = (2 * sine * (1j * np.cos(half) - sine))[:, None]
        following = turns[:, : min(n_done, n_turns - n_done)]
        turns[:, n_done : 2 * n_done] = following * turn + following + turn
        n_done *= 2
    return turns


def _complex_log1p(sums: ComplexArray) -> ComplexArray:
    """log(1 + x); a modulus of 0 becomes exp(-345), which only a zero weight can meet."""
    real, imaginary = sums.real, sums.imag
    square = 2 * real + real * real + imaginary * imaginary
    modulus = np.square(1 + real) + np.square(imaginary)  # without cancellation where it is small
    near = square > -0.5
    result = np.empty(sums.shape, np.complex128)
    result.real = (
        np.where(near, np.log1p(np.maximum(square, -0.5)), np.log(np.maximum(modulus, 1e-300))) / 2
    )
    result.imag = np.arctan2(imaginary, 1 + real)
    return result


def tilted_window(kinds: Kinds, tilt: float, direction: Direction) -> tuple[FloatArray, FloatArray]:
    """Interval of z outside which the tilted law holds less than QUADRATURE_ERROR.

    f^a <= 1 - q + q exp(a (z shift - shift^2 / 2)) for a >= 1 or a <= 0 (convexity), so the tilted mass is at most that
    of N(0, 1) and N(a shift, 1), while E[f^a] >= 1. In the add direction f >= 1 - q bounds it as well.
    """
    if direction == "remove":
        high = _HALF_WINDOW + (tilt + 1.0) * kinds.shift
        return np.full_like(high, -_HALF_WINDOW), high if kinds.cut is None else np.minimum(
            high, kinds.cut
        )
    rise = -2 * tilt * np.log1p(-kinds.sample_rate)
    low = -_HALF_WINDOW - np.minimum(tilt * kinds.shift, np.sqrt(rise))
    low = low if kinds.cut is None else np.maximum(low, -kinds.cut)
    spent = (
        -np.log(kinds.sample_rate) + 60.0 / tilt
    )  # log of an upper bound of (exp(60 / tilt) - 1 + q) / q
    if 60.0 / tilt < 30.0:
        spent = np.log1p(np.expm1(60.0 / tilt) / kinds.sample_rate)
    return low, np.minimum(
        _full_window(kinds), spent / kinds.shift + kinds.shift / 2
    )  # there f^a is below exp(-60)


def _full_window(kinds: Kinds) -> FloatArray:
    """(n_kinds,) where z must end for E[f] = 1 to hold under the quadrature: f peaks at the shift."""
    result: FloatArray = _HALF_WINDOW + kinds.shift
    return result


def _trapezoid_step(
    kinds: Kinds, a: float, frequency: float, low: FloatArray, high: FloatArray
) -> FloatArray:
    """(n_kinds,) spacing at which the trapezoid rule errs by less than QUADRATURE_ERROR relative to E[f^a].

    For an integrand g that is analytic in |Im z| < d the error is at most 2 M / (exp(2 pi d / step) - 1), where M bounds
    the integral of |g(x + i d)| over x. Here |f(x + i d)^(a + i omega)| <= |f(x + i d)|^a exp(omega |arg f(x + i d)|),
    and f has no zero for d < pi / shift. M is summed on a coarse grid, which needs its order of magnitude only.
    """
    best = np.zeros(len(kinds))
    for fraction in (0.9, 0.65, 0.4, 0.2, 0.07, 0.02):
        d = np.minimum(fraction * np.pi / kinds.shift, 9.0 * fraction / 0.9)
        if np.all(
            best >= 2 * np.pi * d / (_LOG_ERROR + 2.0)
        ):  # which neither this nor a smaller height can better
            break
        growth = np.zeros(len(kinds))
        if a < 0 or frequency > 0:  # else |f| is largest on the real axis
            growth = np.maximum(_growth_off_axis(kinds, a, frequency, low, high, d), 0.0)
        best = np.maximum(best, 2 * np.pi * d / (_LOG_ERROR + 2.0 + growth + np.square(d) / 2))
    return best


def _growth_off_axis(
    kinds: Kinds, a: float, frequency: float, low: FloatArray, high: FloatArray, d: FloatArray
) -> FloatArray:
    """(n_kinds,) log of M over E[f^a], see `_trapezoid_step`, for d of shape (n_kinds,)."""
    x = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, 49)
    shift, rate = kinds.shift[:, None], kinds.sample_rate[:, None]
    log_gauss = -np.square(x) / 2
    tilted = rate * np.exp(np.minimum(x * shift - np.square(shift) / 2, 300.0))
    angle = shift * d[:, None]
    real, imaginary = 1 - rate + tilted * np.cos(angle), tilted * np.sin(angle)
    log_size = np.log(real * real + imaginary * imaginary) / 2
    off_axis = _log_sum(log_gauss + a * log_size + frequency * np.abs(np.arctan2(imaginary, real)))
    return off_axis - _log_sum(log_gauss + a * log_density_ratio(x, shift, rate))


def _log_sum(values: FloatArray) -> FloatArray:
    peak = values.max(axis=1)
    result: FloatArray = peak + np.log(np.exp(values - peak[:, None]).sum(axis=1))
    return result
