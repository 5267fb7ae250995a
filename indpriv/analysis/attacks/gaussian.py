"""Gaussian differential privacy: epsilon of the mechanism that adds N(0, 1) to a shift of mu."""

import numpy as np

from indpriv.accountant.pld.closed_form import gaussian_delta, invert_delta


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at delta of the Gaussian mechanism with shift mu, at most the truth; 0 for mu <= 0.

    Balle and Wang 2018 (arXiv:1805.06530), Theorem 8.
    """
    if mu <= 0:
        return 0.0
    lower, _ = invert_delta(lambda epsilon, _: gaussian_delta(epsilon, mu), np.array([delta]))
    return float(lower[0])
