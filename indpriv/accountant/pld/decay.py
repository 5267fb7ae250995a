"""Proven bounds of |E[exp(i omega loss)]| under a tilted one-step law: how fast a contour integral may be cut off.

The line of z is cut into panels. Two ways to prove that a part of the law cancels itself:

* a window of mass p whose losses lie close together in units of 1 / omega contributes at most
  p sqrt(1 - omega^2 V + omega^4 M / 24), because 1 - cos x >= x^2 / 2 - x^4 / 24; V = Var(L | window) and
  M = E[(L - L')^4 | window] with L' an independent copy. Disjoint windows add: the best dyadic partition is taken;
* the tail z > e contributes at most kappa / omega (integration by parts), where kappa is the total variation, with the
  jump at e, of g / L', g the tilted density. log(g / L') is a parabola plus (a + 1) log f - z shift up to a constant; its
  derivative is a line plus a multiple of a logistic function, so that it turns at most three times and its variation
  between the points where it is evaluated exceeds what they show by a bounded factor only.

Where kinds are many, those of one sample rate and of shifts that are nearly alike share the bound of the smallest shift.
The loss is a function of y = z shift - shift^2 / 2 alone, which has law N(-v / 2, v), v = shift^2, and for v above v_1 the
ratio of the two densities is sqrt(v_1 / v) exp(y^2 (1 / v_1 - 1 / v) / 2 - (v - v_1) / 8) at y. So the law tilted under v
is at least share = sqrt(v_1 / v) exp(-(v - v_1) / 8) E_1 / E times that under v_1, with E = E[exp(tilt loss)], and what
remains cannot add more than its mass: |E[exp(i omega loss)]| <= 1 - share (1 - bound under v_1).
"""

from __future__ import annotations

import numpy as np

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import transform
from indpriv.accountant.pld.loss_sum import Direction, log_density_ratio
from indpriv.accountant.pld.transform import Kinds

_PER_PANEL = 6
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(_PER_PANEL)
_LARGEST_GAP = 0.24  # between neighbouring nodes, as a share of a panel (6-point Gauss-Legendre, edges included)
_PANEL_WIDTH = 0.5  # at most, in units of the narrowest scale of the tilted density
_PANELS = (64, 1024)  # at least and at most; powers of two
_MANY = 200  # kinds beyond which they share bounds
_ALIKE = 0.3  # logarithms of shifts, and log transforms and their logarithms, that share one differ by less
_SLACK = 1e-10  # relative, covers the quadrature of moments on panels this narrow and its rounding
_CHUNK = 4_000_000


def log_decay(
    kinds: Kinds, tilt: float, direction: Direction, frequencies: FloatArray
) -> FloatArray:
    """Upper bounds of log |E[exp(i omega loss)]| for all omega at or beyond each frequency.

    Args:
        kinds: representable at this tilt.
        tilt: real part of w.
        direction: "remove" or "add".
        frequencies: (n,) rising.

    Returns:
        (n_kinds, n), at most 0, not rising along each row.
    """
    if len(kinds) <= _MANY or kinds.cut is not None:
        return _own_decay(kinds, tilt, direction, frequencies)
    log_transform = transform.tilted_law(kinds, tilt, direction).log_transform
    places = [
        np.log(kinds.shift) / _ALIKE,
        np.log(np.maximum(log_transform, 1e-300)) / _ALIKE,
        log_transform / _ALIKE,
    ]
    alike = np.stack([kinds.sample_rate, *np.floor(places)], axis=1)
    groups, group = np.unique(alike, axis=0, return_inverse=True)
    group = group.ravel()
    ranking = np.lexsort((kinds.shift, group))
    smallest = ranking[np.searchsorted(group[ranking], np.arange(len(groups)))]
    own = _own_decay(
        Kinds(kinds.shift[smallest], kinds.sample_rate[smallest]), tilt, direction, frequencies
    )
    squares, first = np.square(kinds.shift), smallest[group]
    log_share = np.log(squares[first] / squares) / 2 - (squares - squares[first]) / 8
    share = np.exp(log_share + log_transform[first] - log_transform) * (1 - _SLACK)
    result: FloatArray = np.log1p(share[:, None] * np.expm1(own)[group])
    return result


