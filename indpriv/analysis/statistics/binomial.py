"""Exact confidence intervals of rates."""

from scipy.special import betaincinv

from indpriv.analysis.statistics.bootstrap import CONFIDENCE, Interval
from indpriv.errors import InputError


def clopper_pearson(successes: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Exact two-sided interval of a binomial rate (Clopper and Pearson 1934); [0, 1] of no trials.

    Args:
        successes: a whole number.
        trials: a whole number.
        confidence: of this interval by itself.

    Raises:
        InputError: fewer than no successes, or more than trials.
    """
    if not 0 <= successes <= trials:
        raise InputError(f"{successes:g} successes in {trials:g} trials is not a possible outcome")
    tail, failures = (1 - confidence) / 2, trials - successes
    low = 0.0 if successes == 0 else betaincinv(successes, failures + 1, tail)
    high = 1.0 if failures == 0 else betaincinv(successes + 1, failures, 1 - tail)
    return Interval(float(low), float(high))
