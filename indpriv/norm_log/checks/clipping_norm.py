"""Compare the clipping norms of the steps with one private release that they were set to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from indpriv._formatting import format_epsilon
from indpriv.norm_log.evidence import PRIVATE_CLIPPING_NORM, Check
from indpriv.norm_log.step_settings import StepSettings


def private_clipping_norm(settings: StepSettings, starts: Sequence[int], epsilon: float) -> Check:
    """Whether all steps were clipped at one norm, the only one that epsilons count.

    Args:
        settings: of all steps, at least one.
        starts: first step of every session.
        epsilon: of the release.
    """
    norms = settings.max_grad_norm
    sessions = [part for part in np.split(norms, sorted(starts)) if len(part)]
    cost = f"epsilon {format_epsilon(epsilon)}"
    if any(np.ptp(part) for part in sessions):
        return PRIVATE_CLIPPING_NORM.not_checked(
            f"max_grad_norm moved from {norms[0]:.6g}: every epsilon includes {cost} for a private "
            "release, and that it moved by a public law is on trust"
        )
    if np.ptp(norms):
        return PRIVATE_CLIPPING_NORM.failed(
            f"sessions were clipped at {', '.join(f'{part[0]:.6g}' for part in sessions)}: each is "
            f"a private release, and epsilons include {cost} for one of them"
        )
    return PRIVATE_CLIPPING_NORM.passed(
        f"all {len(norms):,} steps were clipped at {norms[0]:.6g}, and every epsilon includes "
        f"{cost} for its release (that it is private is declared)"
    )