def _own_decay(
    kinds: Kinds, tilt: float, direction: Direction, frequencies: FloatArray
) -> FloatArray:
    """See `log_decay`: each kind for itself."""
    law, edges = _panels(kinds, tilt, direction)
    n_kinds, n_panels = len(edges), edges.shape[1] - 1
    bound = np.empty((n_kinds, len(frequencies)))
    at_large = _tail_bound(law, edges, kinds, transform.exponent_of(tilt, direction), frequencies)
    offset = law.losses - np.sum(law.weights * law.losses, axis=1, keepdims=True)
    powers = np.stack(
        [
            (law.weights * offset**k).reshape(n_kinds, n_panels, _PER_PANEL).sum(axis=2)
            for k in range(5)
        ]
    )
    rows = max(1, _CHUNK // (n_panels * len(frequencies)))
    for start in range(0, n_kinds, rows):
        part = slice(start, start + rows)
        saved = _best_partition(powers[:, part], frequencies)
        bound[part] = np.minimum(1.0 - saved * (1 - _SLACK), at_large[part])
    bound = np.maximum.accumulate(bound[:, ::-1], axis=1)[:, ::-1]
    return np.log(np.clip(bound, 1e-300, 1.0))


def _panels(kinds: Kinds, tilt: float, direction: Direction) -> tuple[transform.Tilted, FloatArray]:
    """The tilted law on Gauss-Legendre nodes of panels, and their edges (n_kinds, n_panels + 1)."""
    a = transform.exponent_of(tilt, direction)
    low, high = transform.tilted_window(kinds, tilt, direction)
    wanted = np.max((high - low) * np.sqrt(_curvature(kinds, a))) / _PANEL_WIDTH
    n_panels = 2 ** int(np.ceil(np.log2(np.clip(wanted, *_PANELS))))
    width = (high - low) / n_panels
    edges = low[:, None] + width[:, None] * np.arange(n_panels + 1)
    z = (edges[:, :-1, None] + width[:, None, None] / 2 * (1 + _NODES)).reshape(len(kinds), -1)
    weight = np.tile(width[:, None] / 2 * _WEIGHTS, n_panels)
    return transform.law_on(z, weight, kinds, a, direction), edges


def _curvature(kinds: Kinds, a: float) -> FloatArray:
    """Bound of the second derivative of log g and of log(g / L')."""
    result: FloatArray = 1 + max(a + 1, abs(a)) * np.square(kinds.shift) / 4
    return result


def _best_partition(powers: FloatArray, frequencies: FloatArray) -> FloatArray:
    """Mass that cancels at least, between each frequency and the next, in the best dyadic partition of the panels.

    Args:
        powers: (5, n_kinds, n_panels) moments of order 0 to 4 of each panel, about one centre per kind.
        frequencies: (n,).

    Returns:
        (n_kinds, n); 0 for the last frequency, beyond which the bound does not hold.
    """
    saved = np.zeros((*powers.shape[1:], len(frequencies)))
    while True:
        mass = np.maximum(powers[0], 1e-300)
        first, second, third, fourth = powers[1:] / mass
        variance = second - first**2
        central = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
        spread = 2 * central + 6 * variance**2 + _SLACK * (16 * fourth + 6 * second**2)
        variance = np.maximum(variance - _SLACK * second, 0.0)
        square = 1 - variance[..., None] * frequencies**2 + spread[..., None] / 24 * frequencies**4
        gain = powers[0][..., None] * (1 - np.sqrt(np.clip(square, 0.0, 1.0)))
        # between two frequencies the square is convex in omega^2: the gain is smallest at an end
        saved[..., :-1] = np.maximum(saved[..., :-1], np.minimum(gain[..., :-1], gain[..., 1:]))
        if saved.shape[1] == 1:
            return saved[:, 0]
        saved = saved[:, 0::2] + saved[:, 1::2]
        powers = powers[:, :, 0::2] + powers[:, :, 1::2]


def _tail_bound(
    law: transform.Tilted, edges: FloatArray, kinds: Kinds, a: float, frequencies: FloatArray
) -> FloatArray:
    """(n_kinds, n) smallest P(z < e) + kappa(e) / omega over the edges e."""
    n_kinds, n_panels = len(edges), edges.shape[1] - 1
    width = edges[:, 1] - edges[:, 0]
    nodes = edges[:, :-1, None] + width[:, None, None] / 2 * (1 + _NODES)
    points = np.concatenate([edges[:, :-1, None], nodes], axis=2).reshape(n_kinds, -1)
    points = np.concatenate([points, edges[:, -1:]], axis=1)
    heights = np.exp(np.minimum(_log_height(points, law, kinds, a), 600.0))
    steps = np.abs(np.diff(heights, axis=1)).reshape(n_kinds, n_panels, -1).sum(axis=2)
    variation = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
    highest = np.maximum.accumulate(heights[:, ::-1], axis=1)[:, ::-1][:, : -1 : _PER_PANEL + 1]
    overshoot = np.expm1(
        np.minimum(_curvature(kinds, a) * np.square(width * _LARGEST_GAP) / 8, 50.0)
    )[:, None]
    # it may rise above neighbouring points at its turns only; beyond the last edge it falls to 0
    kappa = (
        heights[:, : -1 : _PER_PANEL + 1] + variation + heights[:, -1:] + 6 * overshoot * highest
    )
    mass = law.weights.reshape(n_kinds, n_panels, -1).sum(axis=2)
    below = np.concatenate([np.zeros((n_kinds, 1)), np.cumsum(mass, axis=1)[:, :-1]], axis=1) * (
        1 + _SLACK
    )
    best = np.empty((n_kinds, len(frequencies)))
    for column, omega in enumerate(frequencies):
        best[:, column] = (below + kappa / omega).min(axis=1)
    return best


def _log_height(z: FloatArray, law: transform.Tilted, kinds: Kinds, a: float) -> FloatArray:
    """Logarithm of g / |L'| at z: L' = shift * q exp(z shift - shift^2 / 2) / f."""
    shift, rate = kinds.shift[:, None], kinds.sample_rate[:, None]
    log_ratio = log_density_ratio(z, shift, rate)
    log_density = (
        -np.square(z) / 2 - np.log(2 * np.pi) / 2 + a * log_ratio - law.log_transform[:, None]
    )
    result: FloatArray = (
        log_density - np.log(shift * rate) - (z * shift - np.square(shift) / 2) + log_ratio
    )
    return result
