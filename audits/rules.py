"""The five composition rules of the papers on dynamic parameters. Their figures are releasable.

They are formulas, not bounds, and are never used for a claim: sqrt(2 ln(1.25 / delta)) /
noise_multiplier is proven only up to 1, "zcdp" ignores subsampling (0.149 at one step of q = 0.01,
noise 0.5, delta 1e-6, where the truth is 4.285), and the total delta of the first three is
total_steps * q * delta and more. They agree with the published tables within 0.11 percent.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from indpriv import _checks
from indpriv.accountant.method import Method
from indpriv.accountant.steps import StepKinds
from indpriv.errors import InputError


@dataclass(frozen=True)
class ComposedEpsilons:
    """Epsilon by each rule, for an example at max_grad_norm in every step.

    Attributes:
        basic: BaseC, the sum of the steps' epsilons.
        advanced: AdvC, the classic advanced composition.
        advanced_as_printed: AdvC as the papers print it, the plainest form of Kairouz, Oh and
            Viswanath's theorem; with changing noise their tables use this one.
        optimal: OptC, the optimal composition of Kairouz, Oh and Viswanath as the papers use it.
        zcdp: zero-concentrated differential privacy with q^2 / noise_multiplier^2 for each step.
        moments: MA, the moments accountant: RDP with the 2017 conversion. Only this is a bound.
    """

    basic: float
    advanced: float
    advanced_as_printed: float
    optimal: float
    zcdp: float
    moments: float


def composed_epsilons(
    noise_multiplier: ArrayLike, sample_rate: ArrayLike, *, total_steps: int, delta: float
) -> ComposedEpsilons:
    """Compose a run of sampled Gaussian steps by each of the five rules.

    noise_multiplier, sample_rate: one for all steps, or (total_steps,); delta: of each step where a
    rule needs one, and of the whole run for zcdp and moments. Epsilons are in nats, infinity where
    a formula overflows. InputError for a value out of range, or an array of another shape.

    >>> published = composed_epsilons(6.0, 0.01, total_steps=10_000, delta=1e-5)
    >>> round(published.basic, 3), round(published.zcdp, 3), round(published.moments, 3)
    (123.457, 1.159, 0.823)
    """
    steps = _checks.check_positive_int("total_steps", total_steps)
    delta = _checks.check_delta(delta)
    noise = _checks.check_setting("noise_multiplier", noise_multiplier)
    rate = _checks.check_setting("sample_rate", sample_rate)
    for name, column in (("noise_multiplier", noise), ("sample_rate", rate)):
        if column.shape not in ((), (steps,)):
            advice = f"pass one value, or one for each of the {steps} steps"
            raise InputError(f"{name} has shape {column.shape}; {advice}")
    by_step = np.stack([np.broadcast_to(column, steps) for column in (noise, rate)], axis=1)
    settings, count = np.unique(by_step, axis=0, return_counts=True)
    plain = math.sqrt(2 * math.log(1.25 / delta)) / settings[:, 0]
    with np.errstate(divide="ignore"):  # log(1 + q (e^plain - 1)) of each step
        epsilon = np.logaddexp(np.log1p(-settings[:, 1]), np.log(settings[:, 1]) + plain)
    squares = float(count @ np.square(epsilon))
    zcdp = float(count @ np.square(settings[:, 1] / settings[:, 0]))
    kinds = StepKinds(1 / settings[:, 0], settings[:, 1])
    moments = kinds.accountant(Method(delta=delta, conversion="mironov2017"))
    with np.errstate(over="ignore"):
        classic_drift = float(count @ (epsilon * np.expm1(epsilon)))
    drift = float(count @ (epsilon * np.tanh(epsilon / 2)))
    spread = math.sqrt(2 * math.log(1 / delta) * squares)
    optimal = drift + math.sqrt(2 * squares * math.log(math.e + math.sqrt(squares) / delta))
    return ComposedEpsilons(
        basic=float(count @ epsilon),
        advanced=classic_drift + spread,
        advanced_as_printed=drift + spread,
        optimal=optimal,
        zcdp=zcdp + 2 * math.sqrt(math.log(1 / delta) * zcdp),
        moments=float(moments.epsilons(count[None].astype(np.float64))["epsilon"][0]),
    )
