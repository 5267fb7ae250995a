"""Nodes and weights in z for the transform of one step's loss, with errors that are bounded.

All integrals over z are of analytic functions with Gaussian tails. On the whole line the trapezoid
rule converges exponentially (Trefethen and Weideman 2014, SIAM Review 56(3), Theorem 5.1), with an
error bounded through the growth of the integrand off the real axis. A law that is cut off is
integrated by Gauss-Legendre panels, each so narrow that the integrand varies by a bounded factor
around it (Trefethen 2013, Approximation Theory and Approximation Practice, Theorem 19.3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv.accountant.pld.loss_sum import Direction, StepLaws, exponent_of, log_density_ratio

# Relative to E[exp(tilt loss)]; covers the quadrature and the tails outside the window
QUADRATURE_ERROR = 1e-16

_HALF_WINDOW = 9.5  # a Gaussian holds 2e-21 beyond it
_LOG_ERROR = 42.0  # -log of the error allowed to the trapezoid rule, 6e-19
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(32)
# Variation of the logarithm of the integrand over a panel; it is at most exp(28) on the ellipse of
# parameter 4 around the panel, where 32 nodes err by 4^-62
_PANEL_VARIATION, _WIDEST = 20.0, 4.0  # the second over 1 + shift
_LEAST_RATE = _PANEL_VARIATION / _WIDEST  # over 1 + shift
_CLASSES = 2  # numbers of nodes from one power of two to the next


def nodes_and_weights(
    laws: StepLaws,
    tilt: float,
    direction: Direction,
    highest_frequency: float = 0.0,
    n_nodes: int | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Quadrature of exp((tilt + i omega) loss) for all |omega| <= highest_frequency.

    Args:
        laws: all must be representable at this tilt (see transform.py).
        tilt: real part of w, above 0.
        direction: "remove" or "add".
        highest_frequency: the largest |imaginary part| of w.
        n_nodes: what `count_nodes` says, where it is known.

    Returns:
        z and weights, each (n_laws, n_nodes), with enough nodes for every law.
    """
    a = exponent_of(tilt, direction)
    low, high = tilted_window(laws, tilt, direction)
    if n_nodes is None:
        n_nodes = int(count_nodes(laws, tilt, direction, highest_frequency).max())
    if laws.cut is None:
        step = (high - low) / (n_nodes - 1)
        z = low[:, None] + step[:, None] * np.arange(n_nodes)
        return z, np.broadcast_to(step[:, None], z.shape)
    edges = _narrow_panels(laws, a, highest_frequency, low, high, n_nodes // len(_GAUSS_NODES))
    half = np.diff(edges, axis=1)[:, :, None] / 2
    z = (edges[:, :-1, None] + half * (1 + _GAUSS_NODES)).reshape(len(laws), -1)
    return z, (half * _GAUSS_WEIGHTS).reshape(len(laws), -1)


def count_nodes(
    laws: StepLaws, tilt: float, direction: Direction, highest_frequency: float
) -> NDArray[np.int64]:
    """(n_laws,) nodes that each law takes; few different numbers, so that many laws have the same.

    Laws integrated together take the largest number.
    """
    a = exponent_of(tilt, direction)
    low, high = tilted_window(laws, tilt, direction)
    if laws.cut is None:
        step = _trapezoid_step(laws, a, highest_frequency, low, high)
        return _rounded_up((high - low) / step) + 1
    ends = np.stack([low, high], axis=1)
    variation = _log_variation(ends, laws, np.hypot(a, highest_frequency))
    return len(_GAUSS_NODES) * _rounded_up(
        (variation[:, 1] - variation[:, 0]) / _PANEL_VARIATION + 1
    )


def _rounded_up(numbers: FloatArray) -> NDArray[np.int64]:
    """Whole numbers from a geometric series, at least these."""
    exponent = np.ceil(_CLASSES * np.log2(np.maximum(numbers, 1.0))) / _CLASSES
    return np.asarray(np.ceil(np.exp2(exponent)), np.int64)


def tilted_window(
    laws: StepLaws, tilt: float, direction: Direction
) -> tuple[FloatArray, FloatArray]:
    """Interval of z outside which the tilted law holds less than QUADRATURE_ERROR.

    f^a <= 1 - q + q exp(a (z shift - shift^2 / 2)) for a >= 1 or a <= 0 (convexity), so the tilted
    mass is at most that of N(0, 1) and N(a shift, 1), while E[f^a] >= 1. In the add direction
    f >= 1 - q bounds it as well.
    """
    if direction == "remove":
        high = _HALF_WINDOW + (tilt + 1.0) * laws.shift
        high = high if laws.cut is None else np.minimum(high, laws.cut)
        return np.full_like(high, -_HALF_WINDOW), high
    rise = -2 * tilt * np.log1p(-laws.sample_rate)
    low = -_HALF_WINDOW - np.minimum(tilt * laws.shift, np.sqrt(rise))
    low = low if laws.cut is None else np.maximum(low, -laws.cut)
    if 60.0 / tilt < 30.0:
        spent = np.log1p(np.expm1(60.0 / tilt) / laws.sample_rate)
    else:  # an upper bound of the same
        spent = -np.log(laws.sample_rate) + 60.0 / tilt
    # Beyond `spent`, f^a is below exp(-60)
    return low, np.minimum(full_window(laws), spent / laws.shift + laws.shift / 2)


def full_window(laws: StepLaws) -> FloatArray:
    """(n_laws,) the z at which the window must end for the quadrature to give E[f] = 1."""
    return _HALF_WINDOW + laws.shift  # f peaks at the shift


def _log_variation(z: FloatArray, laws: StepLaws, size: float) -> FloatArray:
    """Integral of a bound of how fast the logarithm of the integrand varies around a real z.

    The rate is |z| + shift + size |(log f)'| for a power of f of this size, and at least what keeps
    panels from coming near the zeros of f, at a distance of pi / shift from the real axis.
    """
    shift, rate = laws.shift[:, None], laws.sample_rate[:, None]
    ratio = log_density_ratio(z, shift, rate)
    return np.asarray(z * np.abs(z) / 2 + z * (1 + shift) * _LEAST_RATE + 1.5 * size * ratio)


def _narrow_panels(
    laws: StepLaws, a: float, frequency: float, low: FloatArray, high: FloatArray, n_panels: int
) -> FloatArray:
    """(n_laws, n_panels + 1) edges between which the integrand's logarithm varies equally."""
    size = float(np.hypot(a, frequency))
    z = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, 1025)
    variation = _log_variation(z, laws, size)
    goals = np.linspace(variation[:, 0], variation[:, -1], n_panels + 1, axis=1)
    edges = np.stack([np.interp(*row) for row in zip(goals, variation, z, strict=True)])
    shift, rate = laws.shift[:, None], laws.sample_rate[:, None]
    for _ in range(3):  # Newton, since the grid is coarse for many panels
        ratio = log_density_ratio(edges, shift, rate)
        posterior = np.exp(np.log(rate) + edges * shift - np.square(shift) / 2 - ratio)
        slope = np.abs(edges) + _LEAST_RATE * (1 + shift) + 1.5 * size * shift * posterior
        found = _log_variation(edges, laws, size)
        edges = np.clip(edges + (goals - found) / slope, low[:, None], high[:, None])
    return np.maximum.accumulate(edges, axis=1)


