"""Tight epsilons over several runs: losses of single steps add up over all runs. Sensitive.

A step of a later run may be chosen by looking at earlier ones: pairs of laws that dominate each
step dominate the composition (Zhu, Dong and Wang 2022, arXiv:2106.08567v4, Theorem 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray
from indpriv.accountant.blocks import Epsilons
from indpriv.accountant.composition.joined_runs import KnownCells, RunPart
from indpriv.accountant.histogram.histogram import Histogram
from indpriv.accountant.histogram.mechanisms import Mechanisms
from indpriv.accountant.method import Method
from indpriv.accountant.pld.engine import bracketed


@dataclass(frozen=True)
class JoinedLosses:
    """The losses of runs of single rows.

    Attributes:
        runs: each with the histogram of its norms, or with squared mu; both are rounded up.
        mechanisms: of all runs, side by side.
        method: delta and tolerance.
    """

    runs: Sequence[tuple[RunPart, Histogram | KnownCells]]
    mechanisms: Mechanisms
    method: Method

    @classmethod
    def of(cls, parts: Sequence[RunPart], method: Method) -> JoinedLosses:
        """Lay out the mechanisms of runs."""
        runs = [
            (part, part.cells) for part in parts if isinstance(part.cells, Histogram | KnownCells)
        ]
        mechanisms = Mechanisms.concatenated([cells.mechanisms for _, cells in runs])
        return cls(runs, mechanisms, method)

    def epsilons(self, start: int, stop: int, limit: FloatArray) -> Epsilons:
        """Bounds of the people from start to stop, none above the limits (stop - start,)."""
        steps = np.hstack([_steps(part, cells, start, stop) for part, cells in self.runs])
        met = self.mechanisms.participations(steps)
        found = bracketed(met, met, self.method.delta, limit, self.method.tolerance)
        exact = all(isinstance(cells, Histogram) and cells.exact for _, cells in self.runs)
        return found if exact else Epsilons(found.epsilon, 0 * found.epsilon, found.details)


def _steps(part: RunPart, cells: Histogram | KnownCells, start: int, stop: int) -> FloatArray:
    """(stop - start, n_mechanisms) steps of each person in one run; 0 where not in it."""
    here = np.diff(part.first[start : stop + 1]) > 0
    steps = np.zeros((stop - start, len(cells.mechanisms)))
    if here.any():
        first, last = int(part.first[start]), int(part.first[stop])
        if isinstance(cells, KnownCells):
            steps[here] = cells.steps(first, last)
        else:
            steps[here] = cells.participations(part.log.part(first, last)).counts
    return steps
