"""What an account says of attacks: success rates, and the strongest one's evidence. Sensitive.

An attacker sees the whole trajectory and must decide whether an example was in the training set.
"Absent" is the null hypothesis ("replaced" where another takes its place): the false-positive rate
is how often the attack says "present" of a run without the example, the true-positive rate how
often it says so of a run with it. Individual figures describe attacks on this run's trajectory as
it happened; only those of the worst case limit attacks in general.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri

from indpriv import _checks
from indpriv._types import ArrayLike, FloatArray, NDArray, Progress
from indpriv.accountant.account import checked, worst_case_rdp
from indpriv.accountant.blocks import block_size, in_blocks
from indpriv.accountant.gaussian import GAUSSIAN_ERROR, gaussian_delta, gaussian_mu
from indpriv.accountant.known import known_units
from indpriv.accountant.loss_pairs import Pairs, clipped_in_every_step, larger_epsilons
from indpriv.accountant.method import (
    Method,
    account_of,
    advantage_with_release,
    check_poisson_pairs,
    claim_of,
    mu_with_release,
    rate_after_release,
    warn_of_delta,
)
from indpriv.accountant.rdp import joined, kl_divergences
from indpriv.accountant.steps import Steps
from indpriv.accountant.tight import Met
from indpriv.accountant.units import Units
from indpriv.epsilon_table import DISCLAIMER, Account
from indpriv.norm_log.norm_log import NormLog

_LARGEST_RATE = 1 - 1e-9  # of false positives, at which curves are read
_LEAST_DELTA = 1e-30  # curves are read down to such deltas
_MU_POINTS = 5  # epsilons at which a Gaussian curve is compared with an example's


@dataclass(frozen=True)
class Risk:
    """What the privacy curve of each of n examples says.

    Figures named `_lower` are never above the truth for the norms as counted, which are rounded up;
    the others are never below it.

    Attributes:
        advantage: (n,) largest true-positive minus false-positive rate of any attack: delta at
            epsilon 0.
        true_positive_rate: (n, n_rates) largest one of any attack at each false-positive rate.
        delta: (n, n_epsilons) at each epsilon, the larger neighbouring direction.
        mu: (n,) of a Gaussian mechanism like this run: the smallest whose delta is nowhere below
            the run's, at some epsilons from 0 to epsilon(delta). An approximation.
        mu_error: (n,) by how much its delta exceeds the bound of the run's there, at most.
    """

    advantage: FloatArray
    advantage_lower: FloatArray
    true_positive_rate: FloatArray
    true_positive_rate_lower: FloatArray
    delta: FloatArray
    delta_lower: FloatArray
    mu: FloatArray
    mu_error: FloatArray

    @classmethod
    def concatenated(cls, parts: list[Risk]) -> Risk:
        """The risk of the examples of all parts."""
        return cls(**joined([vars(part) for part in parts]))


@dataclass(frozen=True)
class Readings:
    """Which figures to read off a privacy curve (see `membership_risk`).

    Attributes:
        clipping_norm_cost: of a private clipping norm, with which each curve is composed.
        largest_epsilon: bounds the epsilon of every example's steps.
    """

    false_positive_rate: FloatArray
    epsilon: FloatArray
    delta: float
    clipping_norm_cost: float = 0.0
    largest_epsilon: float = np.inf

    @classmethod
    def of(cls, false_positive_rate: ArrayLike, epsilon: ArrayLike, *, delta: float) -> Readings:
        """Check the arguments."""
        rates = _checks.check_row(
            "false_positive_rate",
            false_positive_rate,
            lambda x: (x > 0) & (x < 1),
            "numbers in (0, 1), e.g. 0.001",
        )
        epsilons = _checks.check_row(
            "epsilon",
            epsilon,
            lambda x: np.isfinite(x) & (x >= 0),
            "finite numbers of at least 0, e.g. 1.0",
        )
        return cls(rates, epsilons, delta)

    def of_log(self, log: NormLog, method: Method) -> Readings:
        """The same of the steps of a log, with one row that is added or removed."""
        largest = float(worst_case_rdp(log, method)["epsilon"][0])
        return replace(self, clipping_norm_cost=log.clipping_norm_epsilon, largest_epsilon=largest)

    @property
    def _of_steps(self) -> tuple[FloatArray, FloatArray]:
        """The false-positive rates and epsilons at which to read the curves of steps."""
        rates = rate_after_release(self.false_positive_rate, self.clipping_norm_cost)
        epsilons = np.maximum(self.epsilon - self.clipping_norm_cost, 0.0)
        return np.minimum(rates, _LARGEST_RATE), epsilons

    def _composed(self, steps: Risk) -> Risk:
        """The risk of steps and a private clipping norm, from what was read of the steps."""
        cost = self.clipping_norm_cost
        if not cost:
            return steps
        advantage = advantage_with_release(steps.advantage, cost)
        mu = mu_with_release(steps.mu, cost)
        # Delta falls from the advantage, at epsilon 0; below the cost there is no other bound.
        delta = np.where(self.epsilon < cost, 1.0, steps.delta)
        beyond = rate_after_release(self.false_positive_rate, cost) > _LARGEST_RATE
        return Risk(
            advantage=advantage,
            advantage_lower=steps.advantage_lower,
            true_positive_rate=np.where(beyond, 1.0, steps.true_positive_rate),
            true_positive_rate_lower=np.broadcast_to(
                self.false_positive_rate, steps.true_positive_rate.shape
            ),
            delta=np.minimum(delta, advantage[:, None]),
            delta_lower=np.zeros_like(steps.delta),
            mu=mu,
            mu_error=gaussian_delta(np.zeros(len(mu)), mu),
        )

    def off(self, pairs: Pairs, met: Met, less: tuple[Pairs, Met] | None) -> Risk:
        """Read the curves of some examples.

        pairs, met: steps never better than theirs. less: steps never worse. None costs less: lower
        figures are then 0.
        """
        rates, epsilons = self._of_steps
        n, at = len(met), np.append(0.0, epsilons)
        high, low = _deltas(pairs.deltas, met, at), np.zeros((n, len(at)))
        if less is not None:
            low = _deltas(partial(less[0].deltas, below=True), less[1], at)
        advantage, least = high[:, 0], low[:, 0, None]
        found = [pairs.true_positive_rates(met, rate) for rate in rates.tolist()]
        most = np.minimum(np.reshape(found, (len(rates), n)).T, rates + advantage[:, None])
        # The trade-off function is concave and meets rate* + advantage at a rate* <= 1 - advantage
        some = np.minimum(least, rates / np.maximum(1 - least, rates))
        end = np.minimum(larger_epsilons(pairs.above, met, self.delta), self.largest_epsilon)
        points = np.linspace(0.0, 1.0, _MU_POINTS)[:, None] * end
        curve = _deltas(pairs.deltas, met, points)
        mu = np.max([gaussian_mu(*one) for one in zip(points, curve.T, strict=True)], axis=0)
        excess = np.stack([gaussian_delta(point, mu) for point in points], axis=1) - curve
        return self._composed(
            Risk(
                advantage=advantage,
                advantage_lower=least[:, 0],
                true_positive_rate=np.clip(most, rates, 1.0),
                true_positive_rate_lower=np.clip(np.maximum(some, rates), None, most),
                delta=high[:, 1:],
                delta_lower=low[:, 1:],
                mu=mu,
                mu_error=np.maximum(excess.max(axis=1), 0.0),
            )
        )

    def off_gaussian(self, mu: FloatArray, least: FloatArray) -> Risk:
        """Read the curves of Gaussian mechanisms: mu (n,) from above and, at most as large, below.

        mu is a sensitivity over the noise's standard deviation.
        """
        more, less = 1 + GAUSSIAN_ERROR, 1 - GAUSSIAN_ERROR
        advantage, rates, delta = self._gaussian(mu)
        low = self._gaussian(least)
        # A figure that is too small for a float is not 0.
        smallest = np.where(mu > 0, np.finfo(np.float64).tiny, 0.0)
        advantage = np.clip(advantage * more, smallest, 1.0)
        return self._composed(
            Risk(
                advantage=advantage,
                advantage_lower=np.maximum(low[0] * less, 0.0),
                true_positive_rate=np.minimum(rates * more, 1.0),
                true_positive_rate_lower=low[1] * less,
                delta=np.clip(delta * more, smallest[:, None], 1.0),
                delta_lower=np.maximum(low[2] * less, 0.0),
                mu=mu,
                mu_error=np.where(least < mu, advantage, 0.0),
            )
        )

    def _gaussian(self, mu: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        advantage = gaussian_delta(np.zeros(len(mu)), mu)
        rate, epsilon = self._of_steps
        rates = ndtr(ndtri(rate) + mu[:, None])
        return advantage, rates, gaussian_delta(epsilon, mu[:, None])


def _deltas(
    curve: Callable[[Met, FloatArray], FloatArray], met: Met, epsilons: FloatArray
) -> FloatArray:
    """(n, n_epsilons) of curves at these epsilons, one for all examples or (n,) each."""
    return np.stack([curve(met, np.zeros(len(met)) + epsilon) for epsilon in epsilons], axis=1)


@dataclass(frozen=True)
class RiskTable:
    """Risk of every example, and that of the worst case.

    Attributes:
        example_ids: (n_examples,).
        individual: of each example along this trajectory. It limits no attack in general.
        worst_case: of one example at max_grad_norm in every step, or with known participation of
            the most exposed one, at max_grad_norm in the steps that it took part in: the guarantee
            of the run.
        false_positive_rate: (n_rates,) of the columns of true_positive_rate.
        epsilon: (n_epsilons,) of the columns of delta.
        claim: "exact" (never too small for this trajectory) or "estimate".
        claim_reason: why.
        account: unit, neighbouring relation, sampler and method; mu is fitted up to its delta.
    """

    example_ids: NDArray[np.generic]
    individual: Risk
    worst_case: Risk
    false_positive_rate: FloatArray
    epsilon: FloatArray
    claim: str
    claim_reason: str
    account: Account

    def __len__(self) -> int:
        return len(self.example_ids)

    def to_frame(self) -> pd.DataFrame:
        """One row per example: example_id and the figures of `Risk`, one column for each.

        Names of columns contain the rate or epsilon. `.attrs` has the worst case and what the
        numbers mean: claim, unit, neighbouring relation, sampler, disclaimer.
        """
        frame = pd.DataFrame({"example_id": self.example_ids, **self._columns(self.individual)})
        frame.attrs = {
            "sensitive": "for the curator only",
            "disclaimer": DISCLAIMER.replace("epsilon", "risk"),
            "null_hypothesis": "replaced"
            if self.account.neighbouring == "replace_one"
            else "absent",
            "worst_case": {
                name: float(values[0]) for name, values in self._columns(self.worst_case).items()
            },
            "claim": self.claim,
            "claim_reason": self.claim_reason,
            "account": dict(vars(self.account)),
        }
        return frame

    def _columns(self, risk: Risk) -> dict[str, FloatArray]:
        columns = {"advantage": risk.advantage, "advantage_lower": risk.advantage_lower}
        for k, rate in enumerate(self.false_positive_rate):
            name = f"true_positive_rate_at_{rate:g}"
            columns[name] = risk.true_positive_rate[:, k]
            columns[f"{name}_lower"] = risk.true_positive_rate_lower[:, k]
        for k, epsilon in enumerate(self.epsilon):
            name = f"delta_at_{epsilon:g}"
            columns[name], columns[f"{name}_lower"] = risk.delta[:, k], risk.delta_lower[:, k]
        return {**columns, "mu": risk.mu, "mu_error": risk.mu_error}


def membership_risk(
    log: NormLog,
    *,
    delta: float,
    false_positive_rate: ArrayLike = 0.01,
    epsilon: ArrayLike = (),
    between_records: str = "last",
    participation: str = "secret",
    progress: Progress | None = None,
    workers: int | None = None,
) -> RiskTable:
    """How well the best attack can tell whether each example was in the training set.

    Args:
        log: the norm log of the run.
        delta: in (0, 1), well below 1 / n_examples; mu is fitted up to epsilon(delta).
        false_positive_rate: one or (n_rates,), in (0, 1), to give true-positive rates at.
        epsilon: one or (n_epsilons,), at least 0, to give delta at.
        between_records: as of `indpriv.account`.
        participation: as of `indpriv.account`. With "known", figures have a closed form, and
            units may have several rows.
        progress: called with (examples done, examples in all) after each block.
        workers: threads; by default one for each core. They do not change the figures.

    Returns:
        the table; no example exceeds the worst case. Norms and settings are rounded up where
        `indpriv.account(accountant="pld")` rounds them (down for lower figures).

    Raises:
        InputError: a bad argument, or units of several rows with secret participation.

    Warns:
        PrivacyWarning: delta is at least 1 / n_examples.

    >>> log = NormLog.from_arrays([[0.1, 2.0]], [0], total_steps=3660, noise_multiplier=3.0,
    ...                           max_grad_norm=1.0, sample_rate=4096 / 50000)
    >>> table = membership_risk(log, delta=1e-5, false_positive_rate=0.01, epsilon=8.2493771074)
    >>> table.individual.advantage.round(3), table.individual.true_positive_rate[:, 0].round(3)
    (array([0.066, 0.601]), array([0.015, 0.264]))
    >>> round(float(table.worst_case.delta[0, 0]), 7), table.claim
    (1e-05, 'estimate')
    """
    method = Method(
        delta=delta,
        accountant="pld",
        between_records=between_records,
        participation=participation,
    )
    readings = Readings.of(false_positive_rate, epsilon, delta=method.delta)
    rates, at = readings.false_positive_rate, readings.epsilon
    if participation == "known":
        units = Units.of(log)
        account = account_of(log, method, None if units is None else int(units.n_rows.max()))
        # Of the largest unit: no other one costs more
        readings = replace(readings, clipping_norm_cost=account.clipping_norm_epsilon)
        warn_of_delta(log, method)
        known = known_units(log, method, progress=progress, workers=workers)
        worst = np.sqrt(np.array([known["clipped"].max()]))
        risks = (
            readings.off_gaussian(np.sqrt(known["own"]), np.sqrt(known["least"])),
            readings.off_gaussian(worst, worst),
        )
    else:
        units, relation = None, method.relation_of(log.neighbouring)
        check_poisson_pairs(log, relation, "the privacy curve of a run")
        log = checked(log, method)
        risks = _secret_risks(log, method, readings.of_log(log, method), progress, workers)
        account = account_of(log, method)
    ids = np.asarray(log.example_ids if units is None else units.ids)
    return RiskTable(ids, *risks, rates, at, *claim_of(log, method), account)


def _secret_risks(
    log: NormLog, method: Method, readings: Readings, progress: Progress | None, workers: int | None
) -> tuple[Risk, Risk]:
    """Of each example and of the worst case, for whoever does not know the batches."""
    steps, least = Steps.of(log, method.between_records), min(method.delta, _LEAST_DELTA)
    pairs, below = Pairs.of(steps, least), steps.below()
    below_pairs = pairs if below is steps else Pairs.of(below, least)
    worst = _worst_case(log, method, readings, lower=True)

    def of_block(block: NormLog) -> Risk:
        met = Met.of(steps.counts(block))
        less = met if below is steps else Met.of(below.counts(block))
        found = readings.off(pairs, met, (below_pairs, less))
        clipped = np.zeros(block.n_examples, bool)
        close = np.flatnonzero(found.advantage >= worst.advantage * (1 - 1e-3))
        if len(close):
            clipped[close] = steps.norms.always_clipped(block.take(close))
        return _at_most(found, worst, clipped)

    size = block_size(steps.bytes_per_example + 16 * len(steps.laws))
    blocks = in_blocks(log, of_block, size=size, workers=workers, progress=progress)
    return Risk.concatenated(list(blocks)), worst


def worst_case_risk(log: NormLog, *, delta: float, false_positive_rate: ArrayLike) -> Risk:
    """`RiskTable.worst_case` of a log, without lower figures and without reading its rows.

    It is the risk of one row at max_grad_norm in every step; a unit of several rows has more.
    """
    check_poisson_pairs(log, "add_remove", "the privacy curve of a run")
    method = Method(delta=delta, accountant="pld")
    readings = Readings.of(false_positive_rate, (), delta=delta).of_log(log, method)
    return _worst_case(log, method, readings, lower=False)


def has_risk_curve(account: Account) -> bool:
    """Whether `worst_case_risk` describes the neighbours and the sampler of an account."""
    return account.neighbouring != "replace_one" and account.sampler != "truncated_poisson"


def _worst_case(log: NormLog, method: Method, readings: Readings, *, lower: bool) -> Risk:
    least = min(method.delta, _LEAST_DELTA)
    above = clipped_in_every_step(log, least, down=False)
    return readings.off(*above, clipped_in_every_step(log, least, down=True) if lower else None)


def _at_most(risk: Risk, worst: Risk, clipped: NDArray[np.bool_]) -> Risk:
    """The risk with upper figures of at most the worst case's, since curves rise with the norm.

    clipped: (n,) examples that were clipped in every step: they have the worst case's figures.
    """
    found = {}
    for field in fields(Risk):
        values, limit = getattr(risk, field.name), getattr(worst, field.name)
        at_limit = clipped.reshape(-1, *(1,) * (values.ndim - 1))
        values = values if field.name == "mu_error" else np.minimum(values, limit)
        found[field.name] = np.where(at_limit, limit, values)
    return Risk(**found)


def predicted_evidence(
    log: NormLog, *, between_records: str = "last", orders: tuple[float, ...] = (1.5, 2.0)
) -> pd.DataFrame:
    """What the account of a log predicts of the strongest attack on each of its examples.

    The attacker's evidence about an example is the sum over steps of the log-likelihood ratio
    log f(z) (see `indpriv.attack_scores`). With z ~ N(0, 1), its mean is the sum of KL(P||Q) =
    E[f log f] if the example takes part, and minus the sum of KL(Q||P) = E[-log f] if it does not;
    its exponential moments are the Rényi divergences that RDP accounts add up.

    Args:
        log: the norm log of the run.
        between_records: as of `indpriv.account`.
        orders: Rényi orders, above 1.

    Returns:
        a row for each example: these two sums, with_example and without_example; their sum, the
        separation, which is the square of a mu; and under each order the sum of divergences.

    >>> log = NormLog.from_arrays([[0.5, 2.0]], [0], total_steps=4, noise_multiplier=2.0,
    ...                           max_grad_norm=1.0, sample_rate=1.0)
    >>> predicted_evidence(log)["separation"].tolist()
    [0.25, 1.0]
    """
    check_poisson_pairs(log, log.neighbouring, "predicted_evidence")
    steps = Steps.of(log, between_records)
    kl = kl_divergences(steps.laws.shift, steps.laws.rate)
    renyi = steps.laws.divergences(np.asarray(orders, dtype=np.float64))
    table = steps.steps @ np.vstack([kl, kl.sum(axis=0), renyi]).T

    def sums(block: NormLog) -> FloatArray:
        return np.asarray(steps.counts(block) @ table)

    size = block_size(steps.bytes_per_example)
    columns = ["with_example", "without_example", "separation", *orders]
    return pd.DataFrame(np.vstack(list(in_blocks(log, sums, size=size))), columns=columns)
