"""The privacy loss of an example as a sum of independent one-step losses. Sensitive.

Along the direction of an example's gradient, one step of DP-SGD outputs z with law Q = N(0, 1)
without the example and P = (1 - q) N(0, 1) + q N(shift, 1) with it, where
shift = relative_norm / noise_multiplier and q is the Poisson sampling rate. Their density ratio is
f(z) = 1 - q + q exp(z shift - shift^2 / 2). The two neighbouring directions are "remove" (loss
log f, z from P) and "add" (loss -log f, z from Q).

All blocks and threads of a run share tables of functions of its one-step laws. A row of a table
belongs to one law and does not depend on which other rows were asked for, nor on any example: so
results do not depend on the order in which threads need them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, ndtri

from indpriv._arrays import FloatArray
from indpriv._row_tables import Arrays, RowTables
from indpriv.accountant.histogram.lattice import Lattice, spread_of
from indpriv.accountant.histogram.mechanisms import Participations

ComplexArray = NDArray[np.complex128]
UNIT_ROUNDOFF = 2.0**-53
Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")

_MOST_RUNS = 4  # whose tables are kept: of one account, laws rounded up and down, and worst cases

Source = tuple[bytes, bytes, tuple[float, bool, bool] | None]  # what `_of_bytes` makes laws of


class SharedLaws:
    """The laws of the loss of one step that a run has, and tables of their functions.

    Attributes:
        shift: (n_laws,) relative_norm / noise_multiplier, above 0.
        sample_rate: (n_laws,) in (0, 1).
        cells: where steps of other laws are shared between these; None where these are all.
    """

    def __init__(
        self,
        shift: FloatArray,
        sample_rate: FloatArray,
        cells: Cells | None = None,
        source: Source | None = None,
    ) -> None:
        """The laws; source: of those that all blocks share, which other processes share, too."""
        self.shift, self.sample_rate, self.cells = shift, sample_rate, cells
        self._tables, self._source = RowTables(len(shift)), source

    def __reduce__(self) -> tuple[Callable[..., SharedLaws], tuple[Any, ...]]:
        if self._source is None:
            return SharedLaws, (self.shift, self.sample_rate, self.cells)
        return _received, (self._source, self._tables)

    def __len__(self) -> int:
        return len(self.shift)

    def rows(
        self, key: Hashable, needed: NDArray[np.bool_], make: Callable[[NDArray[np.intp]], Arrays]
    ) -> Arrays:
        """See RowTables, whose rows are laws; key: what a function depends on besides the law."""
        return self._tables.rows(key, needed, make)


def shared_laws(
    shift: FloatArray, sample_rate: FloatArray, lattice: Lattice | None = None
) -> SharedLaws:
    """The laws with these parameters: the same object for equal arrays, as long as it is in use.

    lattice: that the laws are nodes of, if steps are shared between them.
    """
    shift, sample_rate = (np.ascontiguousarray(part, np.float64) for part in (shift, sample_rate))
    chords = lattice and (lattice.chord_norms, lattice.chord_rates, lattice.chord_shifts)
    return _of_bytes((shift.tobytes(), sample_rate.tobytes(), chords))


@lru_cache(maxsize=_MOST_RUNS)
def _of_bytes(source: Source) -> SharedLaws:
    shift, sample_rate, chords = source
    laws = StepLaws(np.frombuffer(shift), np.frombuffer(sample_rate))
    cells = Cells.of(laws, *chords) if chords is not None and len(laws) else None
    return SharedLaws(laws.shift, laws.sample_rate, cells, source)


def _received(source: Source, tables: RowTables) -> SharedLaws:
    """The laws of this process that are those of another one, with the tables filled there."""
    laws = _of_bytes(source)
    laws._tables.add(tables)
    return laws


@dataclass(frozen=True)
class LossSum:
    """The number of one-step losses of each law that add up for each example; free steps left out.

    Attributes:
        laws: of one step.
        counts: (n_examples, n_laws) number of steps under each law, float64.
        gaussian: (n_examples,) sum of shift^2 over the unsampled steps (sample_rate 1), which
            compose to one Gaussian.
    """

    laws: SharedLaws
    counts: FloatArray
    gaussian: FloatArray

    @classmethod
    def from_participations(
        cls, participations: Participations, lattice: Lattice | None = None
    ) -> LossSum:
        """Leave out free steps and compose unsampled ones: their squared shifts add exactly.

        lattice: that mechanisms are nodes of, if steps are shared between them.
        """
        shift = participations.relative_norms / participations.noise_multiplier
        counts = np.asarray(participations.counts, dtype=np.float64)
        whole = participations.sample_rate >= 1.0
        gaussian = counts[:, whole] @ shift[whole] ** 2
        kept = ~whole & (shift > 0)
        laws = shared_laws(shift[kept], participations.sample_rate[kept], lattice)
        return cls(laws, counts if kept.all() else counts[:, kept], gaussian)

    def __len__(self) -> int:
        return len(self.gaussian)

    @property
    def shift(self) -> FloatArray:
        """(n_laws,) of the laws."""
        return self.laws.shift

    @property
    def sample_rate(self) -> FloatArray:
        """(n_laws,) of the laws."""
        return self.laws.sample_rate

    @cached_property
    def used(self) -> NDArray[np.bool_]:
        """(n_laws,) laws that some example has a step under."""
        return np.asarray(self.counts.max(axis=0, initial=0.0) > 0)

    @cached_property
    def steps(self) -> FloatArray:
        """(n_examples,) number of sampled steps that are not free."""
        return np.asarray(self.counts.sum(axis=1))

    def select(self, examples: NDArray[np.intp]) -> LossSum:
        """The sums of some examples, without the laws that none of them has a step under."""
        part = self.rows(examples)
        kept = part.used
        if kept.all():
            return part
        cells = self.laws.cells and self.laws.cells.select(kept)
        laws = SharedLaws(self.shift[kept], self.sample_rate[kept], cells)
        return LossSum(laws, part.counts[:, kept], part.gaussian)

    def rows(self, examples: NDArray[np.intp]) -> LossSum:
        """The sums of some examples, with all laws."""
        if np.array_equal(examples, np.arange(len(self))):
            return self  # counts take many megabytes
        return replace(self, counts=self.counts[examples], gaussian=self.gaussian[examples])

    def total_variation_bound(self) -> FloatArray:
        """(n_examples,) sum of the steps' total variations: never below delta at epsilon 0."""
        if self.laws.cells is not None:  # it is no sum over nodes: it falls slowly towards 0
            return np.where(self.steps > 0, np.inf, erf(np.sqrt(self.gaussian / 8.0)))
        one_step = self.sample_rate * erf(self.shift / np.sqrt(8.0))
        return np.asarray(self.counts @ one_step + erf(np.sqrt(self.gaussian / 8.0)))


