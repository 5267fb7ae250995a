"""Intervals of means over runs."""

import numpy as np

from indpriv._types import FloatArray
from indpriv.analysis.statistics import Interval, student_quantile


def student_interval(
    values: FloatArray, low: float = -np.inf, high: float = np.inf
) -> Interval | None:
    """95 % interval of the mean of independent values (n,), cut to [low, high].

    None for fewer than two values.
    """
    n = len(values)
    if n < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / np.sqrt(n)
    width = float(student_quantile(n - 1)) * error
    return Interval(float(max(low, mean - width)), float(min(high, mean + width)))
