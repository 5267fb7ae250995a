"""Statistics of examples and of groups, which say when they are undefined. Sensitive.

Of up to MOST_EXACT examples each is a row of its own, of weight one. Of more, examples are counted
in fine bins part by part, and what was counted adds up to the same bits in any order; correlations
are those of a random MOST_EXACT.

A bin holds the floats that agree in their exponent and in the first bits of their significand: with
ten bits it is at most 2^-10 (0.1 %) of its values wide. What a bin counts and adds up are whole
numbers: how far its values lie above its edge, in their last places. The mean of a bin is that of
its values.

For means of groups, examples lie in cells, one for each group and stratum (a stratum is a label).
Intervals of means are made of three sums of powers, without drawing: they allow for the skewness of
the values, and keep their level for the small and skewed groups where plain ones do not.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import betaincinv

from indpriv._plain import Number, figure
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.errors import InputError

MOST_EXACT = 1_000_000  # more examples than this are analysed in bins
BITS = 10  # of the significand that say in which bin a number is
BIN_WIDTH = 2.0**-BITS  # the largest, relative to any of its values
BLOCK = 1 << 20  # examples that are sorted at once
_REST, _CODE, _HALF = 52 - BITS, 11 + BITS, 21  # bits below a bin's edge, of its code, of a half
_MIN_PAIRS = 3  # two points always lie on a line
_FLOAT_NOISE = 1e-12  # a spread this small relative to the values is rounding error


class Condensed:
    """Examples that come in parts, as one frame with a weight in each row."""

    def __init__(self, name: str, *, n: int) -> None:
        """Begin without examples; each of the n to come has a number of this name."""
        self._name, self._in_bins = name, n > MOST_EXACT
        self._parts: list[pd.DataFrame] = []

    def add(self, cell: IntArray, values: FloatArray) -> None:
        """Add the next (n,) examples.

        Cells are whole numbers, of groups, say. In bins, values are finite and at least 0.
        """
        if not self._in_bins:
            self._parts.append(pd.DataFrame({self._name: values, "cell": cell}))
            return
        for start in range(0, max(len(cell), 1), BLOCK):
            block = slice(start, start + BLOCK)
            part = _merged(_keyed(cell[block], values[block]))
            self._parts = [_merged(*self._parts, part)]

    def frame(self) -> pd.DataFrame:
        """One row for each example, or for each bin of a cell.

        Columns are cell, weight (the number of examples), the mean of these under the name itself,
        and the largest of them under largest_ before it.
        """
        if not self._in_bins:
            found = pd.concat(self._parts, ignore_index=True)
            same = {f"largest_{self._name}": found[self._name]}
            return found.assign(weight=np.ones(len(found), np.int64), **same)
        rows = {name: self._parts[0][name].to_numpy() for name in self._parts[0]}
        key, weight = rows["key"], rows["weight"]
        edge = ((key & ((1 << _CODE) - 1)) << _REST).view(np.float64)
        above = rows["upper"] / weight * 2.0**_HALF + rows["lower"] / weight
        mean = {self._name: edge + above * np.spacing(edge)}
        of = {"weight": weight, "cell": key >> _CODE, f"largest_{self._name}": rows["largest"]}
        return pd.DataFrame(mean | of)


def _keyed(cell: IntArray, values: FloatArray) -> pd.DataFrame:
    """Examples one by one, as they are counted; key: the cell, then the bin."""
    values = np.abs(values, dtype=np.float64)  # -0.0 is 0.0
    bits = values.view(np.int64)
    rest = bits & ((1 << _REST) - 1)
    rows = {"key": (cell.astype(np.int64) << _CODE) | (bits >> _REST), "largest": values}
    rows |= {"weight": np.ones(len(values), np.int64)}
    return pd.DataFrame(rows | {"upper": rest >> _HALF, "lower": rest & ((1 << _HALF) - 1)})


def _merged(*parts: pd.DataFrame) -> pd.DataFrame:
    """The rows of all parts, those of one key added up, in the order of the keys."""
    how = {"largest": "max"} | dict.fromkeys(("weight", "upper", "lower"), "sum")
    return pd.concat(parts).groupby("key", as_index=False).agg(how)


def sample(n: int, most: int, rng: np.random.Generator) -> IntArray | None:
    """Increasing positions of so many random ones of n; None if there are no more."""
    return None if n <= most else np.sort(rng.choice(n, most, replace=False))


def quantiles_by_cell(
    values: FloatArray,
    weights: IntArray,
    cells: IntArray,
    size: int,
    probabilities: Sequence[float],
) -> FloatArray:
    """Quantiles (size, n_probabilities) of each cell; NaN without examples.

    Medians are interpolated linearly; above them it is the next higher value that occurs, since
    fewer may be at most one between two. Values (n,) are finite, weights are numbers of examples
    that have each, cells are codes < size.
    """
    order = np.lexsort((values, cells))
    ordered, up_to = values[order], np.cumsum(weights[order])
    totals = np.bincount(cells, weights, minlength=size).astype(np.int64)
    begins = np.cumsum(totals) - totals
    known = totals > 0
    found = np.full((size, len(probabilities)), np.nan)
    for number, probability in enumerate(probabilities):
        place = probability * (totals - 1)[known]
        low, high = (
            ordered[np.searchsorted(up_to, begins[known] + rank, side="right")]
            for rank in (np.floor(place).astype(np.int64), np.ceil(place).astype(np.int64))
        )
        middle = high - (high - low) * (1 - place % 1)  # as numpy: never beyond the upper value
        found[known, number] = high if probability > 0.5 else middle
    return found


def pearson(x: FloatArray, y: FloatArray) -> float | None:
    """Pearson's r of two finite arrays (n,); None below three pairs or where one is constant.

    >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    1.0
    >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([5.0, 5.0, 5.0])) is None
    True
    """
    if len(x) < _MIN_PAIRS:
        return None
    first, second = map(_centred, (x, y))
    if first is None or second is None:
        return None
    return float(np.clip(np.dot(first, second), -1.0, 1.0))


def spearman(x: FloatArray, y: FloatArray) -> float | None:
    """Spearman's rank correlation; ties share their mean rank; None where undefined."""
    return pearson(stats.rankdata(x), stats.rankdata(y))


