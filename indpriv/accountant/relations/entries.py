"""What each unit did in the steps that it took part in, from batch norms. Sensitive.

Given who took part when, a unit meets one Gaussian mechanism in each of its steps, and nothing in
any other. Its sensitivity over noise is the sum of its rows' contributions over the noise (by the
triangle inequality). Together these mechanisms are one Gaussian mechanism whose squared mu is the
sum of their squares.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.norm_log.batch_norms import BatchNormEntries
from indpriv.norm_log.norm_log import NormLog


@dataclass(frozen=True)
class SquaredShifts:
    """Squared mu of n units over the steps that they took part in, rounded up; shape (n,) each.

    Attributes:
        own: at the unit's own norms.
        clipped: at max_grad_norm.
        participations: number of steps.
    """

    own: FloatArray
    clipped: FloatArray
    participations: IntArray

    @classmethod
    def concatenated(cls, parts: list[SquaredShifts]) -> SquaredShifts:
        """The units of all parts."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def squared_shifts(
    log: NormLog,
    entries: BatchNormEntries,
    owners: IntArray | None,
    n: int,
    *,
    opposite: float = 0.0,
) -> SquaredShifts:
    """Sum the entries of n units.

    Args:
        log: their settings and levels.
        entries: of the rows of these units, ordered by position, then by step.
        owners: (n_rows,) unit of each row; None if each row is a unit.
        n: number of units.
        opposite: length of a gradient that takes the place of each row and points away from it, as
            a fraction of max_grad_norm.
    """
    unit = entries.position if owners is None else owners[entries.position]
    if owners is not None:
        order = np.lexsort((entries.step, unit))
        unit, entries = unit[order], entries.select(order)
    step = entries.step
    again = step[1:] == step[:-1]
    if again.any():
        again &= unit[1:] == unit[:-1]
    if again.any():  # several rows of a unit in a step, or one row several times
        starts = np.flatnonzero(np.append(True, ~again))
        rows = np.diff(np.append(starts, len(unit))).astype(np.float64)
        shift = np.add.reduceat(_shifts(log, entries, opposite), starts)
        unit, step, squares = unit[starts], step[starts], np.square(shift)
        most = np.square((1 + opposite) * rows)
    else:
        squares = _shifts(log, entries, opposite, power=2)
        most = np.array((1 + opposite) ** 2)
    participations = _lengths(unit, n)
    weight = 1 / np.square(log.settings.noise_multiplier)
    if weight.min() == weight.max():
        factor = float(weight[0])
    else:
        factor, most, squares = 1.0, most * weight[step], squares * weight[step]
    own = _sums(squares, participations) * factor
    clipped = (_sums(most, participations) if most.ndim else participations * most) * factor
    rounding = 1 + np.finfo(np.float64).eps * (log.total_steps + 8)  # of sums of as many terms
    return SquaredShifts(own * rounding, clipped * rounding, participations)


def _lengths(unit: NDArray[np.integer], n: int) -> IntArray:
    """(n,) number of entries of each unit, from their units in order."""
    ends = np.append(np.flatnonzero(unit[1:] != unit[:-1]) + 1, len(unit))[: len(unit)]
    found = np.zeros(n, np.int64)
    found[unit[ends - 1]] = np.diff(ends, prepend=0)
    return found


def _sums(values: FloatArray, lengths: IntArray) -> FloatArray:
    """(n,) sums of consecutive runs of values, of lengths (n,)."""
    found, some = np.zeros(len(lengths)), np.flatnonzero(lengths)
    if len(some):
        starts = np.cumsum(lengths) - lengths
        found[some] = np.add.reduceat(values, starts[some])
    return found


def _shifts(log: NormLog, entries: BatchNormEntries, opposite: float, power: int = 1) -> FloatArray:
    """(n_entries,) contributions as fractions of max_grad_norm, plus `opposite`, to this power."""
    if log.levels is None:
        relative = np.asarray(entries.norm, np.float64) / log.settings.max_grad_norm[entries.step]
    else:  # faster than to look fractions up
        top = log.levels.top
        level = max(log.levels.rounding, 1 / top)
        relative = np.multiply(np.minimum(entries.norm, top), level, dtype=np.float64)
    if log.levels is None or top * level > 1:
        np.minimum(relative, 1.0, out=relative)
    if opposite:
        relative += opposite
    return np.asarray(relative if power == 1 else np.square(relative, out=relative))