def _trapezoid_step(
    laws: StepLaws, a: float, frequency: float, low: FloatArray, high: FloatArray
) -> FloatArray:
    """(n_laws,) spacing at which the trapezoid rule errs by at most QUADRATURE_ERROR of E[f^a].

    For an integrand g that is analytic in |Im z| < d the error is at most
    2 M / (exp(2 pi d / step) - 1), where M bounds the integral of |g(x + i d)| over x. Here
    |f(x + i d)^(a + i omega)| <= |f(x + i d)|^a exp(omega |arg f(x + i d)|), and f has no zero for
    d < pi / shift. M is summed on a coarse grid, since only its order of magnitude is needed.
    """
    best = np.zeros(len(laws))
    for fraction in (0.9, 0.65, 0.4, 0.2, 0.07, 0.02):
        d = np.minimum(fraction * np.pi / laws.shift, 9.0 * fraction / 0.9)
        if np.all(best >= 2 * np.pi * d / (_LOG_ERROR + 2.0)):
            break  # neither this height nor a smaller one can give a longer step
        growth = np.zeros(len(laws))
        if a < 0 or frequency > 0:  # else |f| is largest on the real axis
            growth = np.maximum(_growth_off_axis(laws, a, frequency, low, high, d), 0.0)
        best = np.maximum(best, 2 * np.pi * d / (_LOG_ERROR + 2.0 + growth + np.square(d) / 2))
    return best


def _growth_off_axis(
    laws: StepLaws, a: float, frequency: float, low: FloatArray, high: FloatArray, d: FloatArray
) -> FloatArray:
    """(n_laws,) log of M over E[f^a], see `_trapezoid_step`, for d of shape (n_laws,)."""
    x = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, 49)
    shift, rate = laws.shift[:, None], laws.sample_rate[:, None]
    log_gauss = -np.square(x) / 2
    tilted = rate * np.exp(np.minimum(x * shift - np.square(shift) / 2, 300.0))
    angle = shift * d[:, None]
    real, imaginary = 1 - rate + tilted * np.cos(angle), tilted * np.sin(angle)
    log_size = np.log(real * real + imaginary * imaginary) / 2
    turned = frequency * np.abs(np.arctan2(imaginary, real))
    on_axis = _log_sum(log_gauss + a * log_density_ratio(x, shift, rate))
    return _log_sum(log_gauss + a * log_size + turned) - on_axis


def _log_sum(values: FloatArray) -> FloatArray:
    peak = values.max(axis=1)
    return np.asarray(peak + np.log(np.exp(values - peak[:, None]).sum(axis=1)))
