"""Proven bounds of |E[exp(i omega loss)]| under a tilted one-step law.

They say how far along a contour the integral must go. The line of z is cut into panels, and there
are two ways to prove that a part of the law cancels itself:

* a window of mass p whose losses are close together in units of 1 / omega contributes at most
  p sqrt(1 - omega^2 V + omega^4 M / 24), because 1 - cos x >= x^2 / 2 - x^4 / 24; here
  V = Var(L | window) and M = E[(L - L')^4 | window] with L' an independent copy. Disjoint windows
  add: the best dyadic partition is taken;
* the tail z > e contributes at most kappa / omega (integration by parts), where kappa is the total
  variation, with the jump at e, of g / L', g the tilted density. log(g / L') is a parabola plus
  (a + 1) log f - z shift up to a constant; its derivative is a line plus a multiple of a logistic
  function, so that it turns at most three times, and its variation between the points where it is
  evaluated exceeds what they show by a bounded factor only.

Where there are many laws, those of one sample rate and of similar shifts share the bound of the
smallest shift. The loss is a function of y = z shift - shift^2 / 2 alone, which has law
N(-v / 2, v), v = shift^2, and for v above v_1 the ratio of the two densities is
sqrt(v_1 / v) exp(y^2 (1 / v_1 - 1 / v) / 2 - (v - v_1) / 8) at y. So the law tilted under v is at
least share = sqrt(v_1 / v) exp(-(v - v_1) / 8) E_1 / E times that under v_1, with
E = E[exp(tilt loss)], and the rest cannot add more than its mass:
|E[exp(i omega loss)]| <= 1 - share (1 - bound under v_1).

Where steps are shared between nodes of a lattice (chords.py), the bound is that of the smallest
shift and rate around a node and those like it. A larger rate q tilts the law by another
(f / f_1)^a, and f / f_1 rises with z: where z >= -8 and a > 1, or z <= 8 + shift / 2 and a < 0, its
power is at least that at this end. Beyond the end f^a <= 1 <= E[f^a], so that at most 7e-16 of the
law under q_1 is there; twice as much is added to its bound. A larger rate also stretches
differences of losses, since loss' = shift pi: by at least 1 and by at most the ratio of the odds of
q and q_1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv.accountant.pld import transform
from indpriv.accountant.pld.chords import chord_terms
from indpriv.accountant.pld.loss_sum import (
    Cells,
    Direction,
    StepLaws,
    exponent_of,
    log_density_ratio,
)
from indpriv.accountant.pld.quadrature import tilted_window
from indpriv.accountant.pld.real_axis import Problem, Scan

_PER_PANEL = 6
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(_PER_PANEL)
_LARGEST_GAP = 0.24  # between neighbouring nodes or edges, as a share of a panel
_PANEL_WIDTH = 0.5  # at most, in units of the narrowest scale of the tilted density
_PANELS = (64, 1024)  # at least and at most; powers of two
_MANY = 200  # laws beyond which they share bounds
_ALIKE = 0.3  # log shifts, log transforms, and their logarithms that differ by less share a bound
_JOINED = 0.2, 0.1  # log shifts and rates of nodes of a lattice that differ by less share a bound
_SLACK = 1e-10  # relative, covers the quadrature of moments on panels this narrow and its rounding
_CHUNK = 1_000_000
_BEYOND = 2e-15  # twice what a law holds beyond chords.FARTHEST, and more
_REACHES = 4  # contours end at every fourth of the frequencies below: few different ones
# Frequencies over the tilt at which decay is bounded: closer together as far as contours mostly go
_NEAR, _FAR, _NEAR_STEP, _FAR_STEP = -4, 6, 1 / 3, 2
_FREQUENCIES = np.exp2(
    np.concatenate([np.arange(_NEAR, _FAR, _NEAR_STEP), np.arange(_FAR, 26, _FAR_STEP)])
)


@dataclass(frozen=True)
class Reach:
    """How far along a contour each example must go.

    Attributes:
        frequencies: (n_frequencies,) rising.
        tail: (n, n_frequencies) bound of 1 / pi times the integral of |E| / |w|^2 beyond each
            frequency.
        log_size: (n, n_frequencies) logarithm of a bound of |E| beyond each frequency, over E at
            the tilt.
        place: (n,) of the first one beyond which the contour adds less than the tolerance; -1 where
            there is none.
    """

    frequencies: FloatArray
    tail: FloatArray
    log_size: FloatArray
    place: NDArray[np.intp]

    @classmethod
    def of(cls, problem: Problem, scan: Scan, column: int, log_tolerance: float) -> Reach:
        """Bound the contours of examples that share a tilt; log_tolerance: relative to delta."""
        tilt, losses = float(scan.tilts[column]), problem.losses
        frequencies = tilt * _FREQUENCIES
        log_size = -np.outer(losses.gaussian / 2, frequencies**2)
        needed = losses.used
        if needed.any():
            laws, direction = problem.laws(scan.step_cut), problem.direction
            cells = losses.laws.cells
            # Many laws share bounds, which must not depend on who is asking
            if cells is not None or len(laws) > _MANY:
                needed = needed | transform.is_representable(laws, tilt, direction)

            def make(missing: NDArray[np.intp]) -> tuple[FloatArray]:
                if cells is not None:
                    return (decay_between(cells.select(missing), tilt, direction, frequencies),)
                return (log_decay(laws.select(missing), tilt, direction, frequencies),)

            key = ("decay", direction, scan.step_cut, int(scan.place[column]))
            log_size += losses.counts @ losses.laws.rows(key, needed, make)[0]
        tail = _integrated(log_size, tilt, frequencies)
        scale = scan.transform[:, column] - tilt * scan.epsilon + 1.0
        enough = np.log(tail) + scale[:, None] <= (problem.log_delta + log_tolerance)[:, None]
        first = enough.argmax(axis=1)
        rounded = -(-first // _REACHES) * _REACHES
        rounded = np.minimum(rounded, len(frequencies) - 1)
        place = np.where(enough.any(axis=1), rounded, -1)
        return cls(frequencies, tail, log_size, place)

    def select(self, examples: NDArray[np.intp]) -> Reach:
        """The reach of some examples."""
        return replace(
            self,
            tail=self.tail[examples],
            log_size=self.log_size[examples],
            place=self.place[examples],
        )


def _integrated(log_size: FloatArray, tilt: float, frequencies: FloatArray) -> FloatArray:
    """1 / pi times the integral of exp(log_size) / (tilt^2 + omega^2) beyond each frequency.

    Shape (n, n_frequencies).
    """
    widths = np.diff(np.append(np.arctan(frequencies / tilt), np.pi / 2))
    # Far out the difference of arc tangents cancels, and 1 / omega^2 is a close upper bound
    far = frequencies > 1e3 * tilt
    widths[far] = tilt * (1 / frequencies[far] - np.append(1 / frequencies[1:], 0.0)[far])
    terms = np.exp(np.maximum(log_size, -700.0)) * widths / (np.pi * tilt)
    return np.cumsum(terms[:, ::-1], axis=1)[:, ::-1] + 1e-300


def log_decay(
    laws: StepLaws, tilt: float, direction: Direction, frequencies: FloatArray
) -> FloatArray:
    """Upper bounds of log |E[exp(i omega loss)]| for all omega at or beyond each frequency.

    Args:
        laws: representable at this tilt.
        tilt: real part of w.
        direction: "remove" or "add".
        frequencies: (n,) rising.

    Returns:
        (n_laws, n), at most 0, not rising along a row.
    """
    if len(laws) <= _MANY or laws.cut is not None:
        return _own_decay(laws, tilt, direction, frequencies)
    log_transform = transform.log_transforms(laws, tilt, direction)
    log_log = np.log(np.maximum(log_transform, 1e-300))
    alike = np.floor(np.stack([np.log(laws.shift), log_log, log_transform], axis=1) / _ALIKE)
    keys = np.column_stack([laws.sample_rate, alike])
    groups, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.ravel()
    ranking = np.lexsort((laws.shift, group))
    smallest = ranking[np.searchsorted(group[ranking], np.arange(len(groups)))]
    kept = StepLaws(laws.shift[smallest], laws.sample_rate[smallest])
    own = _own_decay(kept, tilt, direction, frequencies)
    squares, first = np.square(laws.shift), smallest[group]
    log_share = np.log(squares[first] / squares) / 2 - (squares - squares[first]) / 8
    share = np.exp(log_share + log_transform[first] - log_transform) * (1 - _SLACK)
    return np.log1p(share[:, None] * np.expm1(own)[group])


def decay_between(
    cells: Cells, tilt: float, direction: Direction, frequencies: FloatArray
) -> FloatArray:
    """`log_decay` that is valid for all laws around nodes of a lattice; similar nodes share it."""
    bound = np.zeros((len(cells.rate), len(frequencies)))
    usable = np.flatnonzero(cells.low.shift > 0)
    if len(usable):
        shared, place = _joined(cells.select(usable))
        low, high = shared.low, shared.high
        odds = [np.log(laws.sample_rate / (1 - laws.sample_rate)) for laws in (low, high)]
        own = _own_decay(low, tilt, direction, frequencies, np.exp(odds[1] - odds[0]))
        share = np.exp(chord_terms(shared, tilt, direction)[:, 6]) * (1 - _SLACK)
        found = np.log1p(share[:, None] * np.minimum(np.expm1(own) + _BEYOND, 0.0))
        bound[usable] = found[place]
    return bound


def _joined(cells: Cells) -> tuple[Cells, NDArray[np.intp]]:
    """Cells around all nodes of similar shift and rate, without chords, and the one of each."""
    middle = np.stack([cells.high.shift, cells.rate], axis=1)
    keys, place = np.unique(np.floor(np.log(middle) / _JOINED), axis=0, return_inverse=True)
    place, n = place.ravel(), len(keys)
    least, most = np.full((2, n), np.inf), np.zeros((2, n))
    for row, name in enumerate(("shift", "sample_rate")):
        np.minimum.at(least[row], place, getattr(cells.low, name))
        np.maximum.at(most[row], place, getattr(cells.high, name))
    return Cells(StepLaws(*least), StepLaws(*most), most[1], *np.zeros((3, n))), place


def _own_decay(
    laws: StepLaws,
    tilt: float,
    direction: Direction,
    frequencies: FloatArray,
    stretch: FloatArray | None = None,
) -> FloatArray:
    """`log_decay` without sharing: what is found for a law does not depend on the others.

    stretch: (n_laws,) factor up to which differences of losses may be larger than the law's own.
    """
    stretch = np.ones(len(laws)) if stretch is None else stretch
    a = exponent_of(tilt, direction)
    low, high = tilted_window(laws, tilt, direction)
    wanted = (high - low) * np.sqrt(_curvature(laws, a)) / _PANEL_WIDTH
    n_panels = np.exp2(np.ceil(np.log2(np.clip(wanted, *_PANELS))))
    bound = np.empty((len(laws), len(frequencies)))
    for value in np.unique(n_panels):
        alike = np.flatnonzero(n_panels == value)
        at_once = max(1, _CHUNK // (int(value) * len(frequencies)))
        for start in range(0, len(alike), at_once):
            part = alike[start : start + at_once]
            edges = np.linspace(low[part], high[part], int(value) + 1, axis=1)
            bound[part] = _decay_on_panels(
                laws.select(part), edges, a, direction, frequencies, stretch[part]
            )
    return bound


def _decay_on_panels(
    laws: StepLaws,
    edges: FloatArray,
    a: float,
    direction: Direction,
    frequencies: FloatArray,
    stretch: FloatArray,
) -> FloatArray:
    """`log_decay` by panels between edges (n_laws, n_panels + 1), equally wide for each law."""
    n_laws, n_panels = len(edges), edges.shape[1] - 1
    width = (edges[:, -1] - edges[:, 0]) / n_panels
    z = (edges[:, :-1, None] + width[:, None, None] / 2 * (1 + _NODES)).reshape(n_laws, -1)
    law = transform.law_on(z, np.outer(width / 2, np.tile(_WEIGHTS, n_panels)), laws, a, direction)
    bound = _tail_bound(law, edges, laws, a, frequencies, stretch)
    offset = law.losses - np.sum(law.weights * law.losses, axis=1, keepdims=True)
    by_panel = (n_laws, n_panels, _PER_PANEL)
    powers = np.stack([(law.weights * offset**k).reshape(by_panel).sum(axis=2) for k in range(5)])
    saved = _best_partition(powers, frequencies, stretch)
    bound = np.minimum(1.0 - saved * (1 - _SLACK), bound)
    bound = np.maximum.accumulate(bound[:, ::-1], axis=1)[:, ::-1]
    return np.log(np.clip(bound, 1e-300, 1.0))


def _curvature(laws: StepLaws, a: float) -> FloatArray:
    """Bound of the second derivative of log g and of log(g / L')."""
    return 1 + max(a + 1, abs(a)) * np.square(laws.shift) / 4


def _best_partition(powers: FloatArray, frequencies: FloatArray, stretch: FloatArray) -> FloatArray:
    """Mass that cancels between each frequency and the next, in the best dyadic partition.

    Args:
        powers: (5, n_laws, n_panels) moments of order 0 to 4 of each panel, about one centre per
            law.
        frequencies: (n,).
        stretch: (n_laws,) see `_own_decay`.

    Returns:
        (n_laws, n) lower bounds; 0 for the last frequency, beyond which the bound does not hold.
    """
    saved = np.zeros((*powers.shape[1:], len(frequencies)))
    while True:
        mass = np.maximum(powers[0], 1e-300)
        first, second, third, fourth = powers[1:] / mass
        variance = second - first**2
        central = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
        spread = 2 * central + 6 * variance**2 + _SLACK * (16 * fourth + 6 * second**2)
        spread *= stretch[:, None] ** 4
        variance = np.maximum(variance - _SLACK * second, 0.0)
        square = 1 - variance[..., None] * frequencies**2 + spread[..., None] / 24 * frequencies**4
        gain = powers[0][..., None] * (1 - np.sqrt(np.clip(square, 0.0, 1.0)))
        # The square is convex in omega^2: between two frequencies the gain is smallest at an end
        saved[..., :-1] = np.maximum(saved[..., :-1], np.minimum(gain[..., :-1], gain[..., 1:]))
        if saved.shape[1] == 1:
            return saved[:, 0]
        saved = saved[:, 0::2] + saved[:, 1::2]
        powers = powers[:, :, 0::2] + powers[:, :, 1::2]


def _tail_bound(
    law: transform.Tilted,
    edges: FloatArray,
    laws: StepLaws,
    a: float,
    frequencies: FloatArray,
    stretch: FloatArray,
) -> FloatArray:
    """(n_laws, n) smallest P(z < e) + kappa(e) / omega over the edges e."""
    n_laws, n_panels = len(edges), edges.shape[1] - 1
    width = edges[:, 1] - edges[:, 0]
    nodes = edges[:, :-1, None] + width[:, None, None] / 2 * (1 + _NODES)
    points = np.concatenate([edges[:, :-1, None], nodes], axis=2).reshape(n_laws, -1)
    points = np.concatenate([points, edges[:, -1:]], axis=1)
    heights = np.exp(np.minimum(_log_height(points, law, laws, a), 600.0))
    steps = np.abs(np.diff(heights, axis=1)).reshape(n_laws, n_panels, -1).sum(axis=2)
    variation = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
    at_edges = slice(None, -1, _PER_PANEL + 1)
    highest = np.maximum.accumulate(heights[:, ::-1], axis=1)[:, ::-1][:, at_edges]
    rise = _curvature(laws, a) * np.square(width * _LARGEST_GAP) / 8
    overshoot = np.expm1(np.minimum(rise, 50.0))[:, None]
    # Only at its turns can it rise above neighbouring points; beyond the last edge it falls to 0
    kappa = heights[:, at_edges] + variation + heights[:, -1:] + 6 * overshoot * highest
    # The slope of a stretched loss is L' times a factor that falls from the stretch to 1
    kappa *= (2 - 1 / stretch)[:, None]
    mass = law.weights.reshape(n_laws, n_panels, -1).sum(axis=2)
    below = np.concatenate([np.zeros((n_laws, 1)), np.cumsum(mass, axis=1)[:, :-1]], axis=1)
    below *= 1 + _SLACK
    return np.stack([(below + kappa / omega).min(axis=1) for omega in frequencies], axis=1)


def _log_height(z: FloatArray, law: transform.Tilted, laws: StepLaws, a: float) -> FloatArray:
    """Logarithm of g / |L'| at z: L' = shift * q exp(z shift - shift^2 / 2) / f."""
    shift, rate = laws.shift[:, None], laws.sample_rate[:, None]
    log_ratio = log_density_ratio(z, shift, rate)
    log_density = a * log_ratio - np.square(z) / 2 - np.log(2 * np.pi) / 2
    log_slope = np.log(shift * rate) + z * shift - np.square(shift) / 2 - log_ratio
    return np.asarray(log_density - law.log_transform[:, None] - log_slope)
