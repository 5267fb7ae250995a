"""Exact confidence intervals of rates."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincinv

from indpriv._arrays import FloatArray
from indpriv.errors import InputError


def clopper_pearson(
    successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95
) -> tuple[FloatArray, FloatArray]:
    """Exact two-sided intervals of binomial rates (Clopper and Pearson 1934); [0, 1] of no trials.

    Args:
        successes: whole numbers.
        trials: whole numbers, of a shape that broadcasts with them.
        confidence: of each interval by itself.

    Returns:
        lower and upper ends, of the broadcast shape.
    """
    k, n = np.broadcast_arrays(
        np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    )
    if ((k < 0) | (k > n)).any():
        bad = np.argmax((k < 0) | (k > n))
        raise InputError(
            f"{k.flat[bad]:g} successes in {n.flat[bad]:g} trials is not a possible outcome"
        )
    tail = (1 - confidence) / 2
    low = np.where(k == 0, 0.0, betaincinv(np.maximum(k, 1), n - k + 1, tail))
    high = np.where(k == n, 1.0, betaincinv(k + 1, np.maximum(n - k, 1), 1 - tail))
    return low, high
