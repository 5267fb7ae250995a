"""The cells of a run: its distinct one-step mechanisms, and how the rows of a block fall into them. Sensitive.

Four ways of laying them out, chosen by histogram.cells_of:

* LevelCells: few distinct settings. Cells are levels under a setting; counts are exact.
* CompositeCells: many settings, or many levels. A cell is a code of a row, with all the steps that the row governs.
* SpanCells: levels under a setting, where each example has norms at steps of its own (batch norms); few settings.
* NodeCells: norms without rounding. Cells are nodes on a grid of mechanisms; see grid.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.counts import Counts
from indpriv.accountant.histogram.governing_records import (
    AT_CLIPPING_NORM,
    Participations,
    Segments,
)
from indpriv.accountant.rdp import renyi_divergences

_WORTH_THREADS = 20_000  # divergences that take longer than starting a thread


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divergences_of(
    shifts: FloatArray, sample_rates: FloatArray, orders: FloatArray, k: int = 1
) -> FloatArray:
    """(n_orders, n) Rényi divergences of one step, each distinct one computed once; see `renyi_divergences`."""
    pairs = np.stack([shifts, sample_rates], axis=1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    values = np.empty((len(distinct), len(orders)))

    def fill(part: slice) -> None:
        values[part] = renyi_divergences(distinct[part, 0], distinct[part, 1], orders, k)

    n_threads = n_cores() if values.size > _WORTH_THREADS else 1
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(fill, (slice(start, None, n_threads) for start in range(n_threads))))
    return values.T[:, inverse.ravel()]


@dataclass(frozen=True)
class Mechanisms:
    """One-step mechanisms; each array has shape (n,). relative_norms is a fraction of max_grad_norm."""

    relative_norms: FloatArray
    noise_multiplier: FloatArray
    sample_rate: FloatArray

    def __len__(self) -> int:
        return len(self.sample_rate)

    def take(self, index: IntArray) -> Mechanisms:
        """Some of the mechanisms."""
        return Mechanisms(
            self.relative_norms[index], self.noise_multiplier[index], self.sample_rate[index]
        )

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n) Rényi divergences of one step."""
        return divergences_of(self.relative_norms / self.noise_multiplier, self.sample_rate, orders)

    def participations(self, counts: FloatArray) -> Participations:
        """The histogram with these counts, shape (n_examples, n), as accountants of mechanisms take it."""
        return Participations(self.relative_norms, self.noise_multiplier, self.sample_rate, counts)


class Cells(Protocol):
    """The cells of a run."""

    @property
    def mechanisms(self) -> Mechanisms:
        """The mechanisms that the cells are made of."""
        ...

    @property
    def bytes_per_example(self) -> int:
        """Memory that the counts of one example take."""
        ...

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n_cells) Rényi divergence of one count of each cell."""
        ...

    def counts(self, rows: Any) -> Counts:
        """Counts over the cells of a block of examples, of what its GoverningRows (or spans) read."""
        ...

    def participations(self, rows: Any) -> Participations:
        """Histogram of the block over the mechanisms."""
        ...


def clipped_mechanisms(segments: Segments) -> tuple[Mechanisms, FloatArray]:
    """Mechanisms of the steps in which every example counts at max_grad_norm, and their numbers of steps."""
    index = np.flatnonzero(segments.row == AT_CLIPPING_NORM)
    setting = segments.setting[index]
    mechanisms = Mechanisms(
        np.ones(len(index)), segments.noise_multiplier[setting], segments.sample_rate[setting]
    )
    return mechanisms, segments.count[index].astype(np.float64)
