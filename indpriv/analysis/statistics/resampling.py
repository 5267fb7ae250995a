"""Bootstrap intervals and permutation tests of group means, for many groups at once. Sensitive.

Examples lie in cells, one for each group and stratum (a stratum is a label). The bootstrap weights
every example by an independent Poisson(1) variable (Hanley and MacGibbon 2006); intervals are
studentised ("bootstrap-t", Efron and Tibshirani 1993, section 12.5), which keeps its level for the
small and skewed groups where percentiles do not.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.analysis.statistics.intervals import CONFIDENCE, Interval
from indpriv.analysis.statistics.weighted import ones

# A larger cell is resampled as this many runs of neighbouring values, whose means keep all but
# ~1e-4 of its variance.
RUNS = 256
_MOST_DRAWS, _LEAST_DRAWS = 1000, 200
# Weights that one bootstrap may draw (a second on one core); more data get fewer resamples.
_WORK = 2e7
_CHUNK = 2e6  # weights held at once
# Poisson(1) of 16 random bits, to 2e-5.
_POISSON = np.searchsorted(
    np.cumsum([1 / (math.e * math.factorial(k)) for k in range(20)]),
    (np.arange(1 << 16) + 0.5) / (1 << 16),
).astype(np.float64)
NO_SPREAD = 1e-6  # standard deviation relative to the values; a smaller one may be rounding error
_MOST_PERMUTATIONS, _LEAST_PERMUTATIONS = 999, 199
# Examples that one test may shuffle (half a second on one core); more data get fewer permutations.
_PERMUTED = 2e7
_DRAW_COST = 4  # one hypergeometric variable, in shuffled examples
_SAME = 1e-9  # relative; statistics this close are ties


def generator_of(seed: int, name: str | None) -> np.random.Generator:
    """Random choices of an analysis for one group or column, or for all examples (None)."""
    return np.random.default_rng(
        [seed] if name is None else [seed, zlib.crc32(name.encode("utf-8", "surrogatepass"))]
    )


@dataclass(frozen=True)
class Resampled:
    """Estimates with standard errors, for the data and for every resample.

    Attributes:
        estimate, error: (n,); NaN where undefined.
        draws, draw_errors: (n_draws, n).
    """

    estimate: FloatArray
    error: FloatArray
    draws: FloatArray
    draw_errors: FloatArray

    def intervals(self, low: float = -np.inf, high: float = np.inf) -> list[Interval | None]:
        """Bootstrap-t intervals inside [low, high]; None without spread or enough defined draws."""
        estimate, error, draws = self.estimate, self.error, self.draws
        with np.errstate(invalid="ignore", divide="ignore"):
            # Without spread in a draw: infinite, which widens the interval.
            t = (draws - estimate) / self.draw_errors
        t[draws == estimate] = 0.0
        count = (~np.isnan(t)).sum(axis=0)
        t = np.sort(t, axis=0)  # NaN last
        last, columns = np.maximum(count - 1, 0), np.arange(t.shape[1])
        tail = np.floor((1 - CONFIDENCE) / 2 * last).astype(np.int64)
        usable = np.isfinite(estimate) & (error > 0) & (count >= _LEAST_DRAWS // 2)
        with np.errstate(invalid="ignore"):
            lows = np.maximum(low, estimate - t[last - tail, columns] * error)
            highs = np.minimum(high, estimate - t[tail, columns] * error)
        ends = zip(lows.tolist(), highs.tolist(), usable, strict=True)
        return [Interval(first, second) if known else None for first, second, known in ends]

    def every(self, step: int, first: int) -> "Resampled":
        """Every step-th estimate, from position first on."""
        take = slice(first, None, step)
        return Resampled(
            self.estimate[take], self.error[take], self.draws[:, take], self.draw_errors[:, take]
        )

    def ratio(self, worst: int, best: int) -> Interval | None:
        """Interval of one estimate over another; None unless both are positive.

        It does not account for choosing these two groups as the extremes; the permutation test
        does.
        """
        pair = [worst, best]
        means, errors = self.estimate[pair], self.error[pair]
        draws, draw_errors = self.draws[:, pair], self.draw_errors[:, pair]
        if not (means > 0).all():
            return None
        with np.errstate(all="ignore"):
            (found,) = Resampled(
                np.log(means[:1] / means[1:]),
                np.hypot(*(errors / means))[None],
                np.log(draws[:, :1] / draws[:, 1:]),
                np.hypot(*(draw_errors / draws).T)[:, None],
            ).intervals(high=700.0)
        return found and Interval(float(np.exp(found.low)), float(np.exp(found.high)))


@dataclass(frozen=True)
class ResampledMeans:
    """Means from one bootstrap: of each group, of each at the stratum shares, of each cell.

    groups, standardised: n_groups estimates; cells: n_groups * n_strata estimates, group by group,
    or None.
    """

    groups: Resampled
    standardised: Resampled
    cells: Resampled | None
    draws: int


def resample_means(
    values: FloatArray,
    groups: IntArray,
    strata: IntArray,
    *,
    n_groups: int,
    shares: FloatArray,
    with_cells: bool,
    rng: np.random.Generator,
    weights: IntArray | None = None,
) -> ResampledMeans:
    """Bootstrap the means of all groups at once.

    values: (n,) finite; groups, strata: (n,) codes; shares: (n_strata,) weights of the standardised
    means, summing to 1, where strata of weight 0 are ignored; with_cells: include the mean of every
    cell; rng: of the analysis, not of training; weights: (n,) number of examples that have each
    value, default one each.
    """
    n_strata = len(shares)
    weights = ones(values) if weights is None else weights
    centre = float(np.average(values, weights=weights))
    runs, size = _Runs(values - centre, weights, groups * n_strata + strata), n_groups * n_strata
    n_draws = int(np.clip(_WORK // len(runs.size), _LEAST_DRAWS, _MOST_DRAWS))
    exact = _summaries(runs.sums(runs.size[None].astype(np.float64), size), n_groups, shares)
    kept: list[list[tuple[FloatArray, FloatArray]]] = []
    at_once = max(1, int(_CHUNK // max(len(runs.size), size)))
    for start in range(0, n_draws, at_once):
        drawn = _poisson_weights(runs.size, min(at_once, n_draws - start), rng)
        summaries = _summaries(runs.sums(drawn, size), n_groups, shares)
        kept.append(summaries if with_cells else summaries[:2])
    made = []
    for number in range(len(kept[0])):
        mean, error = exact[number]
        draws, draw_errors = (
            np.concatenate([part[number][which] for part in kept]) for which in (0, 1)
        )
        made.append(Resampled(mean[0] + centre, error[0], draws + centre, draw_errors))
    return ResampledMeans(made[0], made[1], made[2] if with_cells else None, n_draws)


class _Runs:
    """Runs of neighbouring values of a cell: size, mean, mean square; first run of each cell."""

    def __init__(self, values: FloatArray, weights: IntArray, cells: IntArray) -> None:
        order = np.lexsort((values, cells))
        values, weights, cells = values[order], weights[order], cells[order]
        first = np.flatnonzero(np.diff(cells, prepend=cells[0] - 1))
        lengths = np.diff(first, append=len(cells))
        counts = np.repeat(np.add.reduceat(weights, first), lengths)
        before = np.cumsum(weights) - weights
        rank = before - np.repeat(before[first], lengths)
        run = rank * np.minimum(RUNS, counts) // counts
        begins = np.flatnonzero((np.diff(run, prepend=-1) != 0) | (rank == 0))
        self.size = np.add.reduceat(weights, begins)
        self.mean = np.add.reduceat(values * weights, begins) / self.size
        self.square = np.add.reduceat(values**2 * weights, begins) / self.size
        self.starts, self.present = np.searchsorted(begins, first), cells[first]

    def sums(self, weights: FloatArray, n_cells: int) -> list[FloatArray]:
        """Sums of weights, weighted values and weighted squares, each (n_draws, n_cells)."""
        made = []
        for factor in (None, self.mean, self.square):
            dense, each = np.zeros((len(weights), n_cells)), weights
            if factor is not None:
                each = weights * factor
            dense[:, self.present] = np.add.reduceat(each, self.starts, axis=1)
            made.append(dense)
        return made


def _poisson_weights(sizes: IntArray, n_draws: int, rng: np.random.Generator) -> FloatArray:
    """For each run the sum of one Poisson(1) weight per example, (n_draws, n_runs)."""
    shape = (n_draws, len(sizes))
    if (sizes == 1).all():
        looked_up: FloatArray = _POISSON[rng.integers(0, len(_POISSON), shape, dtype=np.uint16)]
        return looked_up
    return rng.poisson(sizes, shape).astype(np.float64)


def _summaries(
    sums: Sequence[FloatArray], n_groups: int, shares: FloatArray
) -> list[tuple[FloatArray, FloatArray]]:
    """Mean and standard error of the groups, of the groups at the shares, and of the cells."""
    weight, total, square = (part.reshape(len(part), n_groups, len(shares)) for part in sums)
    groups = _mean_and_error(weight.sum(axis=2), total.sum(axis=2), square.sum(axis=2))
    mean, error = _mean_and_error(weight, total, square)
    used = shares > 0
    standardised = (
        mean[:, :, used] @ shares[used],
        np.sqrt(np.square(error[:, :, used]) @ np.square(shares[used])),
    )
    return [groups, standardised, (mean.reshape(len(mean), -1), error.reshape(len(mean), -1))]


def _mean_and_error(
    weight: FloatArray, total: FloatArray, square: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Weighted mean and its standard error; NaN with fewer than two examples."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(weight >= 1, total / weight, np.nan)
        variance = square / weight - mean**2
        variance[variance < square / np.maximum(weight, 1) * NO_SPREAD**2] = 0.0
        return mean, np.where(weight >= 2, np.sqrt(variance / (weight - 1)), np.nan)


@dataclass(frozen=True)
class SpreadTest:
    """Permutation test of the hypothesis that groups are exchangeable within strata.

    Attributes:
        p_value: for the whole table: how often the most extreme group of a permutation is at least
            as extreme as here.
        adjusted: (n_groups,) the same for each group, corrected for all groups tested (single-step
            maxT); None where the group was not tested.
        permutations: number of permutations drawn.
    """

    p_value: float
    adjusted: tuple[float | None, ...]
    permutations: int


def permutation_test(
    values: FloatArray,
    groups: IntArray,
    strata: IntArray,
    *,
    tested: NDArray[np.bool_],
    rng: np.random.Generator,
    weights: IntArray | None = None,
) -> SpreadTest | None:
    """Test whether group means differ by more than chance, permuting within strata.

    A group's statistic is its sum of deviations from the stratum means over the standard deviation
    of that sum under permutation; the table's is the largest in absolute value, whose permutation
    distribution corrects for the number of groups (Westfall and Young 1993, single-step maxT).
    Valid for any number of permutations (Phipson and Smyth 2010).

    Arguments are as of `resample_means`; tested: (n_groups,) which groups get a p-value, while the
    others only belong to the pool. None if fewer than two groups are tested, or if nothing varies
    within strata.
    """
    if tested.sum() < 2:
        return None
    weights = ones(values) if weights is None else weights
    order = np.lexsort((groups, strata))
    ends = np.flatnonzero(np.diff(strata[order])) + 1
    made = (_block(values[part], weights[part], groups[part]) for part in np.split(order, ends))
    blocks = [block for block in made if block is not None]
    variance, total = np.zeros(len(tested)), np.zeros(len(tested))
    for block in blocks:
        variance[block.groups] += block.variances
        total[block.groups] += block.observed
    testable = tested & (variance > 0)
    if testable.sum() < 2:
        return None
    scale = np.sqrt(variance[testable])
    observed = np.abs(total[testable]) / scale
    work = sum(block.work for block in blocks)
    n_permutations = int(np.clip(_PERMUTED // work, _LEAST_PERMUTATIONS, _MOST_PERMUTATIONS))
    largest = np.empty(n_permutations)
    for number in range(n_permutations):
        sums = np.zeros(len(tested))
        for block in blocks:
            sums[block.groups] += block.permuted(rng)
        largest[number] = float((np.abs(sums[testable]) / scale).max())
    ordered = np.sort(largest)
    reached = n_permutations - np.searchsorted(ordered, observed * (1 - _SAME), side="left")
    p_values = (1 + reached) / (1 + n_permutations)
    adjusted: list[float | None] = [None] * len(tested)
    for code, p_value in zip(np.flatnonzero(testable).tolist(), p_values.tolist(), strict=True):
        adjusted[code] = p_value
    return SpreadTest(float(p_values.min()), tuple(adjusted), n_permutations)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for the number of tests (Holm 1979).

    >>> holm([0.01, 0.04, 0.5])
    [0.03, 0.08, 0.5]
    """
    order = np.argsort(p_values, kind="stable")
    stepped = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    found: list[float] = corrected.tolist()
    return found


