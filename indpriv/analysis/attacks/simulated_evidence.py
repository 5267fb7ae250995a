"""Simulated evidence: what the strongest attacker would see of a mechanism, by random numbers."""

import numpy as np
from numpy.typing import ArrayLike

from indpriv._arrays import BoolArray, FloatArray
from indpriv._likelihood import log_likelihood_ratio
from indpriv.norm_log.step_settings import StepSettings


def simulated_evidence(
    settings: StepSettings,
    relative_norms: ArrayLike,
    member: BoolArray,
    rng: np.random.Generator,
) -> FloatArray:
    """Sums over all steps of the log-likelihood ratio, for independent examples.

    Args:
        settings: of the steps.
        relative_norms: norms of clipped gradients over max_grad_norm: (total_steps, n), or
            anything that broadcasts to it.
        member: (n,) which examples take part.
        rng: draws batches and noise.

    Returns:
        (n,) in nats.
    """
    norms = np.broadcast_to(
        np.asarray(relative_norms, dtype=np.float64), (len(settings), len(member))
    )
    evidence = np.zeros(len(member))
    for step, row in enumerate(norms):
        setting = settings.at(step)
        drawn = member & (rng.random(len(member)) < setting.sample_rate)
        shift = row / setting.noise_multiplier
        evidence += log_likelihood_ratio(
            rng.standard_normal(len(member)) + drawn * shift,
            relative_norm=row,
            noise_multiplier=setting.noise_multiplier,
            sample_rate=setting.sample_rate,
        )
    return evidence