@dataclass(frozen=True)
class Bounds:
    """Proven bounds of a quantity of each example, (n_examples,) or (n_examples, k)."""

    lower: FloatArray
    upper: FloatArray

    def select(self, examples: NDArray[np.intp]) -> Bounds:
        """The bounds of some examples."""
        return Bounds(self.lower[examples], self.upper[examples])


@dataclass(frozen=True)
class StepLaws:
    """Laws of the loss of one step.

    Attributes:
        shift: (n_laws,) above 0.
        sample_rate: (n_laws,) in (0, 1).
        cut: (n_laws,) the law is cut off where z is above cut (remove) or below -cut (add); None
            for whole laws.
    """

    shift: FloatArray
    sample_rate: FloatArray
    cut: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.shift)

    def select(self, laws: NDArray[np.bool_] | NDArray[np.intp]) -> StepLaws:
        """Some of the laws."""
        cut = None if self.cut is None else self.cut[laws]
        return StepLaws(self.shift[laws], self.sample_rate[laws], cut)

    def cut_at(self, probability: float, direction: Direction) -> StepLaws:
        """The same laws, cut so that a step goes beyond with at most this probability.

        In the remove direction z has law P, which lies below N(shift, 1) in its upper tail; in the
        add direction it has law Q.
        """
        if direction == "add":
            return replace(self, cut=np.full_like(self.shift, -ndtri(probability)))
        by_mixture = -ndtri(probability / 2)
        sampled = self.shift - ndtri(np.minimum(probability / 2 / self.sample_rate, 0.5))
        by_component = np.where(probability < self.sample_rate, sampled, self.shift)
        return replace(self, cut=np.maximum(by_mixture, by_component))


