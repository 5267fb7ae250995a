"""Student's interval of a mean."""

import numpy as np
from scipy import stats

from indpriv._arrays import FloatArray
from indpriv.analysis.statistics.bootstrap import CONFIDENCE, Interval


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
    width = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    return Interval(float(max(low, mean - width)), float(min(high, mean + width)))
