"""Scores as `indpriv.leakage.leak` gives them, for tests without a model."""

import numpy as np

from indpriv import AttackScores


def scores(named, mu, *, errors=None):
    """As leak gives them."""
    n = len(named)
    errors = np.zeros(2 * n) if errors is None else errors
    details = {
        "error": errors,
        "identified": np.r_[named, np.zeros(n)].astype(float),
        "label_found": np.full(2 * n, np.nan),
        "iterations": np.ones(2 * n),
        "chance": np.full(2 * n, 0.01),
        "mu": np.full(2 * n, mu),
    }
    member = np.repeat([True, False], n)
    return AttackScores(-errors, member, "an attack", adversary="gradients", details=details)