def line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Intercept and slope of the least-squares line of y on x; x must not be constant."""
    deviations = x - x.mean()
    slope = float(np.dot(deviations, y) / np.dot(deviations, deviations))
    return float(y.mean() - slope * x.mean()), slope


def is_constant(values: FloatArray) -> bool:
    """Whether a non-empty array has no spread beyond float noise."""
    return _centred(values) is None


def _centred(values: FloatArray) -> FloatArray | None:
    """Values minus their mean, at unit length; None where they are constant up to float noise."""
    largest = float(np.max(np.abs(values)))
    if largest == 0:
        return None
    scaled = values / largest  # squares of scaled values cannot overflow
    deviations = scaled - scaled.mean()
    length = float(np.sqrt(np.dot(deviations, deviations)))
    return None if length <= _FLOAT_NOISE * len(values) ** 0.5 else deviations / length


# --- intervals of rates, of means of independent values, of correlations and of lines

CONFIDENCE = 0.95
_LEAST_PAIRS = 10


@dataclass(frozen=True)
class Interval:
    """A confidence interval.

    Attributes:
        low, high: its ends.
    """

    low: Number
    high: Number


Span = Annotated[Interval, figure("span")]
Shares = Annotated[Interval, figure("percent_span")]


def clopper_pearson(successes: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Exact two-sided interval of a binomial rate (Clopper and Pearson 1934); [0, 1] of no trials.

    confidence: of this interval by itself. InputError for fewer than no successes, or more than
    trials; both are whole numbers.
    """
    if not 0 <= successes <= trials:
        raise InputError(f"{successes:g} successes in {trials:g} trials is not a possible outcome")
    low, high = binomial_ends(np.array(successes), np.array(trials), confidence)
    return Interval(float(low), float(high))


def binomial_ends(
    successes: FloatArray, trials: FloatArray, confidence: float
) -> tuple[FloatArray, FloatArray]:
    """Lower and upper ends of `clopper_pearson` for arrays of possible outcomes."""
    tail, failures = (1 - confidence) / 2, trials - successes
    low = betaincinv(np.where(successes == 0, 1, successes), failures + 1, tail)
    high = betaincinv(successes + 1, np.where(failures == 0, 1, failures), 1 - tail)
    return np.where(successes == 0, 0.0, low), np.where(failures == 0, 1.0, high)


def student_quantile(freedom: FloatArray | int) -> FloatArray:
    """The upper quantile of Student's t for a 95 % interval; at least one degree of freedom."""
    return np.asarray(stats.t.ppf((1 + CONFIDENCE) / 2, np.maximum(freedom, 1)))


