"""Differentially private mechanisms over a public grid, with OpenDP's noise.

What they return is releasable. Data enter as counts of people at each value of a public, increasing
grid, of which one person changes one by one. Noise and selection are OpenDP's: exact integer
arithmetic on randomness of the operating system. There is no seed: what `simulate_quantile` draws
for reproducible runs protects nobody.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np

from indpriv._checks import check_number
from indpriv._facts import refused
from indpriv._types import ArrayLike, FloatArray, IntArray
from indpriv.errors import InputError, check_installed
from indpriv.norm_log.fields import check_norms

# Values that an answer can take; more cost time and, by the logarithm of their number, accuracy
N_CELLS = 5000
# Of quantile descent: its rounds, as in Yu et al. 2023, by how much the logarithm of the first
# guess moves per error in share, and the factor of each further step. Constant steps of 0.5 err by
# more over six laws (tests/release/test_mechanisms.py).
ROUNDS, FIRST_STEP, DECAY = 20, 2.0, 0.85
_BRANCHES, _LEAVES = 16, 256  # of the tree of counts: a root and two layers
_NORM_RANGE = (1e-4, 1e6)  # of the norms that an answer can be; neighbours differ by 0.5 %
_HALF = Fraction(1, 2)
_SLACK = 1 + 2.0**-40  # on noise scales: OpenDP rounds its privacy maps up


@lru_cache
def opendp() -> Any:
    """OpenDP, which takes time to import; MissingExtraError where it is not installed."""
    check_installed("Private releases", "release", "opendp")
    import opendp.prelude as dp

    dp.enable_features("contrib")
    return dp


@dataclass(frozen=True)
class LaplaceNoise:
    """Discrete Laplace noise: adding it to values costs (epsilon, 0)."""

    epsilon: float

    @property
    def unit_error(self) -> float:
        """Expected absolute value of the noise at sensitivity 1."""
        return 1 / self.epsilon

    def add(self, values: Sequence[int], sensitivity: int) -> IntArray:
        """Values plus noise; one person changes their L1 norm by `sensitivity` at most."""
        dp = opendp()
        space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l1_distance(T="i64")
        laplace = dp.m.make_laplace(*space, scale=sensitivity / self.epsilon * _SLACK)
        _check_cost(laplace.map(sensitivity), self.epsilon)
        return np.array(laplace([int(value) for value in values]), dtype=np.int64)


@dataclass(frozen=True)
class GaussianNoise:
    """Discrete Gaussian noise; adding it costs 1 / (2 scale^2) of zero-concentrated privacy."""

    scale: float

    @property
    def unit_error(self) -> float:
        """Expected absolute value of the noise at sensitivity 1."""
        return self.scale * math.sqrt(2 / math.pi)

    def add(self, values: Sequence[int], sensitivity: int) -> IntArray:
        """Values plus noise; one person changes their Euclidean norm by `sensitivity` at most."""
        dp = opendp()
        space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
        gaussian = dp.m.make_gaussian(*space, scale=sensitivity * self.scale * _SLACK)
        _check_cost(gaussian.map(float(sensitivity)), 0.5 / self.scale**2)
        return np.array(gaussian([int(value) for value in values]), dtype=np.int64)


Noise = LaplaceNoise | GaussianNoise  # for one share of the budget


def gaussian_scale(epsilon: float, delta: float) -> float:
    """Smallest scale at which an answer of sensitivity 1 is private; of k answers sqrt(k) times."""
    dp = opendp()

    def private(scale: float) -> Any:
        gaussian = dp.m.make_gaussian(
            dp.atom_domain(T="i64"), dp.absolute_distance(T="f64"), scale=scale
        )
        return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(gaussian), delta)

    return float(dp.binary_search_param(private, d_in=1.0, d_out=(epsilon, delta)))


def rank_distances(counts: IntArray, quantile: Fraction) -> IntArray:
    """How far each cell is from the quantile in rank, in people times the quantile's denominator.

    With `below` people below a cell and `within` at or below it, that is max(0, below - quantile *
    n, quantile * n - within), which one person moves by at most max(quantile, 1 - quantile).
    OpenDP's own score avoids the very value that is the quantile where many people share it.
    """
    part, whole = quantile.numerator, quantile.denominator
    within = np.cumsum(counts)
    target = part * within[-1]
    distances: IntArray = np.maximum(
        0, np.maximum(whole * (within - counts) - target, target - whole * within)
    )
    return distances


def select_quantile(counts: IntArray, quantile: Fraction, epsilon: float) -> int:
    """Index of a cell at about this quantile, by private selection: costs (epsilon, 0).

    The exponential mechanism (Smith 2011) on `rank_distances` in its better form, permute-and-flip
    (McKenna and Sheldon 2020, arXiv:2010.12603), through OpenDP's noisy maximum.
    """
    sensitivity, scale = _selection_noise(quantile, epsilon)
    dp = opendp()
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.linf_distance(T="i64")
    select = dp.m.make_noisy_max(*space, dp.max_divergence(), scale=scale, negate=True)
    _check_cost(select.map(sensitivity), epsilon)
    return int(select(rank_distances(counts, quantile).tolist()))


def simulate_quantile(counts: IntArray, quantile: Fraction, epsilon: float, seed: int) -> int:
    """A cell by the law of `select_quantile`, for runs that are reproducible and not private.

    The noisy maximum with exponential noise is permute-and-flip (Ding et al. 2021,
    arXiv:2105.07260).
    """
    _, scale = _selection_noise(quantile, epsilon)
    noise = np.random.default_rng(seed).exponential(scale, len(counts))
    return int(np.argmin(rank_distances(counts, quantile) - noise))


def _selection_noise(quantile: Fraction, epsilon: float) -> tuple[int, float]:
    """Sensitivity of `rank_distances`, and the scale of noise that a selection by it needs."""
    sensitivity = max(quantile.numerator, quantile.denominator - quantile.numerator)
    return sensitivity, 2 * sensitivity / epsilon * _SLACK


def selection_errors(quantile: Fraction, n_cells: int, epsilon: float) -> tuple[float, float]:
    """Expected error of `select_quantile` in people: for values close together, and for any data.

    Of the exponential mechanism, which permute-and-flip never exceeds (McKenna and Sheldon 2020,
    Theorem 2): a Laplace law of scale 2 * sensitivity / epsilon where cells hold few people.
    """
    scale = 2 * float(max(quantile, 1 - quantile)) / epsilon
    return scale, scale * math.log(n_cells)


def noisy_distribution(counts: IntArray, noise: LaplaceNoise) -> tuple[FloatArray, IntArray]:
    """(n_leaves,) noisy numbers of people at or below each leaf, and the last cell of each.

    From a tree of counts made consistent (Hay et al. 2010, arXiv:0904.0942), in each layer of which
    a person is counted once. The numbers increase.
    """
    starts = np.arange(0, len(counts), merged_cells(len(counts)))
    leaves = np.add.reduceat(counts, starts)
    dp = opendp()
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l1_distance(T="i64")
    tree = dp.t.make_b_ary_tree(*space, leaf_count=len(leaves), branching_factor=_BRANCHES)
    # OpenDP passes it 32 bits
    consistent = dp.t.make_consistent_b_ary_tree(branching_factor=_BRANCHES, TIA="i32", TOA="f64")
    noisy = consistent(noise.add(tree(leaves.tolist()), tree.map(1)).tolist())
    cumulative = np.maximum.accumulate(np.maximum(np.cumsum(noisy[: len(leaves)]), 0.0))
    return cumulative, np.append(starts[1:], len(counts)) - 1


def merged_cells(n_cells: int) -> int:
    """The number of grid cells in one leaf of the tree of counts."""
    return math.ceil(n_cells / _LEAVES)


def distribution_errors(n_cells: int, noise: LaplaceNoise) -> tuple[float, float]:
    """Expected error in people of a quantile of `noisy_distribution`: typical, and for any data.

    A cumulative count sums at most (branches - 1) nodes of each layer below the root. Laplace noise
    of scale b has a log moment generating function of at most 2 b^2 t^2 for t up to 1 / (sqrt(2)
    b); the bound is twice that of the largest of them, since the quantile is of a noisy total.
    """
    leaves = math.ceil(n_cells / merged_cells(n_cells))
    layers = 1 + max(1, math.ceil(math.log(leaves, _BRANCHES) - 1e-9))
    scale = layers * noise.unit_error
    nodes = (_BRANCHES - 1) * (layers - 1)
    logarithm = math.log(2 * leaves)
    slope = min(math.sqrt(logarithm / (2 * nodes)), 1 / math.sqrt(2)) / scale
    largest = logarithm / slope + 2 * nodes * scale**2 * slope
    typical = math.sqrt(2 / math.pi * nodes) * scale  # half the nodes, each of variance 2 scale^2
    return typical, 2 * largest


def descend_to_quantile(
    counts: IntArray,
    grid: FloatArray,
    quantile: Fraction,
    size: float,
    answer: Callable[[int], float],
) -> float:
    """A value at about this quantile, by noisy gradient descent in its logarithm.

    Andrew et al. 2021 (arXiv:1905.03871): each round counts how many more people are at or below
    the guess than above it. size: noisy number of people; `answer` adds the noise of one round, and
    one person changes its argument by 1.
    """
    within = np.cumsum(counts)
    value = float(grid[-1]) / 2
    for turn in range(ROUNDS):
        cell = int(np.searchsorted(grid, value, side="right")) - 1
        below = int(within[cell]) if cell >= 0 else 0
        share = 0.5 + answer(2 * below - int(within[-1])) / (2 * size)
        error = min(max(share, 0.0), 1.0) - float(quantile)
        value *= math.exp(-FIRST_STEP * DECAY**turn * error)
        value = min(value, float(grid[-1]))
    return value


def noisy_sums(counts: IntArray, noise: Noise) -> tuple[int, int]:
    """Noisy sums of x and n_cells - x, x a cell from 1; of sensitivity n_cells together."""
    cells = np.arange(1, len(counts) + 1)
    sums = [int(counts @ cells), int(counts @ (len(counts) - cells))]
    low, high = noise.add(sums, len(counts)).tolist()
    return low, high


def noisy_count(counts: IntArray, noise: Noise) -> int:
    """Noisy number of people."""
    return int(noise.add([int(counts.sum())], 1)[0])


def norm_grid(unit: float = 1.0) -> FloatArray:
    """(N_CELLS,) public norms in equal ratios, from 1e-4 to 1e6 times a public unit."""
    return np.asarray(unit * np.geomspace(*_NORM_RANGE, N_CELLS))


def to_norm_cells(norms: FloatArray, grid: FloatArray) -> IntArray:
    """(n,) cell of each norm on a grid, rounded up; norms beyond its end are in its last cell."""
    found: IntArray = np.minimum(np.searchsorted(grid, norms), len(grid) - 1).astype(np.int64)
    return found


class ReleasedNorm(float):
    """A clipping norm that carries what its release cost, which a Recorder adds by itself."""

    clipping_norm_epsilon = 0.0


def private_median_norm(
    norms: ArrayLike, *, epsilon: float, seed: int | None = None
) -> ReleasedNorm:
    """About the median of gradient norms, to clip at: costs (epsilon, 0). Releasable at that.

    Yu et al. 2023 (arXiv:2206.02617v7, footnote 3) clip at this median of the norms at the initial
    parameters, and add its cost to that of training.

    The candidates are `norm_grid()`, whatever the norms, and the mechanism is that of
    `indpriv publish quantiles`. The choice is epsilon-differentially private if each norm depends
    on its own example alone: parameters that were not trained on this data, and no layer that mixes
    examples. k rows of one person cost k * epsilon, and a replaced row 2 * epsilon.

    Args:
        norms: (n,) norms before clipping, e.g. `indpriv.recording.per_example_gradient_norms`;
            infinity counts as the largest candidate.
        epsilon: of this release, above 0. A Recorder adds it to every epsilon of a run of which
            the returned norm is max_grad_norm; a number made of it: `clipping_norm_epsilon=`.
        seed: draws from the same law by a seeded generator instead, for a reproducible run. Such a
            release protects nobody.

    Returns:
        one of the candidates, which are 0.5 % apart; its rank is off by about 1 / epsilon people,
        and by those between it and the next candidate.

    Raises:
        InputError: no norms, negative ones or NaN; an epsilon that is not finite and above 0.

    >>> norms = np.geomspace(0.5, 50, 20_001)  # their median is 5
    >>> bool(4.8 < private_median_norm(norms, epsilon=1.0) < 5.2)
    True
    """
    values = np.asarray(norms, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise InputError(f"norms has shape {values.shape}; pass (n,) norms of at least one example")
    check_norms(values, np.arange(len(values)))
    epsilon = check_number("epsilon", epsilon, "(0, inf)", "pass e.g. 0.1")
    grid = norm_grid()
    counts = np.bincount(to_norm_cells(values, grid), minlength=len(grid))
    draw = select_quantile if seed is None else partial(simulate_quantile, seed=seed)
    norm = ReleasedNorm(grid[draw(counts, _HALF, epsilon)])
    norm.clipping_norm_epsilon = epsilon
    return norm


def _check_cost(charged: float, share: float) -> None:
    """Check that OpenDP's own privacy map charges no more than the share: else a defect."""
    if not charged <= share:
        raise refused("refusal.source", "charged", charged=charged, share=share)
