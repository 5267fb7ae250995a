"""Tight epsilon, delta and true-positive rates of many examples, by one method. Sensitive.

Each loss of one step is put on points that raise delta. The transform of what an example met, on a
line tilt + i frequency, is the exponential of its counts times the logarithms of sums over points.
delta(epsilon) is a trapezoid sum, an upper bound whatever its period, and a bound of what is cut
off. Numbers in brackets are lines of docs/explanation/proofs.md.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.special import log_ndtr, ndtr, ndtri

from indpriv._types import BoolArray, FloatArray, IntArray, NDArray
from indpriv.accountant.laws import (
    GAUSSIAN_ERROR,
    TILTS,
    Cells,
    U,
    gaussian_delta,
    gaussian_epsilons,
)

# log of the least upper bound over u of exp(-tilt u) (1 - exp(-u)): of a Rényi bound [5.1]
LOG_LARGEST = -TILTS * np.log1p(1 / TILTS) - np.log1p(TILTS)
_CUT = 1e-5  # what may be cut off, as a share of the Rényi bound [2.3]
_MOST_TRANSFORMS = 1 << 22  # that are kept of a line, of all kinds of steps
_CACHE_BYTES = 1 << 28  # of the lines of one direction
_AT_ONCE = 1 << 18
_BEYOND = 4.0  # standard deviations of smoothing that a lower bound is read further out [3.2]
_ROUNDS = 6  # in which lines are chosen for the same example [5.2]
# First frequencies of blocks, two in an octave [2.3]
_EDGES = (np.arange(2, 4)[None] * 2 ** np.arange(18)[:, None]).ravel()
_TOUCH = np.array([0.5, 1.5, 2.5, 3.3, 4.0, 4.7])  # where tangents touch [2.5]
_STEEP = (2 * (1 - np.cos(_TOUCH)) / _TOUCH - np.sin(_TOUCH)) / (2 * _TOUCH**3)
_FLAT = (1 - np.cos(_TOUCH)) / _TOUCH**2 + _STEEP * _TOUCH**2
# How far smoothing may move log delta [2.1], and log of delta over what may wrap around [2.2]
ABOVE = 5e-5, 9.0  # [2.1] [2.2]
BELOW = 2e-5, 14.0  # whose smoothing costs more [3.2]

Curve = Callable[[IntArray, FloatArray], tuple[FloatArray, FloatArray]]


@dataclass(frozen=True)
class Met:
    """What n examples met."""

    counts: csr_array  # (n, n_kinds) whole numbers of steps of each kind
    gaussian: FloatArray  # (n,) squared mu of a Gaussian mechanism besides

    @classmethod
    def of(cls, counts: FloatArray | csr_array, gaussian: FloatArray | None = None) -> "Met":
        """Checked counts; ValueError where they are not whole: a power of a complex number."""
        found = csr_array(counts)
        found.sum_duplicates()
        found.eliminate_zeros()
        whole = np.isfinite(found.data) & (found.data == np.floor(found.data))
        if not (whole & (found.data >= 0)).all():
            raise ValueError("numbers of steps must be whole and not negative")
        squares = np.zeros(found.shape[0]) if gaussian is None else gaussian
        return cls(found, squares)

    def __len__(self) -> int:
        return len(self.gaussian)

    def take(self, examples: IntArray | BoolArray) -> "Met":
        """Some of the examples."""
        return Met(self.counts[examples], self.gaussian[examples])


@dataclass
class Losses:
    """The losses of all kinds of step of a run, in one direction. Threads may share it."""

    cells: Cells  # of n_nodes laws that are not Gaussian
    # (n_laws, n_nodes) probabilities: a step with a law is at most as revealing as one with these
    # nodes at random, that tells which it is [1.9]
    blend: csr_array
    squares: FloatArray  # (n_kinds,) squared mu of the Gaussian steps of one count of each kind
    steps: csr_array  # (n_kinds, n_laws) steps with each law of one count of each kind
    # miss, psi: (n_kinds,) and (n_kinds, n_tilts) of one count: what its losses miss, and log E
    # exp(tilt L), both from above
    miss: FloatArray = field(init=False)
    psi: FloatArray = field(init=False)
    n_steps: FloatArray = field(init=False)  # (n_kinds,) steps of one count that are not Gaussian
    _tilted: "dict[int, Tilted]" = field(init=False, default_factory=dict)
    _lines: "dict[tuple[int, float], Line]" = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.node_psi = self.cells.moments()
        of_law = self.blended(self.node_psi)
        self.miss = self.steps @ (self.blend @ self.cells.miss)
        gaussian = TILTS * (TILTS + 1) / 2 * self.squares[:, None]
        self.psi = self.steps @ of_law * (1 + 1e-12) + gaussian * (1 + 1e-12)
        self.n_steps = np.asarray(self.steps.sum(axis=1), np.float64).ravel()
        self.most_entries = int(np.diff(self.steps.indptr).max(initial=0))
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        """Without lines, which each process makes for itself."""
        return {**self.__dict__, "_tilted": {}, "_lines": {}, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def blended(self, psi: FloatArray) -> FloatArray:
        """(n_laws, k) log of the mean of exp(psi) (n_nodes, k), from above [1.9]."""
        rows = np.repeat(np.arange(self.blend.shape[0]), np.diff(self.blend.indptr))
        found = np.full((self.blend.shape[0], psi.shape[1]), -np.inf)
        np.logaddexp.at(found, rows, np.log(self.blend.data)[:, None] + psi[self.blend.indices])
        return np.asarray(found + 8 * U * np.abs(found) + 1e-12)

    def line(self, column: int, period: float) -> "Line":
        """The line with this tilt and period. It depends on the run alone [2.4]."""
        with self._lock:  # while it is made, too: another thread would make the same
            line = self._lines.get((column, period))
            if line is None:
                if sum(line.n_bytes for line in self._lines.values()) > _CACHE_BYTES:
                    self._lines.clear()
                    self._tilted.clear()
                if column not in self._tilted:
                    self._tilted[column] = Tilted(self, column)
                line = self._lines[column, period] = Line(self._tilted[column], period)
            return line

    def table(self, line: "Line", n_frequencies: int) -> "Table":
        """The transforms of a line at its first frequencies."""
        with self._lock:
            if n_frequencies not in line.tables:
                line.tables[n_frequencies] = line.table(n_frequencies)
            return line.tables[n_frequencies]


class Table(NamedTuple):
    """Normalised transforms (n_kinds, n) of each kind of step at a line's first n frequencies."""

    log_modulus: FloatArray
    angle: FloatArray
    top: FloatArray  # (n_kinds, n_blocks) largest log modulus in each block, a bound of it beyond n
    error: FloatArray  # (n_kinds,) bound of the rounding of a transform [4.2]


