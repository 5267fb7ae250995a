"""The bounds at which the norms of a log are counted: its own levels, or nodes of a lattice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.lattice import corners
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import NormLog

Values = NDArray[Any]  # codes of a rounded log, or float64 norms in units of NormCodes.unit

# Of a lattice, relative to max_grad_norm: its smallest norm above 0, and the distance of
# neighbouring norms.
_SMALLEST = {"share": 1e-4, "chord": 1e-4, "up": 1e-3, "down": 1e-3}
_RATIO = {"share": 4e-3, "chord": 4e-3, "up": 1.5e-3, "down": 1.5e-3}
_MOST_LEVELS = 4096  # of all max_grad_norms together; beyond, norms are located in a lattice
_MOST_CLIPPING_NORMS = 512  # distinct max_grad_norms; more are snapped to a geometric series
_CLIPPING_RATIO, _MOST_SNAPPED = 5e-4, 2048  # of neighbouring max_grad_norms that are snapped to


def counted_max_grad_norm(max_grad_norm: FloatArray, between_nodes: str) -> FloatArray:
    """max_grad_norm of each step as it is counted: very many values are snapped to fewer.

    A smaller one makes a contribution larger, which is what "share" and "up" need.
    """
    distinct = np.unique(max_grad_norm)
    if len(distinct) <= _MOST_CLIPPING_NORMS:
        return max_grad_norm
    width = np.log(distinct[-1] / distinct[0])
    series = np.geomspace(
        distinct[0], distinct[-1], min(int(width / _CLIPPING_RATIO) + 2, _MOST_SNAPPED)
    )
    side = "up" if between_nodes == "down" else "down"
    return np.asarray(series[corners(series, max_grad_norm, np.log, side)[0][0]])


@dataclass(frozen=True)
class NormCodes:
    """Codes of norms, which are comparable between records: a larger code is a larger bound.

    Where the log is rounded under one max_grad_norm, its own codes are used as they are. Otherwise
    norms are read as floats, and located among the bounds.

    Attributes:
        levels: rounding of the log; None without.
        unit: the max_grad_norm that bounds are fractions of.
        bounds: (n_codes,) ascending from 0. The last one is a clipped norm of unknown size.
        between_nodes: as in Lattice, for norms between bounds and for mechanisms between nodes.
        exact: bounds are all the levels that there are; no norm lies between them.
        direct: codes are those of the log.
    """

    levels: Levels | None
    unit: float
    bounds: FloatArray
    between_nodes: str
    exact: bool
    direct: bool

    @classmethod
    def of(cls, log: NormLog, between_nodes: str) -> NormCodes:
        """The codes of a log; between_nodes: as in Lattice."""
        clips, steps = log.settings.max_grad_norm, log.recorded_steps
        if log.batch_norms is not None:
            steps = np.append(steps, log.batch_norms.steps)
        units = np.unique(clips[steps]) if len(steps) else clips[:1]
        unit, clipped = float(units[0]), 2 * float(clips.max() / units[0])
        one = len(units) == 1
        if log.levels is not None and (one or len(units) * (log.levels.top + 1) <= _MOST_LEVELS):
            levels = np.unique(log.levels.fractions * (units[:, None] / unit))
            return cls(log.levels, unit, np.append(levels, clipped), between_nodes, True, one)
        # The divergence is not convex in the norm across max_grad_norm, which is therefore a node.
        tops = np.unique(counted_max_grad_norm(clips, between_nodes)) / unit
        smallest = _SMALLEST[between_nodes] * tops[0]
        n_nodes = int(np.ceil(np.log(tops[-1] / smallest) / _RATIO[between_nodes])) + 1
        nodes = np.geomspace(smallest, tops[-1], n_nodes)
        bounds = np.unique(np.concatenate([[0.0], nodes, tops, [clipped]]))
        return cls(log.levels, unit, bounds, between_nodes, False, False)

    def read(self, values: Values, unit: FloatArray) -> Values:
        """Comparable values of recorded ones (n, ...).

        values: codes, or norms of a log without rounding. unit: (n,) max_grad_norm of each.
        """
        if self.direct:
            return np.asarray(np.minimum(values, np.asarray(len(self.bounds) - 1, values.dtype)))
        scale = (unit / self.unit).reshape(-1, *(1,) * (values.ndim - 1))
        if self.levels is None:
            return np.asarray(np.minimum(values / self.unit, self.bounds[-1]))
        relative = self.levels.relative(values) * scale
        return np.asarray(np.where(values > self.levels.top, self.bounds[-1], relative))

    @property
    def clipped(self) -> float:
        """The value of a clipped norm of unknown size."""
        return len(self.bounds) - 1 if self.direct else float(self.bounds[-1])

    def relative(self, values: Values, max_grad_norm: FloatArray) -> FloatArray:
        """Contributions of values, as fractions of a max_grad_norm of the same shape."""
        norms = self.bounds[values] if self.direct else values
        return np.asarray(np.minimum(norms * (self.unit / max_grad_norm), 1.0))

    def table(self, max_grad_norm: FloatArray) -> FloatArray:
        """(n, n_codes) contributions of all codes under each max_grad_norm (n,)."""
        return np.minimum(self.bounds * (self.unit / max_grad_norm)[:, None], 1.0)

    def located(self, values: Values) -> list[tuple[IntArray, FloatArray | None]]:
        """The codes that values count at, each with its share of a step (None: all of it)."""
        if self.direct:
            return [(values, None)]
        rule = "up" if self.exact else self.between_nodes
        return corners(self.bounds, values, np.square, rule)

    @property
    def apart(self) -> float:
        """Relative distance of bounds that norms are shared between; 0 if none is."""
        return 0.0 if self.exact else _RATIO[self.between_nodes]

    @property
    def n_codes(self) -> int:
        """Number of codes."""
        return len(self.bounds)
