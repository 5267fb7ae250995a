"""A grid of one-step mechanisms that shares a step between its neighbours without ever under-reporting RDP.

A mechanism is a shift u = relative_norm / noise_multiplier and a sample rate q. A step whose mechanism lies between
nodes is shared between them, linearly in u**2 and in log q. That never under-reports an RDP account, because
K = (order - 1) * rdp = log E[f^order] is convex in v = u**2 and in l = log q, for every order > 1:

* In v: with M = exp(B_v - v / 2), F = (1 - q + q M)**order and the generator L = (m**2 / 2) d^2/dm^2 one has
  d/dv E F = E LF, and F * LLF >= (LF)**2 pointwise, so that E F * E LLF >= (E LF)**2 (Cauchy-Schwarz).
* In l: with a = dlog f/dl = 1 - 1/f < 1 and T the mean under the law tilted by f^order,
  K'' = order * T[a] + order (order - 1) T[a^2] - order^2 T[a]^2 >= order * (T[a] - T[a]^2) >= 0, since
  0 <= K' = order * T[a] < order.

Mechanisms dominate each other in both u and q, so that rounding both up, or both down, brackets every accountant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.cells import Mechanisms
from indpriv.accountant.histogram.governing_records import Participations

NODE_RATIO = 1.5e-3  # relative distance of neighbouring shifts: RDP is overstated by about 1e-6
WHOLE_RATIO = (
    5e-3  # the same where steps are not shared: cells are dear to accountants of loss distributions
)
EXACT_RATES = 32  # so many distinct sample rates keep a grid each
_RATE_RATIO, _RATE_NODES = (
    3e-3,
    256,
)  # where there are more: by under 5e-6, and more where cells are too many
_FEWEST_SHIFTS = 256
_MAX_WHOLE_CELLS = (
    1 << 13
)  # of a grid where steps are not shared; tens of seconds for a block of examples
_MAX_CELLS = (
    1 << 16
)  # of a grid; RDP is overstated by 1e-4 where rates vary by a factor 2, and by up to 1e-3 beyond


@dataclass(frozen=True)
class NodeGrid:
    """Nodes (u, q): the product of shifts and sample rates, the shift running fastest.

    Attributes:
        shifts: (n_shifts,) ascending, from 0. rates: (n_rates,) ascending.
        geometric: shifts beyond the first two are a geometric series.
        between_nodes: "share" a step between its neighbours (for RDP), or count it "up" or "down" at one of them.
    """

    shifts: FloatArray
    rates: FloatArray
    geometric: bool
    between_nodes: str

    @classmethod
    def covering(
        cls,
        shifts: tuple[float, float],
        sample_rate: FloatArray,
        *,
        own: FloatArray | None = None,
        between_nodes: str = "share",
    ) -> NodeGrid:
        """A grid for these sample rates and for shifts that are 0, or between the two given (below: the chord to 0).

        own: the only shifts there are, where they are few. between_nodes: see the class.
        """
        rates = np.unique(sample_rate)
        finest, most = (
            (NODE_RATIO, _MAX_CELLS)
            if between_nodes == "share"
            else (WHOLE_RATIO, _MAX_WHOLE_CELLS)
        )
        if own is not None and len(own) * min(len(rates), EXACT_RATES + 1) > most:
            own = None
        if len(rates) > EXACT_RATES:
            span = float(np.log(rates[-1] / rates[0]))
            # As fine in rates as in shifts, with as many nodes as there may be: both overstate by their ratio squared
            ratio = (
                span * len(own) / most
                if own is not None
                else np.sqrt(span * np.log(shifts[1] / shifts[0]) / most)
            )
            n_rates = min(_RATE_NODES, int(span / max(float(ratio), _RATE_RATIO)) + 2)
            rates = np.geomspace(rates[0], rates[-1], max(n_rates, EXACT_RATES + 1))
        if own is not None:
            return cls(np.unique(np.append(own, 0.0)), rates, False, between_nodes)
        n_finest = int(np.ceil(np.log(shifts[1] / shifts[0]) / np.log1p(finest))) + 1
        n_shifts = max(min(n_finest, max(_FEWEST_SHIFTS, most // len(rates))), 2)
        return cls(np.append(0.0, np.geomspace(*shifts, n_shifts)), rates, True, between_nodes)

    @property
    def mechanisms(self) -> Mechanisms:
        """The nodes as mechanisms at max_grad_norm or below."""
        noise = 1 / self.shifts[-1]
        return Mechanisms(
            np.tile(np.minimum(self.shifts * noise, 1.0), len(self.rates)),
            np.full(len(self.shifts) * len(self.rates), noise),
            np.repeat(self.rates, len(self.shifts)),
        )

    @property
    def n_corners(self) -> int:
        """Among how many nodes a step is shared."""
        return 1 if self.between_nodes != "share" else 4 if len(self.rates) > EXACT_RATES else 2

    def share(
        self, shift: FloatArray, rate: FloatArray
    ) -> Iterator[tuple[IntArray, FloatArray | float]]:
        """Yield, for each corner, the node of each mechanism and its share; shift (n, ...), rate (n,)."""
        lower, above = self._locate_shift(shift)
        rate_index, rate_above = self._locate_rate(rate)
        extend = (-1, *(1,) * (shift.ndim - 1))
        base = (rate_index * len(self.shifts)).reshape(extend)
        if self.between_nodes != "share":
            to_round = np.ceil if self.between_nodes == "up" else np.floor
            right = to_round(rate_above).astype(np.int64).reshape(extend) * len(self.shifts)
            yield lower + to_round(above).astype(np.int64) + base + right, 1.0
            return
        if len(self.rates) <= EXACT_RATES:
            yield lower + base, 1.0 - above
            yield lower + 1 + base, above
            return
        for side, part in ((0, 1.0 - rate_above), (1, rate_above)):
            weight = part.reshape(extend)
            yield lower + base + side * len(self.shifts), (1.0 - above) * weight
            yield lower + 1 + base + side * len(self.shifts), above * weight

    def summed(self, mechanisms: Mechanisms, steps: FloatArray) -> FloatArray:
        """(n_nodes,) steps at each node of some mechanisms with their numbers of steps."""
        total = np.zeros(len(self.mechanisms))
        shift = mechanisms.relative_norms / mechanisms.noise_multiplier
        for node, part in self.share(shift, mechanisms.sample_rate):
            np.add.at(total, node, part * steps)
        return total

    def _locate_shift(self, shift: FloatArray) -> tuple[IntArray, FloatArray]:
        """Index of the node at or below, and the share of the next one."""
        if self.geometric:
            first, step = self.shifts[1], np.log(self.shifts[2] / self.shifts[1])
            lower = np.floor(np.log(np.maximum(shift, 1e-300) / first) / step).astype(np.int64) + 1
        else:
            lower = np.searchsorted(self.shifts, shift, side="right") - 1
        lower = np.clip(lower, 0, len(self.shifts) - 2)
        below, beyond = np.square(self.shifts)[lower], np.square(self.shifts)[lower + 1]
        return lower, np.clip((np.square(shift) - below) / (beyond - below), 0.0, 1.0)

    def _locate_rate(self, rate: FloatArray) -> tuple[IntArray, FloatArray]:
        if len(self.rates) <= EXACT_RATES:
            return np.searchsorted(self.rates, rate), np.zeros(len(rate))
        logs = np.log(self.rates)
        lower = np.clip(np.searchsorted(self.rates, rate, side="right") - 1, 0, len(self.rates) - 2)
        return lower, np.clip(
            (np.log(rate) - logs[lower]) / (logs[lower + 1] - logs[lower]), 0.0, 1.0
        )


def condensed(worst: Participations, *, between_nodes: str = "share") -> Participations:
    """One example's histogram over very many mechanisms, shared among the nodes of a grid."""
    shifts = worst.relative_norms / worst.noise_multiplier
    grid = NodeGrid.covering(
        (shifts.min() * (1 - NODE_RATIO), shifts.max()),
        worst.sample_rate,
        between_nodes=between_nodes,
    )
    counts = grid.summed(
        Mechanisms(worst.relative_norms, worst.noise_multiplier, worst.sample_rate), worst.counts[0]
    )
    used = np.flatnonzero(counts)
    return grid.mechanisms.take(used).participations(counts[None, used])