def relation_intervals(x: FloatArray, y: FloatArray) -> dict[str, Interval]:
    """95 % intervals of pearson and spearman of two arrays (n,), intercept and slope of y on x.

    What is undefined is absent: all below ten pairs or where one array is constant.

    Standard errors are those of the influence function (the infinitesimal jackknife, Efron 1982):
    they assume neither normal values nor a constant spread. Intervals of correlations are symmetric
    on Fisher's scale, atanh(r). Coverage was 92 to 97 % on samples of 12 to 400 normal and skewed
    pairs.
    """
    n, found = len(x), dict[str, Interval]()
    if n < _LEAST_PAIRS or is_constant(x) or is_constant(y):
        return found
    width = float(student_quantile(n - 2)) / np.sqrt(n)
    dx, dy = x - x.mean(), y - y.mean()
    u, v = (stats.rankdata(values) / n - (n + 1) / (2 * n) for values in (x, y))
    # What each pair adds to the influence on variances and covariance, as ranks depend on it too
    by_rank = (2 * _mean_above(x, u), 2 * _mean_above(y, v), _mean_above(x, v) + _mean_above(y, u))
    for name, a, b, (on_aa, on_bb, on_ab) in (
        ("pearson", dx / np.abs(dx).max(), dy / np.abs(dy).max(), (0.0, 0.0, 0.0)),
        ("spearman", u, v, by_rank),
    ):
        aa, bb = np.mean(a**2), np.mean(b**2)
        length = np.sqrt(aa * bb)
        r = float(np.clip(np.mean(a * b) / length, -1.0, 1.0))
        if abs(r) == 1.0:
            found[name] = Interval(r, r)
            continue
        influence = (a * b + on_ab) / length - r / 2 * ((a**2 + on_aa) / aa + (b**2 + on_bb) / bb)
        half = width * np.sqrt(n / (n - 2) * np.var(influence)) / (1 - r**2)
        low, high = np.tanh(np.arctanh(r) + np.array([-half, half])).tolist()
        found[name] = Interval(low, high)
    scale = np.abs(dx).max()
    z = dx / scale
    square = np.mean(z**2)
    leverage = (1 + z**2 / square) / n
    if leverage.max() > 1 - 1e-9:  # a single pair decides the slope
        return found
    intercept, slope = line(x, y)
    residual = (y - intercept - slope * x) / (1 - leverage)  # HC3, MacKinnon and White 1985
    on_slope = z * residual / square / scale
    on_intercept = residual - x.mean() * on_slope
    for name, value, of in (("intercept", intercept, on_intercept), ("slope", slope, on_slope)):
        half = width * np.sqrt(np.mean(of**2))
        found[name] = Interval(float(value - half), float(value + half))
    return found


def _mean_above(values: FloatArray, of: FloatArray) -> FloatArray:
    """For each value, what those above it have, and half of what equal ones have, over n."""
    below_or_equal, below = (stats.rankdata(values, side).astype(int) for side in ("max", "min"))
    sums = np.append(0.0, np.cumsum(of[np.argsort(values, kind="stable")])) / len(values)
    return np.asarray(sums[-1] - (sums[below_or_equal] + sums[below - 1]) / 2)


# --- intervals and permutation tests of means, for many groups at once

NO_SPREAD = 1e-6  # standard deviation relative to the values; a smaller one may be rounding error
# In larger strata, permutations draw runs of neighbouring values, whose means keep all but ~1e-4 of
# their variance.
RUNS = 256
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


