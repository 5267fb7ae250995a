"""Noise, clipping norm and sampling rate of every step of a run, before it trains. Public."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import get_privacy_spent
from opacus.accountants.utils import get_noise_multiplier

from audits.training.config import TrainingConfig
from audits.training.config.schedules import Schedule, values_of
from indpriv._types import FloatArray, IntArray
from indpriv.accountant.steps import StepKinds
from indpriv.errors import InputError
from indpriv.norm_log.fields import SETTING_NAMES, StepSettings

_EPSILON_TOLERANCE = 1e-3  # the noise gives an epsilon below the target by at most this
_MOST_FACTOR = 2.0**20
_ORDERS = np.array(RDPAccountant.DEFAULT_ALPHAS, dtype=np.float64)


def steps_per_epoch(settings: TrainingConfig, n_examples: int) -> int:
    """Steps that Opacus takes in an epoch.

    It samples at 1 / ceil(n / batch_size). For some lengths, float division makes it take one step
    fewer.

    Raises:
        InputError: fewer examples than a batch.
    """
    if settings.batch_size > n_examples:
        raise InputError(
            f"batch_size={settings.batch_size:,} is larger than the training set of {n_examples:,} "
            "examples (after any cap on rows): every step would train on all of them, without "
            f"amplification by sampling; lower batch_size to at most {n_examples:,}"
        )
    return int(1 / (1 / math.ceil(n_examples / settings.batch_size)))


def with_noise(settings: TrainingConfig, n_examples: int) -> TrainingConfig:
    """The same training with noise in place of target_epsilon, chosen for n_examples.

    Raises:
        InputError: no noise reaches the target.
    """
    # A median need not be drawn yet: noise is in proportion to it.
    of_steps = settings.with_clipping_norm(1.0)
    target = of_steps.target_epsilon
    if target is None:
        return settings
    per_epoch = steps_per_epoch(settings, n_examples)
    std, multiplier = settings.noise_std, settings.noise_multiplier
    if std is None and multiplier is None:
        noise = _noise_for(settings, target, per_epoch)
        return replace(settings, target_epsilon=None, noise_multiplier=noise)
    plan = planned_steps(of_steps, settings.total_steps(per_epoch), 1 / per_epoch)
    factor = _factor(plan, target, settings.delta)
    return replace(
        settings,
        target_epsilon=None,
        noise_std=std.times(factor) if isinstance(std, Schedule) else None,
        noise_multiplier=multiplier.times(factor) if isinstance(multiplier, Schedule) else None,
    )


def plan_of(settings: TrainingConfig, n_examples: int) -> StepSettings:
    """Settings of every step of a training whose noise is known, as far as stop_at_epsilon.

    Raises:
        InputError: the first step spends more.
    """
    per_epoch = steps_per_epoch(settings, n_examples)
    plan = planned_steps(settings, settings.total_steps(per_epoch), 1 / per_epoch)
    limit = settings.stop_at_epsilon
    if limit is None:
        return plan
    within, beyond = 0, len(plan) + 1
    while beyond - within > 1:
        middle = (within + beyond) // 2
        epsilon = worst_case_epsilon(plan.noise_multiplier[:middle], 1 / per_epoch, settings.delta)
        within, beyond = (middle, beyond) if epsilon <= limit else (within, middle)
    if within == 0:
        raise InputError(
            f"stop_at_epsilon={limit:g} is spent by the first step; choose a larger one, or more "
            "noise"
        )
    columns = {name: getattr(plan, name)[:within] for name in SETTING_NAMES}
    return StepSettings(**columns)


def planned_steps(settings: TrainingConfig, total_steps: int, sample_rate: float) -> StepSettings:
    """Settings of every step, with the noise as it is given."""
    if settings.max_grad_norm == "median":
        raise InputError("the median of the norms is not drawn yet; call with_clipping_norm first")
    clip = values_of(settings.max_grad_norm, total_steps)
    noise: FloatArray
    if settings.noise_multiplier is not None:
        noise = values_of(settings.noise_multiplier, total_steps)
    elif settings.noise_std is not None:
        noise = values_of(settings.noise_std, total_steps) / clip
    else:
        raise InputError("the training has no noise yet; call with_noise first")
    return StepSettings.from_values(total_steps, noise, clip, sample_rate)


def worst_case_epsilon(noise_multipliers: FloatArray, sample_rate: float, delta: float) -> float:
    """Epsilon of Opacus's RDP accountant for these steps (n_steps,), at its orders.

    Opacus takes minutes for a thousand different settings. Here, divergences of very many are
    interpolated, which overstates epsilon by about 1e-6.
    """
    return _epsilon(*_nodes(noise_multipliers, sample_rate), delta)


def epsilons_after(steps: IntArray, plan: StepSettings, delta: float) -> FloatArray:
    """`worst_case_epsilon` after the first steps[i] steps of a plan; steps (n,) ascends."""
    rdp, found, done = np.zeros(len(_ORDERS)), [], 0
    for end in steps.tolist():
        if end > done:
            nodes, count = _nodes(plan.noise_multiplier[done:end], plan.at(done).sample_rate)
            rdp, done = rdp + nodes.divergences(_ORDERS) @ count, end
        spent = get_privacy_spent(orders=_ORDERS, rdp=rdp, delta=delta)[0] if done else 0.0
        found.append(float(spent))
    return np.array(found)


def with_lost(plan: StepSettings, lost: int) -> StepSettings:
    """A plan after steps that a crash lost, at the least noise of the plan, wherever they were."""
    if not (lost and len(plan)):
        return plan
    least = int(np.argmin(plan.noise_multiplier))
    columns = {name: getattr(plan, name) for name in SETTING_NAMES}
    return StepSettings(
        **{name: np.concatenate([np.repeat(v[least], lost), v]) for name, v in columns.items()}
    )


def _nodes(noise_multipliers: FloatArray, sample_rate: float) -> tuple[StepKinds, FloatArray]:
    noise, count = np.unique(noise_multipliers, return_counts=True)
    return StepKinds(1 / noise, np.full(len(noise), sample_rate)), count.astype(np.float64)


def _epsilon(kinds: StepKinds, steps: FloatArray, delta: float) -> float:
    rdp = kinds.divergences(_ORDERS) @ steps
    return float(get_privacy_spent(orders=_ORDERS, rdp=rdp, delta=delta)[0])


def _factor(plan: StepSettings, target_epsilon: float, delta: float) -> float:
    """What a plan's noise is multiplied by, so that its epsilon is just below the target."""
    nodes, steps = _nodes(plan.noise_multiplier, plan.at(0).sample_rate)

    def epsilon(factor: float) -> float:
        scaled = replace(nodes, shift=nodes.shift / factor)
        return _epsilon(scaled, steps, delta)

    high = 1.0
    while epsilon(high) > target_epsilon:
        high *= 2
        if high > _MOST_FACTOR:
            raise _unreachable(target_epsilon, delta)
    low = high / 2
    while epsilon(low) <= target_epsilon and low > 1 / _MOST_FACTOR:
        low, high = low / 2, low
    while target_epsilon - epsilon(high) > _EPSILON_TOLERANCE:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(middle) < target_epsilon else (middle, high)
    return high


def _noise_for(settings: TrainingConfig, target_epsilon: float, per_epoch: int) -> float:
    """The constant noise multiplier that reaches the target epsilon."""
    try:
        noise_multiplier: float = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=settings.delta,
            sample_rate=1 / per_epoch,
            steps=settings.total_steps(per_epoch),
            accountant="rdp",
            epsilon_tolerance=_EPSILON_TOLERANCE,
        )
    except ValueError as error:
        raise _unreachable(target_epsilon, settings.delta) from error
    return noise_multiplier


def _unreachable(target_epsilon: float, delta: float) -> InputError:
    return InputError(
        f"target_epsilon={target_epsilon} cannot be reached at delta={delta:g} with any noise; "
        "choose a larger one, or give noise_multiplier"
    )