@dataclass(frozen=True)
class _Block:
    """One stratum of a permutation test: its groups and their deviations from its mean.

    If it holds many examples in few groups, values are runs of neighbours (of the given sizes, each
    at its mean); a permutation is then one draw from the multivariate hypergeometric distribution
    instead of a shuffle.
    """

    groups: IntArray  # (n_present,)
    counts: IntArray
    observed: FloatArray
    variances: FloatArray
    values: NDArray[np.floating]
    sizes: IntArray | None

    @property
    def work(self) -> int:
        """Cost of one permutation, in shuffled examples."""
        return len(self.values) if self.sizes is None else _DRAW_COST * len(self.groups) * RUNS

    def permuted(self, rng: np.random.Generator) -> FloatArray:
        """Sum of deviations of each present group after one permutation."""
        if self.sizes is None:
            rng.shuffle(self.values)
            return _group_sums(self.values, self.counts)
        sums, left = np.empty(len(self.groups)), self.sizes.copy()
        for index, count in enumerate(self.counts[:-1].tolist()):
            drawn = rng.multivariate_hypergeometric(left, count, method="marginals")
            left -= drawn
            sums[index] = drawn @ self.values
        sums[-1] = left @ self.values
        return sums


def _block(values: FloatArray, weights: IntArray, groups: IntArray) -> _Block | None:
    """The block of one stratum, ordered by group; None for one group or without spread."""
    present, first = np.unique(groups, return_index=True)
    n = int(weights.sum())
    in_runs = _DRAW_COST * len(present) * RUNS < n
    if not in_runs:  # few enough to shuffle
        values, groups = np.repeat(values, weights), np.repeat(groups, weights)
        first, weights = np.searchsorted(groups, present), np.ones(n, np.int64)
    counts = np.add.reduceat(weights, first)
    deviations = values - np.average(values, weights=weights)
    spread = float((weights * deviations) @ deviations)
    if len(present) < 2 or np.sqrt(spread / n) <= NO_SPREAD * np.abs(values).max():
        return None
    sizes = None
    if in_runs:
        run = np.empty(len(values), dtype=np.int64)
        by_value = np.argsort(deviations, kind="stable")
        through = np.cumsum(weights[by_value])
        run[by_value] = (through - weights[by_value]) * RUNS // n
        run = np.unique(run, return_inverse=True)[1]
        sizes = np.bincount(run, weights).astype(np.int64)
        means = np.bincount(run, weights=weights * deviations) / sizes
        deviations = means[run]
        spread = float((weights * deviations) @ deviations)
    # Single precision shuffles twice as fast; the observed sums are of the same rounded values.
    single = deviations.astype(np.float32)
    return _Block(
        groups=present,
        counts=counts,
        observed=_group_sums(single, counts)
        if sizes is None
        else np.add.reduceat(weights * deviations, first),
        variances=spread / (n - 1) * counts * (1 - counts / n),
        values=single if sizes is None else means,
        sizes=sizes,
    )


def _group_sums(values: NDArray[np.floating], counts: IntArray) -> FloatArray:
    sums: FloatArray = np.add.reduceat(values, np.cumsum(counts) - counts, dtype=np.float64)
    return sums
