"""A lattice of one-step mechanisms for runs with too many settings, and for norms without rounding.

A mechanism is a shift u = relative_norm / noise_multiplier and a sample rate q. A step whose
mechanism lies between nodes of the lattice is shared between them, linearly in u**2 and in log q.
This never under-reports an RDP account, because K = (order - 1) * rdp = log E[f^order] is convex in
v = u**2 and in l = log q, for every order > 1:

* In v: with M = exp(B_v - v / 2), F = (1 - q + q M)**order and the generator
  L = (m**2 / 2) d^2/dm^2 one has d/dv E F = E LF, and F * LLF >= (LF)**2 pointwise, so that E F * E
  LLF >= (E LF)**2 (Cauchy-Schwarz).
* In l: with a = dlog f/dl = 1 - 1/f < 1 and T the mean under the law tilted by f^order,
  K'' = order * T[a] + order (order - 1) T[a^2] - order^2 T[a]^2 >= order * (T[a] - T[a]^2) >= 0,
  since 0 <= K' = order * T[a] < order.

Loss distributions need whole numbers of steps. Mechanisms dominate each other in both u and q, so
that rounding both up gives an upper bound for every accountant, and rounding both down a lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.mechanisms import Mechanisms

_FEW_SHIFTS, _FEW_RATES = 512, 32  # at most this many distinct values are nodes themselves
# Of a lattice of chords: neighbouring shifts differ by _NEAR or by _STEP, whichever is less, and by
# _TINY_RATIO from _TINY to _SMALL of the largest one; rates by _RATE_RATIO if there are many
_NEAR, _STEP = 1.04, 0.004
_SMALL, _TINY, _TINY_RATIO = 0.005, 1e-4, 1.5
_CHORD_RATES, _RATE_RATIO = 4, 1.04
_RATE_SPACING = {"share": 4.0, "up": 1.0, "down": 1.0}  # times that of shifts: less curvature


def neighbours(
    nodes: FloatArray, values: FloatArray, curve: Callable[[FloatArray], FloatArray]
) -> tuple[IntArray, IntArray, FloatArray]:
    """Indices of the nodes below and above each value, and the share of the upper one.

    nodes: ascending; values beyond the ends count at the end nodes. curve: the share is linear in
    curve(value).
    """
    above = np.minimum(np.searchsorted(nodes, values), len(nodes) - 1)
    below = np.maximum(above - 1, 0)
    heights = curve(nodes)
    low, width = heights[below], heights[above] - heights[below]
    share = np.divide(curve(values) - low, width, out=np.ones(above.shape), where=width > 0)
    return below, above, np.clip(share, 0.0, 1.0)


def spread_of(shift: ArrayLike) -> FloatArray:
    """exp(u**2) - 1, the variance of the ratio of the densities of one unsampled step."""
    return np.asarray(np.expm1(np.square(shift)))


def corners(
    nodes: FloatArray,
    values: FloatArray,
    curve: Callable[[FloatArray], FloatArray],
    between_nodes: str,
) -> list[tuple[IntArray, FloatArray | None]]:
    """The nodes that values count at, each with its share of the values (None: all of it)."""
    below, above, share = neighbours(nodes, values, curve)
    if between_nodes in ("share", "chord"):
        return [(below, 1.0 - share), (above, share)]
    return [(above if between_nodes == "up" else np.where(share < 1.0, below, above), None)]


@dataclass(frozen=True)
class Lattice:
    """Nodes (shift, sample rate): the product of both, the shift running fastest.

    Attributes:
        shifts: (n_shifts,) ascending. rates: (n_rates,) ascending.
        between_nodes: "share" a step between neighbours, which suits RDP alone, or count it "up" or
            "down" at one of them; "chord" shares it as pld/chords.py says.
        chord_norms: relative distance of the norms that are shared before; chord_rates,
            chord_shifts: whether steps lie between rates, and between shifts. All of a lattice of
            chords only.
    """

    shifts: FloatArray
    rates: FloatArray
    between_nodes: str
    chord_norms: float = 0.0
    chord_rates: bool = False
    chord_shifts: bool = False

    @classmethod
    def covering(
        cls, shifts: FloatArray, rates: FloatArray, between_nodes: str, *, ratio: float, most: int
    ) -> Lattice:
        """A lattice for these shifts and rates: their own values where these are few.

        Otherwise neighbouring nodes differ by `ratio`, or by more where `most` nodes do not
        suffice.
        """
        axes = [np.unique(shifts), np.unique(rates)]
        n_shifts, n_rates = map(len, axes)
        many = n_shifts > _FEW_SHIFTS or n_shifts * min(n_rates, _FEW_RATES) > most
        free = {0: 1.0} if many else {}
        if n_rates > _FEW_RATES:
            free[1] = _RATE_SPACING[between_nodes]
        own = np.prod([len(axes[index]) for index in (0, 1) if index not in free])
        area = 1.0  # in steps of the spacing
        for index, spacing in free.items():
            smallest = axes[index][axes[index] > 0][0]
            area *= np.log(axes[index][-1] / smallest) / spacing
        step = max(ratio, float(area * own / most) ** (1 / max(len(free), 1)))
        for index, spacing in free.items():
            axis = axes[index]
            smallest = axis[axis > 0][0]
            n_nodes = int(np.ceil(np.log(axis[-1] / smallest) / (step * spacing))) + 1
            axes[index] = np.append(axis[axis == 0], np.geomspace(smallest, axis[-1], n_nodes))
        return cls(axes[0], axes[1], between_nodes)

    @classmethod
    def of_chords(cls, shifts: FloatArray, rates: FloatArray, norms: float) -> Lattice:
        """A lattice of few nodes: the shifts themselves, where they are no more than others.

        norms: see chord_norms.
        """
        largest, rates = float(shifts.max()), np.unique(rates)
        many = len(rates) > _CHORD_RATES
        nodes = [largest]
        while nodes[-1] > _TINY * largest:
            ratio = _NEAR if nodes[-1] > _SMALL * largest else _TINY_RATIO
            nodes.append(max(nodes[-1] / ratio, nodes[-1] - _STEP))
        if many:
            n_rates = int(np.ceil(np.log(rates[-1] / rates[0]) / np.log(_RATE_RATIO))) + 1
            rates = np.geomspace(rates[0], rates[-1], n_rates)
        own = np.unique(shifts[shifts > 0])
        between = norms > 0 or len(own) > len(nodes)
        chosen = nodes[::-1] if between else own
        return cls(np.array([0.0, *chosen]), rates, "chord", norms, many, between)

    @property
    def mechanisms(self) -> Mechanisms:
        """The nodes as mechanisms at max_grad_norm or below."""
        n_shifts, n_rates = len(self.shifts), len(self.rates)
        largest = self.shifts[-1]
        return Mechanisms(
            np.tile(np.minimum(self.shifts / largest, 1.0), n_rates),
            np.full(n_shifts * n_rates, 1 / largest),
            np.repeat(self.rates, n_shifts),
        )

    def locate(
        self, shift: FloatArray, rate: FloatArray
    ) -> Iterator[tuple[IntArray, FloatArray | float]]:
        """Yield the nodes of mechanisms and their shares; shift has shape (n, m), rate (n,)."""
        chords = self.between_nodes == "chord"
        # Without sampling, squared shifts add up
        of_shift = spread_of if chords and self.rates[-1] < 1 else np.square
        of_rate = np.square if chords else np.log
        by_rate = corners(self.rates, rate, of_rate, self.between_nodes)
        for column, part in corners(self.shifts, shift, of_shift, self.between_nodes):
            for row, other in by_rate:
                weight = 1.0 if part is None or other is None else part * other[:, None]
                yield column + row[:, None] * len(self.shifts), weight


def condensed(
    mechanisms: Mechanisms, steps: FloatArray, between_nodes: str, *, ratio: float, most: int
) -> tuple[Mechanisms, FloatArray]:
    """One example's (n,) steps under very many mechanisms, counted at the nodes of a lattice."""
    shifts, rates = mechanisms.shifts, mechanisms.sample_rate
    lattice = Lattice.covering(shifts, rates, between_nodes, ratio=ratio, most=most)
    counts = np.zeros(len(lattice.shifts) * len(lattice.rates))
    for node, part in lattice.locate(shifts[:, None], rates):
        np.add.at(counts, node[:, 0], np.ravel(part) * steps)
    used = np.flatnonzero(counts)
    return lattice.mechanisms.take(used), counts[used]
