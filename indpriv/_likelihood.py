"""What one noisy update says about one example: the log-likelihood ratio of "in" and "out"."""

import numpy as np

from indpriv._types import ArrayLike, FloatArray


def log_likelihood_ratio(
    score: ArrayLike, *, relative_norm: ArrayLike, noise_multiplier: float, sample_rate: float
) -> FloatArray:
    """Log-likelihood ratio (n,) of one step of DP-SGD: positive where it speaks for "in". In nats.

    The attacker subtracts from the noisy sum what all other examples contributed, and projects the
    rest on the example's gradient. In standard deviations of the noise, this score (n,) is N(0, 1)
    without the example. With it, it is N(relative_norm / noise_multiplier, 1) in the steps that
    drew the example, at rate sample_rate, and N(0, 1) in the others. By Neyman and Pearson no test
    is more powerful than the sum of these ratios over the steps.

    relative_norm: (n,) or one: norm of the clipped gradient over max_grad_norm.

    >>> log_likelihood_ratio([2.0], relative_norm=1.0, noise_multiplier=1.0, sample_rate=1.0)
    array([1.5])
    """
    shift = np.asarray(relative_norm, dtype=np.float64) / noise_multiplier
    drawn = np.asarray(score, dtype=np.float64) * shift - shift**2 / 2
    if sample_rate == 1:
        return drawn
    ratio: FloatArray = np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + drawn)
    return ratio