_FIRST_CELL = 8.0  # (smallest of norm_codes.py over that of lattice.py)^4 / 2 is at most 5.1 / 2


@dataclass(frozen=True)
class Cells:
    """Around each law at a node of a lattice, the laws whose steps are shared with it.

    Attributes:
        low, high: laws of the smallest and of the largest shift and rate among them.
        rate: (n_laws,) of the nodes.
        chord_shift, chord_rate: (n_laws,) what a chord errs by at most, over the second derivative
            in the squared shift and in the squared rate.
    """

    low: StepLaws
    high: StepLaws
    rate: FloatArray
    chord_shift: FloatArray
    chord_norm: FloatArray
    chord_rate: FloatArray

    @classmethod
    def of(cls, laws: StepLaws, norms: float, rates: bool, between: bool) -> Cells:
        """Of all nodes of a lattice above 0: every shift at every rate.

        norms: relative distance of norms that are shared between before they are located.
        rates, between: whether steps lie between rates, and between shifts.
        """
        shifts, column = np.unique(laws.shift, return_inverse=True)
        below, above = np.append(0.0, shifts[:-1]), np.append(shifts[1:], shifts[-1])
        if norms > 0:  # the norms that are shared first lie beyond by their distance, or at 0
            below, above = below * np.exp(-norms), np.minimum(above * np.exp(norms), shifts[-1])
            below[:2] = 0.0
        widths = np.diff(spread_of([below, shifts, above]), axis=0)
        # A node at 0 costs nothing: what is shared with it counts at the first node above it
        widths[0, 0] *= 2
        chord = np.square(widths.max(axis=0)) / 8
        # Widths of the cells of norms, and of the one from 0
        of_norms = np.square(np.expm1(2 * norms) * np.square(above)) / 8
        of_norms += (norms > 0) * shifts[0] ** 4 * _FIRST_CELL
        if not between:
            below, above, chord = shifts, shifts, np.zeros(len(shifts))
        own, row = np.unique(laws.sample_rate, return_inverse=True)
        lower, higher, of_rates = own, own, np.zeros(len(own))
        if rates:
            lower, higher = np.append(own[0], own[:-1]), np.append(own[1:], own[-1])
            of_rates = np.square(np.diff(np.square([lower, own, higher]), axis=0).max(axis=0)) / 8
        return cls(
            StepLaws(below[column], lower[row]),
            StepLaws(above[column], higher[row]),
            laws.sample_rate,
            (chord + of_norms)[column],
            of_norms[column],
            of_rates[row],
        )

    def select(self, laws: NDArray[np.bool_] | NDArray[np.intp]) -> Cells:
        """The cells of some laws."""
        return Cells(
            self.low.select(laws),
            self.high.select(laws),
            self.rate[laws],
            self.chord_shift[laws],
            self.chord_norm[laws],
            self.chord_rate[laws],
        )


def exponent_of(tilt: float, direction: Direction) -> float:
    """The power a with E[exp(tilt loss)] = E[f(z)^a] for z from N(0, 1)."""
    return tilt + 1.0 if direction == "remove" else -tilt


def log_density_ratio(
    z: FloatArray, shift: FloatArray | float, sample_rate: FloatArray | float
) -> FloatArray:
    """Log f(z) to full relative precision, also where f is nearly 1 or overflows.

    Arguments broadcast.
    """
    exponent = z * shift - np.square(shift) / 2
    q = np.minimum(sample_rate, 1 - 1e-16)
    near: FloatArray = np.log1p(q * np.expm1(np.minimum(exponent, 30.0)))
    if np.max(exponent, initial=0.0) <= 30.0 and np.max(sample_rate) < 1.0:
        return near
    large = np.maximum(exponent, 30.0)
    far = np.log(q) + large + np.log1p((1 - q) / q * np.exp(-large))
    sampled = np.where(exponent <= 30.0, near, far)
    return np.where(np.asarray(sample_rate) < 1.0, sampled, exponent)