class Means(NamedTuple):
    """Means of independent examples, or weighted sums of such means, with what intervals need."""

    # estimate, error: (n,) with its standard error; NaN where undefined
    estimate: FloatArray
    error: FloatArray
    skewness: FloatArray  # (n,) of the estimate
    freedom: FloatArray  # (n,) degrees of freedom of the error
    least: FloatArray  # (n,) the smallest value, or weighted sum of these

    def intervals(
        self, high: float = np.inf, chosen: NDArray[np.bool_] | bool = True
    ) -> list[Interval | None]:
        """Intervals up to `high`; None without spread, and of what is not chosen."""
        known = np.isfinite(self.estimate) & (self.error > 0) & chosen
        with np.errstate(invalid="ignore"):
            lows, highs = self._ends()
            ends = zip(lows.tolist(), np.minimum(high, highs).tolist(), known, strict=True)
        return [Interval(first, second) if one else None for first, second, one in ends]

    def _ends(self) -> tuple[FloatArray, FloatArray]:
        """Both ends of the intervals.

        Of ten very skewed values the lower one can lie below all of them, even below 0. It is the
        smallest value then: simulated with seven laws and 10 to 30 values, it covers as often.
        """
        low, high = (self.estimate - self.error * self._student(side) for side in (1, -1))
        return np.maximum(low, self.least), high

    def _student(self, side: int) -> FloatArray:
        """The upper (1) or lower (-1) quantile of the error of an estimate over `error`.

        Student's, after the cubic transformation that takes the skewness of a studentised mean away
        (Hall 1992, "On the removal of skewness by transformation"). Sums of means have the same
        expansion, as their variance and its covariance with the estimate add up too.
        """
        skew = self.skewness
        with np.errstate(invalid="ignore", divide="ignore"):
            plain = side * student_quantile(self.freedom)
            bent = 3 / skew * (np.cbrt(1 + skew * (plain - skew / 6)) - 1)
        return np.where(np.abs(skew) < _FLOAT_NOISE**0.5, plain, bent)

    def take(self, which: slice | list[int]) -> "Means":
        """Some of the estimates."""
        return Means(*(one[which] for one in self))

    def summed(self, shares: FloatArray) -> "Means":
        """Weighted sums of every len(shares) estimates; those of weight 0 are ignored.

        Degrees of freedom are those of Satterthwaite 1946.
        """
        used = shares != 0
        mean, error, skewness, freedom, least = (
            one.reshape(-1, len(shares))[:, used] for one in self
        )
        errors = error * shares[used]
        whole = np.sqrt((errors**2).sum(axis=1))
        with np.errstate(invalid="ignore", divide="ignore"):
            parts = errors / whole[:, None]
            skewness = (parts**3 * skewness).sum(axis=1)
            freedom = 1 / (parts**4 / freedom).sum(axis=1)
        mean, least = mean @ shares[used], least @ shares[used]
        least = np.where((shares < 0).any(), -np.inf, least)  # of a difference: no bound
        return Means(mean, whole, np.asarray(skewness), np.asarray(freedom), least)

    def ratio(self, worst: int, best: int) -> Interval | None:
        """Interval of one estimate over another; None unless both are above 0 beyond chance.

        It is made of the intervals of both (Donner and Zou 2012, "Closed-form confidence intervals
        for functions of the normal mean and standard deviation": the method of variance estimates
        recovery), so that it is turned over where the groups change places. It does not account for
        choosing these two groups as the extremes; the permutation test does.
        """
        of = self.take([worst, best])
        if not ((of.estimate > 0).all() and (of.error >= 0).all() and of.error.any()):
            return None
        ends = (np.where(of.error > 0, end, of.estimate) for end in of._ends())
        (low, best_low), (high, best_high) = (1 - (1 - end / of.estimate) ** 2 for end in ends)
        if min(low, best_low) <= 0:
            return None
        ratio = of.estimate[0] / of.estimate[1]
        return Interval(
            float(ratio * low / (1 + np.sqrt(1 - low * best_high))),
            float(ratio * (1 + np.sqrt(1 - high * best_low)) / best_low),
        )


def means_by_cell(values: FloatArray, weights: IntArray, cells: IntArray, size: int) -> Means:
    """Means of values (n,), finite, by cell, with codes below size.

    weights: (n,) number of examples that have each value.
    """
    n = np.bincount(cells, weights, size).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(cells, weights * values, size) / n
        largest = np.full(size, np.finfo(np.float64).tiny)
        np.maximum.at(largest, cells, np.abs(values))
        apart = (values - mean[cells]) / largest[cells]  # powers that fit into floats
        square, cube = (np.bincount(cells, weights * apart**power, size) / n for power in (2, 3))
        square[np.sqrt(square) <= NO_SPREAD] = 0.0
        error = np.where(n >= 2, largest * np.sqrt(square / (n - 1)), np.nan)
        skewness = cube / square**1.5 * np.sqrt(n - 1) / np.maximum(n - 2, 1)  # without bias
        least = np.full(size, np.inf)
        np.minimum.at(least, cells, values)
        return Means(mean, error, np.where(square == 0, 0.0, skewness), n - 1, least)


