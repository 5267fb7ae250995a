"""A clipping norm by the data: the private median of gradient norms at the initial parameters.

Yu et al. 2023 (arXiv:2206.02617v7, footnote 3) clip at this median and add its cost to that of
training. The norms are sensitive; what `private_median_norm` returns is releasable at its epsilon.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from indpriv._arrays import FloatArray, IntArray
from indpriv.errors import InputError
from indpriv.norm_log.validation import check_norms
from indpriv.release.mechanisms import N_CELLS, select_quantile, simulate_quantile

# Of the norms that an answer can be, over a public unit; neighbours differ by 0.5 %
_NORM_RANGE = (1e-4, 1e6)
_HALF = Fraction(1, 2)


def norm_grid(unit: float = 1.0) -> FloatArray:
    """(N_CELLS,) public norms in equal ratios, from 1e-4 to 1e6 times a public unit."""
    return np.asarray(unit * np.geomspace(*_NORM_RANGE, N_CELLS))


def to_norm_cells(norms: FloatArray, grid: FloatArray) -> IntArray:
    """(n,) cell of each norm on a grid, rounded up; norms beyond its end are in its last cell."""
    found: IntArray = np.minimum(np.searchsorted(grid, norms), len(grid) - 1).astype(np.int64)
    return found


def private_median_norm(norms: ArrayLike, *, epsilon: float, seed: int | None = None) -> float:
    """About the median of gradient norms, to clip at: costs (epsilon, 0).

    The candidates are `norm_grid()`, whatever the norms, and the mechanism is that of
    `indpriv release`: private selection by distance in rank, with OpenDP's noise. Adding or
    removing one norm moves each distance by at most half a rank, so the choice is
    epsilon-differentially private if each norm depends on its own example alone: parameters that
    were not trained on this data, and no layer that mixes examples. k rows of one person cost
    k * epsilon, and a replaced row 2 * epsilon.

    Args:
        norms: (n,) norms before clipping, e.g. `indpriv.recording.per_example_gradient_norms`;
            infinity counts as the largest candidate.
        epsilon: of this release, above 0. Pass it on as `Recorder(clipping_norm_epsilon=)`, which
            adds it to every epsilon of the run.
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
    if not (np.isfinite(epsilon) and epsilon > 0):
        raise InputError(f"epsilon={epsilon} is not a finite number above 0; pass e.g. 0.1")
    grid = norm_grid()
    counts = np.bincount(to_norm_cells(values, grid), minlength=len(grid))
    if seed is None:
        cell = select_quantile(counts, _HALF, epsilon)
    else:
        cell = simulate_quantile(counts, _HALF, epsilon, seed)
    return float(grid[cell])
