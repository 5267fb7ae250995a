"""Tight epsilon, delta and true-positive rates of many examples, by one method. Sensitive.

Each loss of one step is put, cell by cell, on two points of a lattice that raise delta. Transforms
of these laws on a line tilt + i frequency come from one FFT of each law, and the transform of what
an example met is the exponential of its counts times their logarithms. delta(epsilon) is a
trapezoid sum over few frequencies, an upper bound whatever its period, and a bound of what is cut
off. Numbers in brackets are lines of docs/explanation/proofs.md, which has the proofs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.sparse import csr_array
from scipy.special import log_ndtr, ndtr, ndtri

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv.accountant.gaussian import GAUSSIAN_ERROR, gaussian_delta, gaussian_epsilons
from indpriv.accountant.laws import TILTS, Cells, U, upper_share

# log of the least upper bound over u of exp(-tilt u) (1 - exp(-u)): of a Rényi bound [5.1]
LOG_LARGEST = -TILTS * np.log1p(1 / TILTS) - np.log1p(TILTS)
_CUT = 1e-5  # what may be cut off, as a share of the Rényi bound [2.3]
_MOST_POINTS = 1 << 25  # of the lattices of all laws on a line
_KEPT = 1 << 17  # transforms of all kinds of steps that a line keeps
_CACHE_BYTES = 1 << 28  # of the lines of one direction
_AT_ONCE = 1 << 18
_SPREAD = 1.2534  # mu of a Gaussian mechanism over the epsilon that it is to have [3.2]
_BEYOND = 4.0  # standard deviations of smoothing that a lower bound is read further out [3.3]
_LEAST_SHOWN = -27.6  # log of the least delta of which a lower one is looked for [5.3]
_ROUNDS = 6  # in which lines are chosen for the same example [5.2]
# First frequencies of blocks [2.3]
_EDGES = np.unique((np.arange(4, 8)[None] * 2 ** np.arange(16)[:, None]).ravel())


@dataclass(frozen=True)
class Accuracy:
    """How near a bound of delta comes.

    Attributes:
        lattice, smoothing: how far each may move log delta [1.1] [2.1].
        alias: log of delta over what may wrap around [2.2].
    """

    lattice: float
    smoothing: float
    alias: float


ABOVE = Accuracy(2e-4, 2e-4, 7.0)
BELOW = Accuracy(2e-6, 2e-5, 14.0)  # whose lattice and smoothing cost more [3.3]

Curve = Callable[[IntArray, FloatArray], tuple[FloatArray, FloatArray]]


@dataclass(frozen=True)
class Met:
    """What n examples met.

    Attributes:
        counts: (n, n_kinds) whole numbers of steps of each kind.
        gaussian: (n,) squared mu of a Gaussian mechanism besides.
    """

    counts: csr_array
    gaussian: FloatArray

    @classmethod
    def of(cls, counts: FloatArray | csr_array, gaussian: FloatArray | None = None) -> Met:
        """Checked counts; ValueError where they are not whole: a power of a complex number."""
        found = csr_array(counts)
        found.eliminate_zeros()
        whole = np.isfinite(found.data) & (found.data == np.floor(found.data))
        if not (whole & (found.data >= 0)).all():
            raise ValueError("numbers of steps must be whole and not negative")
        squares = np.zeros(found.shape[0]) if gaussian is None else gaussian
        return cls(found, squares)

    def __len__(self) -> int:
        return len(self.gaussian)

    def take(self, examples: IntArray | BoolArray) -> Met:
        """Some of the examples."""
        return Met(self.counts[examples], self.gaussian[examples])


@dataclass(frozen=True)
class _Key:
    """A line: an example's key depends on nobody else, nor does what it gets there [2.4]."""

    tilt: int
    period: float
    n_points: int
    n_frequencies: int
    smooth: float
    below: bool