@dataclass(frozen=True)
class SpreadTest:
    """Permutation test of the hypothesis that groups are exchangeable within strata."""

    # for the whole table: how often the most extreme group of a permutation is at least as extreme
    # as here
    p_value: float
    # (n_groups,) the same for each group, corrected for all groups tested (single-step maxT); None
    # where the group was not tested
    adjusted: tuple[float | None, ...]
    permutations: int  # number of permutations drawn


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

    values: (n,) finite; groups, strata: (n,) codes; tested: (n_groups,) which groups get a p-value,
    while the others only belong to the pool; rng: of the analysis, not of training; weights: (n,)
    number of examples that have each value, default one each. None if fewer than two groups are
    tested, or if nothing varies within strata.
    """
    if tested.sum() < 2:
        return None
    weights = np.ones(len(values), np.int64) if weights is None else weights
    order = np.lexsort((groups, strata))
    ends = np.flatnonzero(np.diff(strata[order])) + 1
    each = (_stratum(values[part], weights[part], groups[part]) for part in np.split(order, ends))
    made = [one for one in each if one is not None]
    variance, total = np.zeros(len(tested)), np.zeros(len(tested))
    for one in made:
        variance[one.groups] += one.variances
        total[one.groups] += one.observed
    testable = tested & (variance > 0)
    if testable.sum() < 2:
        return None
    scale = np.sqrt(variance[testable])
    observed = np.abs(total[testable]) / scale
    work = sum(one.work for one in made)
    n_permutations = int(np.clip(_PERMUTED // work, _LEAST_PERMUTATIONS, _MOST_PERMUTATIONS))
    largest = np.empty(n_permutations)
    for number in range(n_permutations):
        sums = np.zeros(len(tested))
        for one in made:
            sums[one.groups] += one.permuted(rng)
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


class _Stratum(NamedTuple):
    """One stratum of a permutation test: its groups, and sums of their deviations from its mean.

    variances are of these sums under permutation; permuted draws such sums, at the cost of `work`
    shuffled examples.
    """

    groups: IntArray
    observed: FloatArray
    variances: FloatArray
    permuted: Callable[[np.random.Generator], FloatArray]
    work: int


def _stratum(values: FloatArray, weights: IntArray, groups: IntArray) -> _Stratum | None:
    """The stratum of some values, ordered by group; None for one group or without spread."""
    present, first = np.unique(groups, return_index=True)
    n, work = int(weights.sum()), _DRAW_COST * len(present) * RUNS
    shuffled = n <= work
    if shuffled:
        values, groups = np.repeat(values, weights), np.repeat(groups, weights)
        first, weights = np.searchsorted(groups, present), np.ones(n, np.int64)
    counts = np.add.reduceat(weights, first)
    deviations = values - np.average(values, weights=weights)
    spread = float((weights * deviations) @ deviations)
    if len(present) < 2 or np.sqrt(spread / n) <= NO_SPREAD * np.abs(values).max():
        return None
    if shuffled:
        # Single precision shuffles twice as fast; the observed sums are of the same rounded values.
        single = deviations.astype(np.float32)
        sums = partial(np.add.reduceat, indices=first, dtype=np.float64)
        observed = sums(single)

        def permuted(rng: np.random.Generator) -> FloatArray:
            rng.shuffle(single)
            return np.asarray(sums(single))
    else:  # many examples in few groups: runs of neighbours, drawn without replacement
        by_value = np.argsort(deviations, kind="stable")
        run, through = np.empty(len(values), dtype=np.int64), np.cumsum(weights[by_value])
        run[by_value] = (through - weights[by_value]) * RUNS // n
        run = np.unique(run, return_inverse=True)[1]
        sizes = np.bincount(run, weights).astype(np.int64)
        means = np.bincount(run, weights=weights * deviations) / sizes
        spread = float(sizes @ means**2)
        observed = np.add.reduceat(weights * means[run], first)

        def permuted(rng: np.random.Generator) -> FloatArray:
            found, left = np.empty(len(counts)), sizes.copy()
            for index, count in enumerate(counts[:-1].tolist()):
                drawn = rng.multivariate_hypergeometric(left, count, method="marginals")
                left -= drawn
                found[index] = drawn @ means
            found[-1] = left @ means
            return found

    variances = spread / (n - 1) * counts * (1 - counts / n)
    return _Stratum(present, observed, variances, permuted, n if shuffled else work)
