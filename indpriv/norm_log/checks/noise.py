"""Is the noise that was added the noise that is accounted?"""

from __future__ import annotations

import math

from indpriv.norm_log.evidence import NOISE, Check
from indpriv.norm_log.session_counts import NoiseCounts

_CHANCE = 1e-9  # that the variance of sound noise is as small; tensors are at most some thousands
_DEVIATIONS = 6.0  # of a product, which sound noise exceeds once in 10^9
_SMALL_DEFICIT = 0.002  # of the variance: rounding, or noise a thousandth too small
_MANY_VALUES = 10**5  # with fewer, the mean fourth power is not nearly normal
_MORE_NOISE = 0.02  # of the variance: some parameters may have more than accounted, which is safe
_SMALL_EXCESS = 0.01  # of the mean fourth power
_FOURTH = 3.0  # mean fourth power of standard normal numbers, whose variance is 96


def noise_check(noise: NoiseCounts | None) -> Check:
    """Compare the noise of one session with independent normal noise of the accounted size."""
    if noise is None:
        return NOISE.not_checked(
            "the noise that training added could not be measured (a device without float64, an "
            "add_noise that keeps no clipped sum, or half precision, which hides little)"
        )
    if fault := _fault(noise):
        return NOISE.failed(f"{fault}: epsilons rest on noise that was not added")
    error = math.sqrt(2 / noise.values)
    return NOISE.passed(
        f"variance {noise.variance:.4f} of what is accounted (standard error {error:.1g}), in "
        f"{noise.values:,} values; not less in any parameter, not repeated, and unrelated to the "
        "gradients"
    )


def _fault(noise: NoiseCounts) -> str:
    """What is wrong with the noise; "" if nothing is."""
    if _too_small(noise.variance, noise.values):
        return f"the variance of the noise is {noise.variance:.4f} of what is accounted"
    if _too_small(noise.least_variance, noise.least_values):
        return (
            f"the noise of one parameter has {noise.least_variance:.4f} of the variance that is "
            "accounted"
        )
    if abs(noise.along_sum) > _DEVIATIONS:
        return (
            f"the noise depends on the gradients ({noise.along_sum:+.0f} standard deviations along "
            "their sum)"
        )
    for z, other in ((noise.previous, "the previous"), (noise.first, "the first")):
        if abs(z) > _DEVIATIONS:
            return (
                f"the noise of a step is correlated with that of {other} step ({z:+.0f} standard "
                "deviations), so anyone who compares the updates can subtract some of it"
            )
    if not _is_normal(noise):
        return (
            f"the noise is not normal (mean fourth power {noise.fourth_moment:.3f} instead of 3), "
            "as where some coordinates get less"
        )
    return ""


def _is_normal(noise: NoiseCounts) -> bool:
    """By the fourth power, unless there are few values or more noise than accounted."""
    if noise.values < _MANY_VALUES or noise.variance > 1 + _MORE_NOISE:
        return True
    excess = abs(noise.fourth_moment / noise.variance**2 - _FOURTH)
    return excess <= max(_SMALL_EXCESS, _DEVIATIONS * math.sqrt(96 / noise.values))


def _too_small(variance: float, values: int) -> bool:
    from scipy.special import gammainc  # takes longer to import than the rest of the audit side

    if 1 - variance <= _SMALL_DEFICIT:
        return False
    return bool(gammainc(values / 2, values * variance / 2) < _CHANCE)  # of chi squared