class Tilted:
    """The laws of all steps at one tilt.

    Attributes:
        masses: (n_nodes, n_points) that add up to 1.
        psi: (n_kinds,) log E exp(tilt L) of the points, from above; raised: by this much at most.
        share: (n_laws, n_nodes) each node's part of a law, as a share of its transform at the tilt.
    """

    def __init__(self, losses: Losses, column: int) -> None:
        self.losses, self.column, self.tilt = losses, column, float(TILTS[column])
        cells, base = losses.cells, losses.node_psi[:, column][:, None]
        exponent = np.where(cells.mass > 0, self.tilt * cells.loss - base, 0.0)
        # Masses of mixed steps may be smaller than those whose moments are computed
        peak = np.maximum(exponent.max(axis=1, keepdims=True, initial=0.0) - 600, 0)
        masses = cells.mass * np.exp(exponent - peak)
        total = np.maximum(masses.sum(axis=1, keepdims=True), 1e-300)
        reach = np.abs(cells.loss).max(axis=1, initial=0.0)
        above = U * (64 + 2 * cells.loss.shape[1] + 4 * self.tilt * reach)  # [4.1]
        self.masses, psi = masses / total, (base + peak + np.log(total))[:, 0] + above
        blend, of_law = losses.blend, losses.blended(psi[:, None])[:, 0]
        rows = np.repeat(np.arange(blend.shape[0]), np.diff(blend.indptr))
        shares = blend.data * np.exp(psi[blend.indices] - of_law[rows])
        self.share = csr_array((shares, blend.indices, blend.indptr), shape=blend.shape)
        more = np.zeros((2, len(of_law)))  # largest of its nodes
        for values, largest in zip((above, np.abs(psi)), more, strict=True):
            np.maximum.at(largest, rows, values[blend.indices])
        rounding = 64 * U * (1 + more[1] + np.abs(of_law))
        self.psi = losses.steps @ (of_law + rounding)
        self.raised = losses.steps @ (more[0] + rounding) * 2
        self._spreads: dict[int, FloatArray] = {}

    def spread(self, power: int) -> FloatArray:
        """(2, n_nodes) how losses spread within intervals of length 2 ** power [2.5]."""
        if power not in self._spreads:
            loss, rows = self.losses.cells.loss, np.arange(len(self.masses))
            middle = np.argmax(np.cumsum(self.masses, axis=1) >= 0.5, axis=1)
            centred = loss - loss[rows, middle][:, None]
            large = 2.0**power > 1e-6 * np.abs(centred).max(axis=1)
            self._spreads[power] = _spread(centred, self.masses, 2.0**power) * large
        return self._spreads[power]


