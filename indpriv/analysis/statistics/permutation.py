"""Permutation tests of the spread of group means, for many groups at once. Sensitive."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv.analysis.statistics.bootstrap import NO_SPREAD, RUNS

_MOST_PERMUTATIONS, _LEAST_PERMUTATIONS = 999, 199
# Examples that one test may shuffle (half a second on one core); more data get fewer permutations.
_PERMUTED = 2e7
_DRAW_COST = 4  # one hypergeometric variable, in shuffled examples
_SAME = 1e-9  # relative; statistics this close are ties


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

    Args:
        values: (n,) finite.
        groups: (n,) codes.
        strata: (n,) codes.
        tested: (n_groups,) which groups get a p-value; the others only belong to the pool.
        rng: a generator of the analysis, not of training.
        weights: (n,) number of examples that have each value; default one each.

    Returns:
        None if fewer than two groups are tested, or if nothing varies within strata.
    """
    if tested.sum() < 2:
        return None
    weights = np.ones(len(values), np.int64) if weights is None else weights
    blocks = _blocks(values, weights, groups, strata)
    variance = np.zeros(len(tested))
    for block in blocks:
        np.add.at(variance, block.groups, block.variances)
    total = np.zeros((1, len(tested)))
    for block in blocks:
        total[0, block.groups] += block.observed
    testable = tested & (variance > 0)
    if testable.sum() < 2:
        return None
    scale = np.sqrt(variance[testable])
    observed = np.abs(total[0, testable]) / scale
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


def _blocks(
    values: FloatArray, weights: IntArray, groups: IntArray, strata: IntArray
) -> list[_Block]:
    order = np.lexsort((groups, strata))
    values, weights, groups = values[order], weights[order], groups[order]
    strata, made = strata[order], []
    for part in np.split(np.arange(len(values)), np.flatnonzero(np.diff(strata)) + 1):
        block = _block(values[part], weights[part], groups[part])
        if block is not None:
            made.append(block)
    return made


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