@dataclass
class Losses:
    """The losses of all kinds of step of a run, in one direction. Threads may share it.

    Attributes:
        cells: of n_nodes laws that are not Gaussian.
        blend: (n_laws, n_nodes) probabilities: a step with a law is at most as revealing as one
            with these nodes at random, that tells which it is [1.9].
        squares: (n_kinds,) squared mu of the Gaussian steps of one count of each kind.
        steps: (n_kinds, n_laws) steps with each law of one count of each kind.
        most_steps: of one example.
        miss, psi: (n_kinds,) and (n_kinds, n_tilts) of one count: what its losses miss, and log
            E exp(tilt L), both from above.
        n_steps: (n_kinds,) steps of one count that are not Gaussian.
    """

    cells: Cells
    blend: csr_array
    squares: FloatArray
    steps: csr_array
    most_steps: float
    miss: FloatArray = field(init=False)
    psi: FloatArray = field(init=False)
    n_steps: FloatArray = field(init=False)
    reach: FloatArray = field(init=False)
    _lines: dict[_Key, Line] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.node_psi = self.cells.moments()
        of_law = _blended(self.blend, self.node_psi)
        self.miss = self.steps @ (self.blend @ self.cells.miss)
        gaussian = TILTS * (TILTS + 1) / 2 * self.squares[:, None]
        self.psi = self.steps @ of_law * (1 + 1e-12) + gaussian * (1 + 1e-12)
        self.n_steps = np.asarray(self.steps.sum(axis=1), np.float64).ravel()
        self.reach = np.maximum(np.abs(self.cells.low), np.abs(self.cells.high)).max(
            axis=1, initial=0.0
        )
        self.most_entries = int(np.diff(self.steps.indptr).max(initial=0))
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        """Without lines, which each process makes for itself."""
        return {**self.__dict__, "_lines": {}, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def line(self, key: _Key, n_frequencies: int = 0) -> Line:
        """The line with this key, which keeps at least these many frequencies, once made."""
        few = int(np.clip(_KEPT // max(len(self.miss), 1), 32, 192))
        kept = min(max(few, 1 << n_frequencies.bit_length()), key.n_frequencies)
        with self._lock:  # while it is made, too: another thread would make the same
            known = self._lines.get(key)
            if known is None or (n_frequencies and known.log_modulus.shape[1] < kept):
                if sum(line.n_bytes for line in self._lines.values()) > _CACHE_BYTES:
                    self._lines.clear()
                known = self._lines[key] = Line.of(self, key, kept)
            return known


def _blended(blend: csr_array, psi: FloatArray) -> FloatArray:
    """(n_laws, k) log of the mean of exp(psi) (n_nodes, k), from above [1.9]."""
    rows = np.repeat(np.arange(blend.shape[0]), np.diff(blend.indptr))
    found = np.full((blend.shape[0], psi.shape[1]), -np.inf)
    np.logaddexp.at(found, rows, np.log(blend.data)[:, None] + psi[blend.indices])
    return np.asarray(found + 8 * U * np.abs(found) + 1e-12)


@dataclass(frozen=True)
class Line:
    """Transforms at tilt + i omega_j, j < n_frequencies, of each kind of step.

    Attributes:
        psi: (n_kinds,) log E exp(tilt L) on the lattice, from above; raised: by this much at most.
        error: (n_kinds,) bound of the rounding of a normalised transform.
        log_modulus, angle: (n_kinds, n_kept) of the normalised transform.
        top: (n_kinds, n_blocks) largest log modulus in each block of frequencies.
        starts: (n_blocks,) first frequencies of blocks.
        payoff: (n_frequencies,) factors of the sum; size: (n_blocks,) sums of their moduli.
    """

    key: _Key
    psi: FloatArray
    raised: FloatArray
    error: FloatArray
    log_modulus: FloatArray
    angle: FloatArray
    top: FloatArray
    starts: IntArray
    omega: FloatArray
    payoff: NDArray[np.complex128]
    size: FloatArray

    @classmethod
    def of(cls, losses: Losses, key: _Key, n_kept: int) -> Line:
        """Transforms by one FFT of each law, of which n_kept are kept."""
        tilt, spacing, n = TILTS[key.tilt], key.period / key.n_points, key.n_points
        cells, n_laws = losses.cells, len(losses.cells)
        own, of_kind = losses.blend, losses.steps
        starts = _EDGES[key.n_frequencies > _EDGES]
        (psi, above), top = np.zeros((2, n_laws)), np.zeros((n_laws, len(starts)))
        kept = np.zeros((n_laws, n_kept), complex)
        error = U * (16 * np.log2(n) + 64)  # of the FFT, whose masses add up to 1 [4.2]
        size = max(1, _AT_ONCE // n)
        for start in range(0, n_laws, size):
            laws = slice(start, start + size)
            part, base = cells.part(laws), losses.node_psi[laws, key.tilt][:, None]
            low, high = np.floor(part.low / spacing), np.ceil(part.high / spacing)
            gap = (high - low) * spacing
            up = upper_share(low * spacing, gap, part.mass, part.other)
            masses = np.concatenate([part.mass - up, up], axis=1)
            points = np.concatenate([low, high], axis=1)
            exponent = np.where(masses > 0, tilt * spacing * points - base, 0.0)
            # A coarse lattice at a large tilt is far above the losses
            peak = np.maximum(exponent.max(axis=1, keepdims=True, initial=0.0) - 600, 0)
            at = masses * np.exp(exponent - peak)
            places = (points % n + n * np.arange(len(part))[:, None]).astype(np.int64).ravel()
            law = np.bincount(places, at.ravel(), n * len(part)).reshape(-1, n)
            total = np.maximum(law.sum(axis=1), 1e-300)
            found = fft.rfft(law, axis=1)[:, : key.n_frequencies] / total[:, None]
            modulus = np.abs(found)
            reach = losses.reach[laws] + spacing
            # Of tilting and adding masses [4.1]
            above[laws] = U * (64 + 2 * points.shape[1] + 4 * tilt * reach)
            psi[laws] = (base + peak)[:, 0] + np.log(total) + above[laws]
            top[laws] = np.log(np.maximum.reduceat(modulus, starts, axis=1) + error)
            kept[laws] = found[:, :n_kept]
        # Each node's part of a law, as a share of its transform at the tilt; a law that is a node
        # has all of it
        of_law = _blended(own, psi[:, None])[:, 0]
        rows = np.repeat(np.arange(own.shape[0]), np.diff(own.indptr))
        shares = own.data * np.exp(psi[own.indices] - of_law[rows])
        share = csr_array((shares, own.indices, own.indptr), shape=own.shape)
        kept, top = share @ kept, np.log(share @ np.exp(top) * (1 + 1e-12))
        more = np.zeros((2, own.shape[0]))  # largest of its nodes
        for values, largest in zip((above, np.abs(psi)), more, strict=True):
            np.maximum.at(largest, rows, values[own.indices])
        rounding = 64 * U * (1 + more[1] + np.abs(of_law))
        log_modulus, angle = np.log(np.abs(kept) + 1e-300), np.angle(kept)
        omega = 2 * np.pi / key.period * np.arange(key.n_frequencies, dtype=np.float64)
        z = tilt + 1j * omega
        payoff = np.where(omega > 0, 2, 1) / key.period / np.conj(z * (z + 1))
        size_of: FloatArray = np.add.reduceat(np.abs(payoff).astype(np.float64), starts)
        return cls(
            key,
            of_kind @ (of_law + rounding),
            of_kind @ (more[0] + rounding) * 2,
            losses.n_steps * error,
            of_kind @ log_modulus,
            of_kind @ angle,
            of_kind @ top,
            starts,
            omega,
            payoff,
            size_of,
        )

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return self.log_modulus.nbytes + self.angle.nbytes + self.top.nbytes

    @property
    def tilt(self) -> float:
        """Of the line."""
        return float(TILTS[self.key.tilt])

    @property
    def beyond(self) -> float:
        """Sum of all payoffs from n_frequencies on [2.3]."""
        return (1 + 1e-9) * self.key.period / (2 * np.pi**2) / (self.key.n_frequencies - 1)


class OnLine:
    """delta(epsilon) of n examples on one line, as exp(psi - tilt epsilon) (sum + tail + rounding).

    Attributes:
        n_frequencies: (n,) that each sums over; needed: (n,) that it should.
        tail: (n,) bound of the others [2.3].
        rounding: (n,) bound of what rounding does to the sum [4.3] [4.4].
    """

    def __init__(
        self, losses: Losses, line: Line, met: Met, log_target: FloatArray, epsilon: FloatArray
    ) -> None:
        self.line, tilt, squares = line, line.tilt, np.square(line.omega)
        own = _squared_mu(losses, met)
        self.entries = entries = np.diff(met.counts.indptr) + losses.most_entries + 8
        self.gaussian = own * (1 + U * entries) + line.key.smooth
        steps = met.counts @ losses.n_steps
        self.psi = met.counts @ line.psi + tilt * (tilt + 1) / 2 * self.gaussian
        exponent = met.counts @ line.top - self.gaussian[:, None] / 2 * squares[line.starts]
        rounding_of_top = 1 + 1e-9 + 4 * U * entries * (met.counts @ np.abs(line.top)).max(axis=1)
        blocks = np.exp(exponent) * line.size * rounding_of_top[:, None]
        tails = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
        tails += (np.exp(-self.gaussian / 2 * squares[-1]) * line.beyond)[:, None]
        limit = _CUT * np.exp(np.minimum(log_target - self.psi + tilt * epsilon, 700.0))
        last = tails.shape[1] - 1
        kept = np.searchsorted(line.starts, line.log_modulus.shape[1], side="right") - 1
        need = np.where(tails <= limit[:, None], np.arange(last + 1), last).min(axis=1)
        need = np.clip(need, min(1, last), None)
        self.needed = line.starts[need]
        self.more = need > kept  # frequencies than the line keeps
        need = np.minimum(need, kept)
        self.n_frequencies = line.starts[need]
        self.tail = tails[np.arange(len(need)), need]
        error = met.counts @ line.error
        error += U * entries * (4 * steps + 2 + met.counts @ np.abs(line.psi))
        error += 64 * U * self.n_frequencies
        error += 16 * U * self.gaussian * (tilt + 1 + line.omega[self.n_frequencies]) ** 2
        self.rounding = np.expm1(error) * np.cumsum(np.abs(line.payoff))[self.n_frequencies]
        self.losses, self.met = losses, met
        self.wrapped = _psi(losses, met) if line.key.below else None

    def chunks(self) -> Iterator[tuple[IntArray, NDArray[np.complex128]]]:
        """Rows with the same number of frequencies, and their terms of the sum."""
        line, tilt = self.line, self.line.tilt
        for n in np.unique(self.n_frequencies):
            alike = np.flatnonzero(self.n_frequencies == n)
            table = np.concatenate([line.log_modulus[:, :n], line.angle[:, :n]], axis=1)
            real = -np.square(line.omega[:n]) / 2
            imaginary = -line.omega[:n] * (2 * tilt + 1) / 2
            size = max(1, _AT_ONCE // int(n))
            for rows in np.split(alike, range(size, len(alike), size)):
                log = _product(self.met.counts[rows], table)
                modulus = np.exp(log[:, :n] + self.gaussian[rows, None] * real)
                angle = log[:, n:] + self.gaussian[rows, None] * imaginary
                terms = np.empty((len(rows), int(n)), complex)
                terms.real, terms.imag = modulus * np.cos(angle), modulus * np.sin(angle)
                yield rows, terms * line.payoff[:n]

    def log_delta(
        self, rows: IntArray, terms: NDArray[np.complex128], epsilon: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Log delta at epsilon, from above, and minus its slope [2.2] [4.5]."""
        tilt, period, psi = self.line.tilt, self.line.key.period, self.psi[rows]
        waves = terms * _powers(np.exp(2j * np.pi / period * epsilon), terms.shape[1])
        extra = self.tail[rows] + self.rounding[rows] * (1 + np.abs(epsilon) / period)
        total = np.maximum(waves.real.sum(axis=1) + extra, 1e-3 * extra + 1e-300)
        z = tilt - 1j * self.line.omega[: terms.shape[1]]
        slope = ((waves @ z).real + extra * tilt) / total
        log = np.log(total)
        size = 16 + np.abs(psi) + tilt * np.abs(epsilon) + np.abs(log)
        return psi - tilt * epsilon + log + 8 * U * size, slope

    def log_delta_below(
        self, rows: IntArray, terms: NDArray[np.complex128], epsilon: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Log delta of what was met at epsilon, from below, and minus its slope [3.3] [3.5].

        -inf where nothing is shown. The lattice and the smoothing are within a Gaussian mechanism
        of squared mu `more` besides, so that the curve is read further out and less what that
        mechanism may have carried across.
        """
        tilt, key, psi = self.line.tilt, self.line.key, cast(FloatArray, self.wrapped)[rows]
        spacing, smoothed = key.period / key.n_points, self.gaussian[rows]
        steps = (self.met.counts @ self.losses.n_steps)[rows]
        more = key.smooth + steps * (_SPREAD * spacing) ** 2 + 4 * U * self.entries[rows] * smoothed
        out = epsilon + more / 2 + tilt * more + _BEYOND * np.sqrt(more)
        with np.errstate(all="ignore"):
            moved = steps * 256 * U * (np.exp(spacing) + self.losses.reach.max(initial=0.0))
            at = out + moved + 8 * U * (np.abs(out) + moved)
            waves = terms * _powers(np.exp(2j * np.pi / key.period * at), terms.shape[1])
            total = waves.real.sum(axis=1)
            base = self.psi[rows] - (self.met.counts @ self.line.raised)[rows] - tilt * at
            size = 16 * U * (16 + np.abs(self.psi[rows]) + tilt * np.abs(at))
            lost = self.tail[rows] + self.rounding[rows] * (1 + np.abs(at) / key.period)
            # What wraps around, from the left and, by larger tilts, from the right [3.4]
            lost += np.exp(size - base) / np.expm1(tilt * key.period)
            above = np.minimum(key.tilt + np.array([1, 2, 3, 5]), len(TILTS) - 1)
            far = _chernoff(psi, out, above, more)
            ratio = np.expm1((TILTS[above] - tilt) * key.period)
            right = np.exp(far + (size - base)[:, None]) / ratio
            lost += np.fmin.reduce(right, axis=1)
            carried = _chernoff(psi, out, np.array([key.tilt]), more)[:, 0]
            lost += np.exp(carried + log_ndtr(-_BEYOND) + size - base)
            log = np.log(total - lost)
            found = base + log - size - 8 * U * np.abs(log)
            z = tilt - 1j * self.line.omega[: terms.shape[1]]
            slope = (waves @ z).real / total
        shown = total > lost
        return np.where(shown, found, -np.inf), np.where(shown, slope, tilt)


def _chernoff(
    psi: FloatArray,
    epsilon: FloatArray,
    columns: IntArray | slice = slice(None),
    gaussian: FloatArray | float = 0.0,
) -> FloatArray:
    """(n, n_columns) log of bounds of delta at epsilon (n,) by moments at some tilts [5.1].

    gaussian: (n,) squared mu of a Gaussian mechanism besides.
    """
    tilt = TILTS[columns]
    moment = psi[:, columns] + np.outer(gaussian, tilt * (tilt + 1) / 2)
    size = 16 + np.abs(moment) + tilt * np.abs(epsilon)[:, None]
    bound = moment + LOG_LARGEST[columns] - tilt * epsilon[:, None] + 16 * U * size
    return np.where(np.isnan(bound), np.inf, bound)


def _squared_mu(losses: Losses, met: Met) -> FloatArray:
    """(n,) of the Gaussian steps of each example."""
    return np.asarray(met.gaussian + met.counts @ losses.squares)


def _gaussian_alone(losses: Losses, met: Met) -> tuple[IntArray, FloatArray, FloatArray]:
    """Examples that met Gaussian steps alone, and their mu from below and from above [5.4]."""
    who = np.flatnonzero(met.counts @ losses.n_steps == 0)
    entries = np.diff(met.counts.indptr)[who] + losses.most_entries + 8
    mu = np.sqrt(_squared_mu(losses, met)[who])
    return who, mu * (1 - 2 * U * entries), mu * (1 + 2 * U * entries)


def _product(counts: csr_array, table: FloatArray) -> FloatArray:
    """Counts @ table, by the faster of two ways."""
    if counts.nnz > counts.shape[0] * counts.shape[1] / 8:
        return np.asarray(counts.toarray() @ table)
    return np.asarray(counts @ table)


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


def _keys(
    losses: Losses,
    psi: FloatArray,
    best: IntArray,
    log_target: FloatArray,
    epsilon: FloatArray,
    slope: FloatArray,
    near: Accuracy,
) -> list[_Key]:
    """The line of each example: all that it depends on is rounded to a few values."""
    column = best.copy()
    left, right = _wrapping(psi, column, log_target, epsilon, near.alias)
    period = np.fmax(left, np.where(np.isfinite(right), right, 0.0))
    hard = np.flatnonzero(right > 1.5 * left)
    for down in range(1, 12):  # a smaller tilt needs a shorter period where the tail is heavy
        lower = np.maximum(best[hard] - down, 0)
        at = TILTS[lower] * epsilon[hard]
        far = psi[hard, lower] + LOG_LARGEST[lower] - at - log_target[hard]
        ends = _wrapping(psi[hard], lower, log_target[hard], epsilon[hard], near.alias)
        needed = np.maximum(*ends)
        better = (needed < 0.8 * period[hard]) & (far < 10)
        period[hard[better]], column[hard[better]] = needed[better], lower[better]
    tilt = TILTS[column]
    left = 2 * np.ceil((near.alias - log_target) / 2) / tilt
    period = left * 2 ** np.ceil(np.log2(np.maximum(period / left, 1.0)))
    slope = tilt * 2 ** np.ceil(np.log2(np.maximum(slope / tilt, 1.0)))
    smooth = 2 * near.smoothing / (slope * (slope + 1))
    spacing = np.sqrt(12 * near.lattice / (slope * (slope + 1) * max(losses.most_steps, 1.0)))
    n_laws = max(len(losses.cells), 1)
    most = int(np.clip(_MOST_POINTS // n_laws, 1 << 16, 1 << 21))
    frequencies = np.ceil(period / np.pi * np.sqrt(12 / smooth)) + 8
    wanted = np.maximum(2 * frequencies, period / spacing)
    steep = wanted > 0.8 * most  # these share the longest lines
    frequencies = np.where(steep, most // 4, frequencies).astype(np.int64)
    smooth = 12 * np.square(period / np.pi / frequencies)
    wanted = np.where(steep, most, wanted).astype(np.int64)
    points = [fft.next_fast_len(n, real=True) for n in wanted.tolist()]
    parts = zip(column, period, points, frequencies, smooth, strict=True)
    return [_Key(int(c), float(p), n, int(f), float(s), near is BELOW) for c, p, n, f, s in parts]


Solve = Callable[[IntArray, Curve], tuple[FloatArray, FloatArray, FloatArray]]


def _search(
    losses: Losses,
    met: Met,
    psi: FloatArray,
    best: IntArray,
    log_target: FloatArray,
    epsilon: FloatArray,
    floor: FloatArray,
    solve: Solve,
    near: Accuracy = ABOVE,
) -> None:
    """Call solve(examples, curve) -> (epsilon, log delta, slope) for all examples.

    It is called again, with another line, for those where these tell that the first was poor.
    """
    slope, epsilon, log_target = TILTS[best], epsilon.copy(), log_target.copy()
    todo = np.flatnonzero(np.isfinite(epsilon + log_target))
    for _ in range(_ROUNDS):
        again = [todo[:0]]
        members: dict[_Key, list[int]] = {}
        keys = _keys(
            losses, psi[todo], best[todo], log_target[todo], epsilon[todo], slope[todo], near
        )
        for example, key in zip(todo.tolist(), keys, strict=True):
            members.setdefault(key, []).append(example)
        for key, examples in members.items():
            who = np.array(examples)
            for line, mine in _lines(losses, key, met, who, log_target, epsilon):
                for rows, terms in line.chunks():
                    own = mine[rows]

                    def curve(
                        index: IntArray,
                        at: FloatArray,
                        line: OnLine = line,
                        rows: IntArray = rows,
                        terms: NDArray[np.complex128] = terms,
                    ) -> tuple[FloatArray, FloatArray]:
                        bound = line.log_delta if near is ABOVE else line.log_delta_below
                        return bound(rows[index], terms[index], at)

                    found, log_delta, steep = solve(own, curve)
                    column = np.full(len(own), key.tilt)
                    _, right = _wrapping(psi[own], column, log_delta, found, near.alias)
                    size = line.psi[rows] - line.line.tilt * found - log_delta
                    cut = line.tail[rows] * np.exp(np.minimum(size, 50))
                    poor = (steep > 2 * slope[own]) | (right - key.period > 2 / steep)
                    poor |= cut > 1e-3
                    epsilon[own], log_target[own] = found, log_delta
                    slope[own] = np.maximum(steep, slope[own] / 2)
                    again.append(own[poor & (found > floor[own])])
        todo = np.concatenate(again)
        if not len(todo):
            return


def _lines(
    losses: Losses,
    key: _Key,
    met: Met,
    who: IntArray,
    log_target: FloatArray,
    epsilon: FloatArray,
) -> Iterator[tuple[OnLine, IntArray]]:
    """The examples of a key on its line; those that need more frequencies than it keeps apart."""

    def on(line: Line, mine: IntArray) -> OnLine:
        return OnLine(losses, line, met.take(mine), log_target[mine], epsilon[mine])

    line = losses.line(key)
    found = on(line, who)
    if found.more.any():
        enough, hard = who[~found.more], who[found.more]
        if len(enough):
            yield on(line, enough), enough
        who, found = hard, on(losses.line(key, int(found.needed.max())), hard)
    yield found, who


def _root(
    curve: Curve, start: FloatArray, target: FloatArray, floor: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Least proven epsilon, from `floor` on, by Newton's method in a bracket; the slope there."""
    n = len(start)
    low, high = np.full(n, -np.inf), np.full(n, np.inf)
    epsilon, slope = np.maximum(start, floor), np.ones(n)
    active, tried = np.arange(n), np.zeros(n, bool)  # whether the floor itself was
    for _ in range(20):
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
        epsilon[active] = np.where((new <= a) | (new >= b), middle, inside)
        active = active[~done & ~(np.isfinite(b) & (b - a <= 1e-12 * b))]
        if not len(active):
            break
    return high, slope


def epsilons(
    losses: Losses, met: Met, delta: float, at_least: FloatArray | None = None
) -> FloatArray:
    """(n,) epsilon of each example at delta in one direction, never below the truth [5.2].

    Infinite where no finite one can be shown.

    Args:
        losses: of the run.
        met: what the examples met.
        delta: above LEAST_DELTA and below 1.
        at_least: (n,) the epsilons of the other direction, if no smaller ones are of interest.
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
        best = _chernoff(psi, start).argmin(axis=1)

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        root, steep = _root(curve, np.minimum(start, found)[who], target[who], floor[who])
        found[who] = np.minimum(found[who], root)
        return np.minimum(found[who], renyi[who]), target[who], steep

    alone, _, mu = _gaussian_alone(losses, met)
    start[alone] = np.nan  # these need no line
    _search(losses, met, psi, best, target, start, floor, solve)
    found = np.fmin(found, renyi)
    found[alone] = gaussian_epsilons(mu, delta)[1]
    return np.asarray(np.maximum(found, floor))


def deltas(losses: Losses, met: Met, epsilon: FloatArray) -> FloatArray:
    """(n,) delta of each example at its epsilon in one direction, never below the truth [5.3]."""
    psi = _psi(losses, met)
    bound = _chernoff(psi, epsilon)
    log_delta = np.minimum(bound.min(axis=1), 0.0)

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        found, steep = curve(np.arange(len(who)), epsilon[who])
        log_delta[who] = np.fmin(log_delta[who], found)
        return epsilon[who], np.minimum(log_delta[who], -1e-9), steep

    missed, floor = met.counts @ losses.miss, np.full(len(epsilon), -np.inf)
    alone, _, mu = _gaussian_alone(losses, met)
    start = np.minimum(log_delta, -1e-9)
    with np.errstate(divide="ignore"):
        start[log_delta < np.log(missed)] = np.nan  # less than is added anyway
    start[alone] = np.nan
    _search(losses, met, psi, bound.argmin(axis=1), start, epsilon, floor, solve)
    found = np.exp(log_delta) * (1 + 16 * U) + missed
    found[alone] = gaussian_delta(epsilon[alone], mu) * (1 + GAUSSIAN_ERROR)
    return np.asarray(np.minimum(found, 1.0))


def true_positive_rates(losses: Losses, met: Met, false_positive_rate: float) -> FloatArray:
    """(n,) the most that a test with this false-positive rate finds, never below the truth [5.3].

    delta(epsilon) + exp(epsilon) * rate is, at any epsilon; the least of a few is returned.
    """
    psi, missed = _psi(losses, met), met.counts @ losses.miss
    log_rate = float(np.log(false_positive_rate))
    bound = (psi - log_rate) / (TILTS + 1)  # what a loss exceeds about this rarely, or less
    start, found = np.maximum(bound.min(axis=1), 0.0), np.ones(len(psi))

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        epsilon, every = start[who].copy(), np.arange(len(who))
        for _ in range(8):
            log_delta, steep = curve(every, epsilon)
            with np.errstate(over="ignore"):
                most = np.exp(log_delta) + np.exp(epsilon + log_rate)
            rounding = 16 * U * (1 + np.abs(epsilon) - log_rate)
            most = most * (1 + rounding) + missed[who]
            found[who] = np.fmin(found[who], most)
            excess = log_delta + np.log(np.maximum(steep, 1e-9)) - epsilon - log_rate
            last, epsilon = epsilon, epsilon + np.clip(excess / (steep + 1), -1, 1)
        return last, np.minimum(log_delta, -1e-9), steep

    alone, _, mu = _gaussian_alone(losses, met)
    target, floor = np.minimum(start + log_rate, -1e-3), np.full(len(psi), -np.inf)
    target[alone] = np.nan
    _search(losses, met, psi, bound.argmin(axis=1), target, start, floor, solve)
    found[alone] = np.minimum(ndtr(ndtri(false_positive_rate) + mu) * (1 + GAUSSIAN_ERROR), 1.0)
    return found


def _psi(losses: Losses, met: Met) -> FloatArray:
    """(n, n_tilts) log E exp(tilt L) of what each example met, from above."""
    gaussian = TILTS * (TILTS + 1) / 2 * met.gaussian[:, None]
    rounding = 1e-12 + U * np.diff(met.counts.indptr)[:, None]
    return np.asarray((met.counts @ losses.psi + gaussian) * (1 + rounding))


def lower_epsilons(below: Losses, met: Met, delta: float, upper: FloatArray) -> FloatArray:
    """(n,) epsilon of each example at delta in one direction, never above the truth [3.3] [5.2].

    Args:
        below: the losses of the run, from cells below the truth.
        met: what the examples met.
        delta: above LEAST_DELTA and below 1.
        upper: (n,) their epsilons from above, near which lower ones are looked for.
    """
    psi, least = _psi(below, met), np.log(delta)
    target = np.full(len(met), least + 16 * U * (1 + abs(least)))
    best = _chernoff(psi, upper).argmin(axis=1)
    found = np.zeros(len(met))

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        epsilon, every = upper[who].copy(), np.arange(len(who))
        for _ in range(6):
            log_delta, steep = curve(every, epsilon)
            gap = log_delta - target[who]
            found[who] = np.where(gap > 0, np.maximum(found[who], epsilon), found[who])
            step = np.where(
                np.isfinite(gap), (gap - 1e-3) / np.maximum(steep, 1e-9), -0.5 * epsilon
            )
            epsilon = np.maximum(epsilon + step, 0.0)
        return upper[who], target[who], np.maximum(steep, TILTS[best[who]])

    start = np.where(upper > 0, upper, np.nan)
    alone, mu, _ = _gaussian_alone(below, met)
    start[alone] = np.nan
    _search(below, met, psi, best, target, start, np.zeros(len(met)), solve, BELOW)
    found[alone] = gaussian_epsilons(mu, delta)[0]
    return np.where(upper > 0, np.minimum(found, upper), 0.0)


def lower_deltas(below: Losses, met: Met, epsilon: FloatArray) -> FloatArray:
    """(n,) delta of each example at its epsilon one way, never above the truth [3.3] [4.5].

    0 where it is below 1e-12.

    below: the losses of the run, from cells below the truth.
    """
    psi = _psi(below, met)
    bound = _chernoff(psi, epsilon)
    log_delta = np.full(len(met), -np.inf)

    def solve(who: IntArray, curve: Curve) -> tuple[FloatArray, FloatArray, FloatArray]:
        found, steep = curve(np.arange(len(who)), epsilon[who])
        log_delta[who] = np.fmax(log_delta[who], found)
        near = np.where(np.isfinite(found), found, target[who])
        return epsilon[who], np.minimum(near, -1e-9), steep

    target, floor = np.minimum(bound.min(axis=1), -1e-9), np.full(len(epsilon), -np.inf)
    alone, mu, _ = _gaussian_alone(below, met)
    target[target < _LEAST_SHOWN] = np.nan
    target[alone] = np.nan
    _search(below, met, psi, bound.argmin(axis=1), target, epsilon, floor, solve, BELOW)
    found = np.exp(log_delta) * (1 - 16 * U)
    found[alone] = gaussian_delta(epsilon[alone], mu) * (1 - GAUSSIAN_ERROR)
    return np.asarray(np.clip(found, 0.0, 1.0))