class Line:
    """Frequencies omega_j = 2 pi j / period at one tilt.

    Attributes:
        starts, size: (n_blocks,) first frequency of each block; bound of the moduli of its payoffs.
        beyond: bound of all payoffs from the end of the last block on [2.3].
        top: (n_kinds, n_blocks) bound of the log modulus of a transform in each block [2.5].
        tables: by their number of frequencies.
    """

    def __init__(self, at: Tilted, period: float) -> None:
        self.at, self.period, self.tables = at, period, dict[int, Table]()
        self.starts = 2 * np.pi / period * _EDGES
        z = at.tilt + 1j * self.starts
        self.size = np.diff(_EDGES, append=2 * _EDGES[-2]) * 2 / period / np.abs(z * (z + 1))
        self.size *= 1 + 1e-9
        self.beyond = (1 + 1e-9) * period / (2 * np.pi**2) / (2 * _EDGES[-2] - 1)
        self._of_node = self._bounds()
        self.top = at.losses.steps @ self._of_laws(self._of_node)

    def _of_laws(self, of_node: FloatArray) -> FloatArray:
        """(n_laws, n_blocks) bounds of the log modulus from those of nodes."""
        return np.asarray(np.log(self.at.share @ np.exp(of_node) * (1 + 1e-12)))

    def _bounds(self) -> FloatArray:
        """(n_nodes, n_blocks) bounds of the log modulus in each block, by spreads [2.5]."""
        found, told = np.zeros((len(self.at.masses), len(_EDGES))), False
        ends = np.append(self.starts[1:], self.starts[-2] * 2)
        first, last = np.floor(np.log2(2 * np.pi / ends[[1, -1]])).astype(int).tolist()
        for power in range(first, last - 1, -1) if len(found) else ():
            scale, (square, fourth) = 2.0**power, self.at.spread(power)
            if told and not (square > 1e-6).any():
                break
            told = told or bool((square > 1e-6).any())
            n = np.searchsorted(ends, 2 * np.pi / scale, side="right")
            blocks = slice(max(n - 6, 0), n)  # in which angles are at most 2 pi
            angle = np.square(scale * np.stack([self.starts[blocks], ends[blocks]]))[:, :, None]
            # Tangents, of which the least is taken; a bound is convex in the square of a frequency
            less = _FLAT * angle * square[:, None, None, None]
            more = _STEEP * angle**2 * fourth[:, None, None, None]
            most = (1 - less + more).max(axis=1).min(axis=2) + 1e-13
            found[:, blocks] = np.minimum(found[:, blocks], np.log(np.maximum(most, 1e-12)) / 2)
        return np.asarray(found + 4 * U * self.at.masses.shape[1])

    def table(self, n: int) -> Table:
        """Transforms at the first n frequencies, a power of two."""
        losses, cells, masses = self.at.losses, self.at.losses.cells, self.at.masses
        found = np.empty((len(cells), n), complex)
        few = 1 << (n.bit_length() // 2)
        width = cells.loss.shape[1]
        size = max(1, (1 << 20) // (width * few))
        for start in range(0, len(cells), size):
            some = slice(start, start + size)
            base = np.exp(-2j * np.pi / self.period * cells.loss[some]).ravel()
            low = _powers(base, few).reshape(-1, width, few)
            high = _powers(base * low[:, :, -1].ravel(), n // few).reshape(-1, width, n // few)
            low *= masses[some, :, None]
            found[some] = np.matmul(high.transpose(0, 2, 1), low).reshape(-1, n)
        last = 2 * np.pi / self.period * n
        mean = (masses * np.abs(cells.loss)).sum(axis=1)
        error = U * (64 + 32 * n + 2 * width + 8 * last * mean)  # [4.2]
        blocks = _EDGES[n > _EDGES]
        of_node = self._of_node.copy()
        largest = np.maximum.reduceat(np.abs(found), blocks, axis=1)
        of_node[:, : len(blocks)] = np.log(largest + error[:, None])
        kept = self.at.share @ found
        return Table(
            losses.steps @ np.log(np.abs(kept) + 1e-300),
            losses.steps @ np.angle(kept),
            losses.steps @ self._of_laws(of_node),
            losses.steps @ (self.at.share @ error),
        )

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return sum(part.nbytes for table in self.tables.values() for part in table)

    def payoff(self, n: int) -> NDArray[np.complex128]:
        """(n,) logs of factors of the sum."""
        z = self.at.tilt + 2j * np.pi / self.period * np.arange(n)
        sizes = np.where(z.imag > 0, 2, 1) / self.period
        return np.asarray(np.log(sizes / np.conj(z * (z + 1))), np.complex128)


def _spread(loss: FloatArray, mass: FloatArray, scale: float) -> FloatArray:
    """(2, n) mean 2nd powers from below, 4th from above, of differences over scale [2.5]."""
    place = np.floor(loss / scale + 0.5)
    first = np.ones(loss.shape, bool)
    first[:, 1:] = place[:, 1:] != place[:, :-1]
    starts = np.flatnonzero(first)
    left = np.repeat(loss.ravel()[starts], np.diff(starts, append=loss.size))
    away, power = (loss.ravel() - left) / scale, mass.ravel()
    moments = [np.add.reduceat(power, starts)]
    for _ in range(4):
        power = power * away
        moments.append(np.add.reduceat(power, starts))
    total, one, two, three, four = moments
    total = np.maximum(total, 1e-300)
    both = np.stack([2 * two - 2 * one**2 / total,
                     2 * four - 8 * three * one / total + 6 * two**2 / total])  # fmt: skip
    laws = np.searchsorted(starts, np.arange(len(loss)) * loss.shape[1])
    square, fourth = np.add.reduceat(both, laws, axis=1)
    return np.stack([np.maximum(square - 1e-8, 0), fourth + 1e-8])


class OnLine:
    """delta(epsilon) of n examples on one line, as exp(psi - tilt epsilon) (sum + tail + rounding).

    Attributes:
        n_frequencies: (n,) that each sums over.
        tail: (n,) bound of the others [2.3].
        rounding: (n,) bound of what rounding does to the sum [4.3] [4.4]; where there is a table.
    """

    def __init__(
        self,
        line: Line,
        met: Met,
        smooth: FloatArray,
        log_target: FloatArray,
        epsilon: FloatArray,
        table: Table | None = None,
    ) -> None:
        """Without a table it is known only how many frequencies are needed."""
        self.line, self.met, self.smooth = line, met, smooth
        losses, tilt = line.at.losses, line.at.tilt
        self.entries = entries = _entries(losses, met)
        self.gaussian = _squared_mu(losses, met) * (1 + U * entries) + smooth
        self.psi = met.counts @ line.at.psi + tilt * (tilt + 1) / 2 * self.gaussian
        # Exponents of terms that are not above 0, but for rounding
        exponent = met.counts @ (line.top if table is None else table.top)
        rounding = 1 + 1e-9 + 4 * U * entries * np.abs(exponent).max(axis=1)
        exponent -= self.gaussian[:, None] / 2 * np.square(line.starts)
        blocks = np.exp(exponent) * line.size * rounding[:, None]
        tails = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
        end = np.square(2 * line.starts[-2])
        tails += (np.exp(-self.gaussian / 2 * end) * line.beyond)[:, None]
        limit = _CUT * np.exp(np.minimum(log_target - self.psi + tilt * epsilon, 700.0))
        enough, last = tails <= limit[:, None], len(_EDGES) - 1
        need = np.where(enough.any(axis=1), enough.argmax(axis=1), last)
        if table is not None:
            self.table, n = table, table.angle.shape[1]
            need = np.minimum(need, np.searchsorted(_EDGES, n, side="right") - 1)
        self.n_frequencies = _EDGES[need]
        self.tail = tails[np.arange(len(need)), need]
        if table is None:
            return
        self.payoff = line.payoff(n)
        error = met.counts @ table.error + 64 * U * self.n_frequencies
        steps = met.counts @ losses.n_steps
        error += U * entries * (4 * steps + 2 + met.counts @ np.abs(line.at.psi))
        omega = 2 * np.pi / line.period * self.n_frequencies
        error += 16 * U * self.gaussian * (tilt + 1 + omega) ** 2
        sizes = np.cumsum(np.exp(self.payoff.real))[self.n_frequencies - 1]
        self.rounding = np.expm1(error) * sizes * (1 + 1e-9)

    @classmethod
    def tabled(
        cls, line: Line, met: Met, smooth: FloatArray, log_target: FloatArray, epsilon: FloatArray
    ) -> "Iterator[tuple[OnLine, IntArray]]":
        """Examples on a line, with a table each that has enough frequencies, and their rows."""
        losses = line.at.losses
        n_kinds = max(len(losses.miss), len(losses.cells), 1)
        most = 1 << int(np.clip(np.log2(_MOST_TRANSFORMS / n_kinds), 8, 16))

        def needed(smooth: FloatArray) -> IntArray:
            return cls(line, met, smooth, log_target, epsilon).n_frequencies

        frequencies = needed(smooth)
        long = frequencies > most  # these are smoothed more, until they need no more
        if long.any():
            enough = 12 * np.square(line.period / np.pi / most)
            smooth = np.where(long, np.maximum(smooth, enough), smooth)
            frequencies = np.minimum(needed(smooth), most)
        sizes = 2 ** np.ceil(np.log2(np.maximum(frequencies, 16))).astype(np.int64)
        for size in np.unique(sizes).tolist():
            rows = np.flatnonzero(sizes == size)
            every = smooth[rows], log_target[rows], epsilon[rows]
            yield cls(line, met.take(rows), *every, losses.table(line, size)), rows

    def chunks(self) -> Iterator[tuple[IntArray, NDArray[np.complex128]]]:
        """Rows with the same number of frequencies, and their terms of the sum."""
        line, tilt = self.line, self.line.at.tilt
        for n in np.unique(self.n_frequencies):
            alike = np.flatnonzero(self.n_frequencies == n)
            table = np.concatenate([self.table.log_modulus[:, :n], self.table.angle[:, :n]], axis=1)
            omega = 2 * np.pi / line.period * np.arange(n)
            gaussian = np.append(-np.square(omega) / 2, -omega * (2 * tilt + 1) / 2)
            payoff = np.append(self.payoff.real[:n], self.payoff.imag[:n])
            size = max(1, _AT_ONCE // int(n))
            for rows in np.split(alike, range(size, len(alike), size)):
                counts = self.met.counts[rows]
                few = counts.nnz <= counts.shape[0] * counts.shape[1] / 8
                log = np.asarray((counts if few else counts.toarray()) @ table)  # the faster way
                log += self.gaussian[rows, None] * gaussian + payoff
                modulus, angle = np.exp(log[:, :n]), log[:, n:]
                terms = np.empty((len(rows), int(n)), complex)
                np.multiply(modulus, np.cos(angle), out=terms.real)
                np.multiply(modulus, np.sin(angle), out=terms.imag)
                yield rows, terms

    def log_delta(
        self, rows: IntArray, terms: NDArray[np.complex128], index: IntArray, epsilon: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Log delta of rows[index] of `chunks`, from above, and minus its slope [2.2] [4.5]."""
        rows, terms = rows[index], terms[index]
        tilt, psi = self.line.at.tilt, self.psi[rows]
        total, slope = self._sum(terms, epsilon)
        extra = self.tail[rows] + self.rounding[rows] * (1 + np.abs(epsilon) / self.line.period)
        total, slope = np.maximum(total + extra, 1e-3 * extra + 1e-300), slope + extra * tilt
        log = np.log(total)
        size = 16 + np.abs(psi) + tilt * np.abs(epsilon) + np.abs(log)
        return psi - tilt * epsilon + log + 8 * U * size, slope / total

    def _sum(
        self, terms: NDArray[np.complex128], epsilon: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """(n,) of the terms at epsilon, and minus its slope."""
        step, n = 2 * np.pi / self.line.period, terms.shape[1]
        few = min(n & -n, 1 << n.bit_length() // 2)
        low = _powers(np.exp(1j * step * epsilon), few)
        high = _powers(np.exp(1j * step * few * epsilon), n // few)
        table = terms.reshape(-1, n // few, few)
        waves = np.matmul(table, low[:, :, None])[:, :, 0] * high
        numbered = np.matmul(table, (low * np.arange(few))[:, :, None])[:, :, 0] * high
        numbered += waves * (few * np.arange(n // few))  # by its number
        total = waves.real.sum(axis=1)
        return total, self.line.at.tilt * total + step * numbered.imag.sum(axis=1)

    def log_delta_below(
        self, rows: IntArray, terms: NDArray[np.complex128], index: IntArray, epsilon: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """The same from below [3.2] [3.4]; -inf where nothing is shown.

        The curve is smoothed by a Gaussian mechanism of squared mu `more`, so it is read further
        out and less what that mechanism may have carried across.
        """
        rows, terms = rows[index], terms[index]
        tilt, period = self.line.at.tilt, self.line.period
        psi = _psi(self.line.at.losses, self.met.take(rows))
        more = self.smooth[rows] + 4 * U * self.entries[rows] * self.gaussian[rows]
        at = epsilon + more / 2 + tilt * more + _BEYOND * np.sqrt(more)
        at = at + 8 * U * np.abs(at)
        with np.errstate(all="ignore"):
            total, slope = self._sum(terms, at)
            base = self.psi[rows] - (self.met.counts @ self.line.at.raised)[rows] - tilt * at
            size = 16 * U * (16 + np.abs(self.psi[rows]) + tilt * np.abs(at))
            lost = self.tail[rows] + self.rounding[rows] * (1 + np.abs(at) / period)
            # What wraps around, from the left and, by larger tilts, from the right [3.3]
            lost += np.exp(size - base) / np.expm1(tilt * period)
            above = np.minimum(self.line.at.column + np.array([1, 2, 3, 5]), len(TILTS) - 1)
            far = _chernoff(psi, at, above, more)
            right = np.exp(far + (size - base)[:, None]) / np.expm1((TILTS[above] - tilt) * period)
            lost += np.fmin.reduce(right, axis=1)
            carried = _chernoff(psi, at, np.array([self.line.at.column]), more)[:, 0]
            lost += np.exp(carried + log_ndtr(-_BEYOND) + size - base)
            log = np.log(total - lost)
            found, shown = base + log - size - 8 * U * np.abs(log), total > lost
            return np.where(shown, found, -np.inf), np.where(shown, slope / total, tilt)


def _chernoff(
    psi: FloatArray,
    epsilon: FloatArray,
    columns: IntArray | slice = slice(None),
    gaussian: FloatArray | float = 0.0,
) -> FloatArray:
    """(n, n_columns) log of bounds of delta at epsilon (n,), with gaussian (n,) [5.1]."""
    tilt = TILTS[columns]
    moment = psi[:, columns] + np.outer(gaussian, tilt * (tilt + 1) / 2)
    size = 16 + np.abs(moment) + tilt * np.abs(epsilon)[:, None]
    bound = moment + LOG_LARGEST[columns] - tilt * epsilon[:, None] + 16 * U * size
    return np.where(np.isnan(bound), np.inf, bound)


def _best(bound: FloatArray) -> IntArray:
    """(n,) the largest tilts that are about as good as the best one: their sums are shorter."""
    good = bound <= bound.min(axis=1, keepdims=True) + 0.3
    return np.asarray(bound.shape[1] - 1 - good[:, ::-1].argmax(axis=1))


def _entries(losses: Losses, met: Met) -> IntArray:
    """(n,) laws of each example, and 8 [4]."""
    return np.asarray(np.diff(met.counts.indptr) + losses.most_entries + 8)


def _squared_mu(losses: Losses, met: Met) -> FloatArray:
    """(n,) of the Gaussian steps of each example."""
    return np.asarray(met.gaussian + met.counts @ losses.squares)


def _gaussian_alone(losses: Losses, met: Met) -> tuple[IntArray, FloatArray, FloatArray]:
    """Examples that met Gaussian steps alone, and their mu from below and from above [5.4]."""
    who = np.flatnonzero(met.counts @ losses.n_steps == 0)
    entries = _entries(losses, met)[who]
    mu = np.sqrt(_squared_mu(losses, met)[who])
    return who, mu * (1 - 2 * U * entries), mu * (1 + 2 * U * entries)


def _powers(base: NDArray[np.complex128], n: int) -> NDArray[np.complex128]:
    """(len(base), n) powers 0 ... n - 1, by doubling."""
    found = np.empty((len(base), n), complex)
    found[:, 0], known = 1, 1
    while known < n:
        more = min(known, n - known)
        factor = base if known == 1 else found[:, known // 2] ** 2
        np.multiply(found[:, :more], factor[:, None], out=found[:, known : known + more])
        known += more
    return found


def _wrapping(
    psi: FloatArray, column: IntArray, log_target: FloatArray, epsilon: FloatArray, alias: float
) -> tuple[FloatArray, FloatArray]:
    """(n,) periods beyond which what wraps around from the left, and from the right, is small."""
    tilt, right = TILTS[column], np.full(len(column), np.inf)
    rows = np.arange(len(column))
    for up in (1, 2, 3, 5):
        above = np.minimum(column + up, len(TILTS) - 1)
        with np.errstate(all="ignore"):
            excess = psi[rows, above] - TILTS[above] * epsilon - log_target + alias
            right = np.fmin(right, excess / (TILTS[above] - tilt))
    return (alias - log_target) / tilt, right


def _contours(
    psi: FloatArray, best: IntArray, log_target: FloatArray, epsilon: FloatArray, alias: float
) -> tuple[IntArray, FloatArray]:
    """(n,) tilts and periods, of a few values each."""
    best = best - best % 2  # whole octaves do
    column = best.copy()
    left, right = _wrapping(psi, column, log_target, epsilon, alias)
    period = np.fmax(left, np.where(np.isfinite(right), right, 0.0))
    hard = np.flatnonzero(right > 1.5 * left)
    for down in range(2, 12, 2):  # a smaller tilt needs a shorter period where the tail is heavy
        lower = np.maximum(best[hard] - down, 0)
        at = TILTS[lower] * epsilon[hard]
        far = psi[hard, lower] + LOG_LARGEST[lower] - at - log_target[hard]
        ends = _wrapping(psi[hard], lower, log_target[hard], epsilon[hard], alias)
        needed = np.maximum(*ends)
        better = (needed < 0.8 * period[hard]) & (far < 10)
        period[hard[better]], column[hard[better]] = needed[better], lower[better]
    left = 2 * np.ceil((alias - log_target) / 2) / TILTS[column]
    return column, left * 2 ** np.ceil(np.log2(np.maximum(period / left, 1.0)))


Solve = Callable[[IntArray, Curve], tuple[FloatArray, FloatArray, FloatArray]]


def _search(
    losses: Losses,
    met: Met,
    psi: FloatArray,
    best: IntArray,
    log_target: FloatArray,
    epsilon: FloatArray,
    solve: Solve,
    *,
    floor: FloatArray | None = None,
    below: bool = False,
) -> None:
    """Call solve(examples, curve) -> (epsilon, log delta, slope) for all examples.

    And again, with another line, where these tell that the first was poor and epsilon is above the
    floor. Not where epsilon or log_target is not finite, nor where all steps are Gaussian.
    """
    smoothing, alias = BELOW if below else ABOVE
    slope, epsilon, log_target = TILTS[best], epsilon.copy(), log_target.copy()
    todo = np.flatnonzero(np.isfinite(epsilon + log_target) & (met.counts @ losses.n_steps > 0))
    for _ in range(_ROUNDS):
        again = [todo[:0]]
        column, period = _contours(psi[todo], best[todo], log_target[todo], epsilon[todo], alias)
        kinds, kind = np.unique(np.stack([column, period]), axis=1, return_inverse=True)
        for which, (tilt, wide) in enumerate(kinds.T.tolist()):
            line, who = losses.line(int(tilt), wide), todo[kind.ravel() == which]
            smooth = 2 * smoothing / (slope[who] * (slope[who] + 1))
            for on, mine in OnLine.tabled(
                line, met.take(who), smooth, log_target[who], epsilon[who]
            ):
                for rows, terms in on.chunks():
                    own, bound = who[mine[rows]], on.log_delta_below if below else on.log_delta
                    found, log_delta, steep = solve(own, partial(bound, rows, terms))
                    _, right = _wrapping(
                        psi[own], np.full(len(own), line.at.column), log_delta, found, alias
                    )
                    size = on.psi[rows] - line.at.tilt * found - log_delta
                    cut = on.tail[rows] * np.exp(np.minimum(size, 50))
                    moved = on.smooth[rows] * steep * (steep + 1) / 2
                    poor = (moved > 4 * smoothing) | (right - line.period > 2 / steep)
                    poor |= cut > 3e-4
                    epsilon[own], log_target[own] = found, log_delta
                    slope[own] = np.maximum(steep, slope[own] / 2)
                    again.append(own[poor if floor is None else poor & (found > floor[own])])
        todo = np.concatenate(again)
        if not len(todo):
            return


def _root(
    curve: Curve, start: FloatArray, target: FloatArray, floor: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Least proven epsilon, from `floor` on, by Newton's method in a bracket; the slope there."""
    n = len(start)
    low, high = np.full(n, -np.inf), np.full(n, np.inf)
    epsilon, slope = np.maximum(start, floor), np.ones(n)
    active, tried = np.arange(n), np.zeros(n, bool)  # whether the floor itself was
    for trial in range(24):
        at = epsilon[active]
        log_delta, steep = curve(active, at)
        gap = log_delta - target[active]
        proven = gap <= 0
        high[active] = np.where(proven, np.minimum(high[active], at), high[active])
        low[active] = np.where(proven, low[active], np.maximum(low[active], at))
        slope[active] = np.where(proven, steep, slope[active])
        tried[active] |= at <= floor[active]
        done = proven & ((gap > -1e-4) | (at <= floor[active]))
        new = at + (gap + 5e-5) / np.maximum(steep, 1e-9)
        a, b = low[active], high[active]
        middle = np.where(
            np.isfinite(b),
            (np.maximum(a, floor[active]) + b) / 2,
            2 * at + 1 / np.maximum(steep, 1e-9),
        )
        below = (new < floor[active]) & ~tried[active]
        inside = np.where(below, floor[active], new)
        outside = (new <= a) | (new >= b) | (trial % 3 == 2 < trial)  # some cycle
        epsilon[active] = np.where(outside, middle, inside)
        active = active[~done & ~(np.isfinite(b) & (b - a <= 1e-12 * b))]
        if not len(active):
            break
    return high, slope


def epsilons(
    losses: Losses, met: Met, delta: float, at_least: FloatArray | None = None
) -> FloatArray:
    """(n,) epsilon of each example at delta in one direction, never below the truth [5.2].

    Infinite where no finite one can be shown. at_least: (n,) the epsilons of the other direction,
    if no smaller ones are of interest.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        target = np.log(delta - met.counts @ losses.miss)  # nan: nothing can be shown
        target -= 16 * U * (1 + np.abs(target))
    psi = _psi(losses, met)
    bound = (psi * (1 + 1e-12) + LOG_LARGEST + 1e-12 - target[:, None]) / TILTS
    bound[~np.isfinite(bound)] = np.inf
    renyi, best, floor = bound.min(axis=1), bound.argmin(axis=1), np.zeros(len(bound))
    start, found = renyi.copy(), np.full(len(bound), np.inf)
    if at_least is not None:
        floor, start = at_least, at_least.copy()
        best = _best(_chernoff(psi, start))
        start[renyi <= floor] = np.nan

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        root, steep = _root(curve, np.minimum(start, found)[who], target[who], floor[who])
        found[who] = np.minimum(found[who], root)
        return np.minimum(found[who], renyi[who]), target[who], steep

    alone, _, mu = _gaussian_alone(losses, met)
    _search(losses, met, psi, best, target, start, solve, floor=floor)
    found = np.fmin(found, renyi)
    found[alone] = gaussian_epsilons(mu, delta)[1]
    return np.asarray(np.maximum(found, floor))


def deltas(losses: Losses, met: Met, epsilon: FloatArray) -> FloatArray:
    """(n,) delta of each example at its epsilon in one direction, never below the truth [5.3]."""
    psi = _psi(losses, met)
    bound = _chernoff(psi, epsilon)
    log_delta = np.minimum(bound.min(axis=1), 0.0)
    start = np.minimum(log_delta, -1e-9)

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        found, steep = curve(np.arange(len(who)), epsilon[who])
        log_delta[who] = np.fmin(log_delta[who], found)
        return epsilon[who], np.minimum(log_delta[who], -1e-9), steep

    missed = met.counts @ losses.miss
    with np.errstate(divide="ignore"):  # nothing is looked for below what is added anyway
        target = np.where(start < np.log(missed), np.nan, start)
    alone, _, mu = _gaussian_alone(losses, met)
    _search(losses, met, psi, _best(bound), target, epsilon, solve)
    found = np.exp(log_delta) * (1 + 16 * U) + missed
    found[alone] = gaussian_delta(epsilon[alone], mu) * (1 + GAUSSIAN_ERROR)
    return np.asarray(np.clip(found, 0.0, 1.0))


def true_positive_rates(losses: Losses, met: Met, false_positive_rate: float) -> FloatArray:
    """(n,) the most that a test at this false-positive rate finds, never below the truth [5.3]."""
    psi, missed = _psi(losses, met), met.counts @ losses.miss
    log_rate = float(np.log(false_positive_rate))
    bound = (psi - log_rate) / (TILTS + 1)  # what a loss exceeds about this rarely, or less
    start, found = np.maximum(bound.min(axis=1), 0.0), np.ones(len(psi))

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        epsilon, every = start[who].copy(), np.arange(len(who))
        low, high = epsilon - 9, epsilon + 9  # farther than 8 steps go
        for _ in range(8):
            log_delta, steep = curve(every, epsilon)
            with np.errstate(over="ignore"):
                most = np.exp(log_delta) + np.exp(epsilon + log_rate)
            rounding = 16 * U * (1 + np.abs(epsilon) - log_rate)
            most = most * (1 + rounding) + missed[who]
            found[who] = np.fmin(found[who], most)
            excess = log_delta + np.log(np.maximum(steep, 1e-9)) - epsilon - log_rate
            # How often a loss without the example exceeds epsilon falls with it: there is one root
            low, high = np.where(excess > 0, epsilon, low), np.where(excess > 0, high, epsilon)
            last, new = epsilon, epsilon + np.clip(excess / (steep + 1), -1, 1)
            epsilon = np.where((low < new) & (new < high), new, (low + high) / 2)
        return last, np.minimum(log_delta, -1e-9), steep

    alone, _, mu = _gaussian_alone(losses, met)
    target = np.minimum(start + log_rate, -1e-3)
    _search(losses, met, psi, _best(_chernoff(psi, start)), target, start, solve)
    found[alone] = np.minimum(ndtr(ndtri(false_positive_rate) + mu) * (1 + GAUSSIAN_ERROR), 1.0)
    return found


def _psi(losses: Losses, met: Met) -> FloatArray:
    """(n, n_tilts) log E exp(tilt L) of what each example met, from above."""
    gaussian = TILTS * (TILTS + 1) / 2 * met.gaussian[:, None]
    rounding = 1e-12 + U * np.diff(met.counts.indptr)[:, None]
    return np.asarray((met.counts @ losses.psi + gaussian) * (1 + rounding))


def lower_epsilons(
    below: Losses, met: Met, delta: float, upper: FloatArray, *, tries: int = 3
) -> FloatArray:
    """(n,) epsilon of each example at delta in one direction, never above the truth [3.2] [5.2].

    below: losses from cells below the truth. upper: (n,) epsilons from above, near which lower ones
    are looked for; tries: how often nearer to 0, where nothing was found.
    """
    psi, least = _psi(below, met), np.log(delta)
    target = np.full(len(met), least + 16 * U * (1 + abs(least)))
    best = _best(_chernoff(psi, upper))
    found = np.zeros(len(met))

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        def downward(rows: IntArray, by: FloatArray) -> tuple[FloatArray, FloatArray]:
            log_delta, steep = curve(rows, np.maximum(upper[who[rows]] - by, 0.0))
            return -log_delta, steep

        none = np.zeros(len(who))
        by, steep = _root(downward, none, -target[who], none)
        found[who] = np.maximum(found[who], upper[who] - by)
        return upper[who], target[who], np.maximum(steep, TILTS[best[who]])

    start = np.where(upper > 0, upper, np.nan)
    alone, mu, _ = _gaussian_alone(below, met)
    _search(below, met, psi, best, target, start, solve, below=True)
    found[alone] = gaussian_epsilons(mu, delta)[0]
    # Tilts that suit the upper end show nothing where that is far above the truth
    lost = np.flatnonzero((found == 0) & (upper > 0))
    if len(lost) and tries:
        nearer = 0.8 * upper[lost]
        found[lost] = lower_epsilons(below, met.take(lost), delta, nearer, tries=tries - 1)
    return np.where(upper > 0, np.minimum(found, upper), 0.0)
