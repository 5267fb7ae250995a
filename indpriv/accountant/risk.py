"""What an account says of attacks: success rates, and the strongest one's evidence. Sensitive.

An attacker sees the whole trajectory. "Absent" is the null hypothesis ("replaced" where another
takes its place): the false-positive rate is how often the attack says "present" of a run without
the example, the true-positive rate of a run with it. Individual figures describe attacks on this
run's trajectory as it happened; only those of the worst case limit attacks in general.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri

from indpriv import _checks
from indpriv._types import ArrayLike, BoolArray, FloatArray, NDArray, Progress
from indpriv.accountant import method as methods
from indpriv.accountant.account import checked, worst_case
from indpriv.accountant.blocks import in_blocks
from indpriv.accountant.known import known_units
from indpriv.accountant.laws import GAUSSIAN_ERROR, gaussian_delta, gaussian_mu
from indpriv.accountant.method import Method
from indpriv.accountant.pairs import Pairs, clipped_in_every_step, larger_epsilons
from indpriv.accountant.rdp import joined, kl_divergences
from indpriv.accountant.steps import Steps
from indpriv.accountant.tight import Met
from indpriv.accountant.units import Units
from indpriv.epsilon_table import DISCLAIMER, Account
from indpriv.norm_log.norm_log import NormLog

_LARGEST_RATE = 1 - 1e-9  # of false positives, at which curves are read
_LEAST_DELTA = 1e-30  # curves are read down to such deltas
_CURVE = "the privacy curve of a run"
_MU_POINTS = 5  # epsilons at which a Gaussian curve is compared with an example's


@dataclass(frozen=True)
class Risk:
    """What the privacy curve of each of n examples says.

    But for mu, no figure is below the truth for the norms as counted, which are rounded up.

    Attributes:
        advantage: (n,) largest true-positive minus false-positive rate of any attack: delta at
            epsilon 0.
        true_positive_rate: (n, n_rates) largest one of any attack at each false-positive rate.
        delta: (n, n_epsilons) at each epsilon, the larger neighbouring direction.
        mu: (n,) of a Gaussian mechanism like this run: the smallest whose delta is nowhere below
            the run's, at some epsilons from 0 to epsilon(delta). An approximation.
    """

    advantage: FloatArray
    true_positive_rate: FloatArray
    delta: FloatArray
    mu: FloatArray

    def at_most(self, worst: "Risk", clipped: BoolArray) -> "Risk":
        """Limited by the worst case, which those have that were clipped in every step."""
        ends = zip(vars(self).items(), vars(worst).values(), strict=True)
        limited = {name: (np.minimum(values, most), most) for (name, values), most in ends}
        return Risk(**{k: np.where(clipped, m.T, x.T).T for k, (x, m) in limited.items()})


@dataclass(frozen=True)
class Readings:
    """Which figures to read off a privacy curve (see `membership_risk`)."""

    false_positive_rate: FloatArray
    epsilon: FloatArray
    delta: float
    clipping_norm_cost: float = 0.0  # of a private clipping norm, with which each curve is composed
    largest_epsilon: float = np.inf  # bounds the epsilon of every example's steps

    @classmethod
    def of(cls, false_positive_rate: ArrayLike, epsilon: ArrayLike, *, delta: float) -> "Readings":
        """Check the arguments."""
        wanted = "numbers in (0, 1), e.g. 0.001", "finite numbers of at least 0, e.g. 1.0"
        rates = _checks.check_row("false_positive_rate", false_positive_rate, "(0, 1)", wanted[0])
        return cls(rates, _checks.check_row("epsilon", epsilon, "[0, inf)", wanted[1]), delta)

    @property
    def _of_steps(self) -> tuple[FloatArray, FloatArray]:
        """The false-positive rates and epsilons at which to read the curves of steps."""
        rates = methods.rate_after_release(self.false_positive_rate, self.clipping_norm_cost)
        epsilons = np.maximum(self.epsilon - self.clipping_norm_cost, 0.0)
        return np.minimum(rates, _LARGEST_RATE), epsilons

    def _composed(self, steps: Risk) -> Risk:
        """The risk of steps and a private clipping norm, from what was read of the steps."""
        cost = self.clipping_norm_cost
        beyond = methods.rate_after_release(self.false_positive_rate, cost) > _LARGEST_RATE
        power = np.where(beyond, 1.0, steps.true_positive_rate)
        if not cost:
            return replace(steps, true_positive_rate=power)
        advantage = methods.advantage_with_release(steps.advantage, cost)
        # Below epsilon `cost`, the curve of the steps gives no bound.
        delta = np.where(self.epsilon < cost, 1.0, steps.delta)
        return Risk(
            advantage=advantage,
            true_positive_rate=power,
            delta=np.minimum(delta, advantage[:, None]),
            mu=methods.mu_with_release(steps.mu, cost),
        )

    def off(self, pairs: Pairs, met: Met) -> Risk:
        """Read the curves of some examples, from steps that are never better than theirs."""
        rates, epsilons = self._of_steps
        n = len(met)
        delta = [pairs.deltas(met, np.full(n, epsilon)) for epsilon in epsilons]
        power = [pairs.true_positive_rates(met, rate) for rate in rates.tolist()]
        end = np.minimum(larger_epsilons(pairs.above, met, self.delta), self.largest_epsilon)
        points = np.linspace(0.0, 1.0, _MU_POINTS)[:, None] * end
        curve = np.stack([pairs.deltas(met, point) for point in points])
        mu = np.max([gaussian_mu(*one) for one in zip(points, curve, strict=True)], axis=0)
        limit = np.minimum(rates + curve[0][:, None], 1.0)
        return self._composed(
            Risk(
                advantage=curve[0],
                true_positive_rate=np.clip(np.reshape(power, (len(rates), n)).T, rates, limit),
                delta=np.reshape(delta, (len(epsilons), n)).T,
                mu=mu,
            )
        )

    def off_gaussian(self, mu: FloatArray) -> Risk:
        """Read the curves of Gaussian mechanisms: mu (n,), from above."""
        (rates, epsilons), more = self._of_steps, 1 + GAUSSIAN_ERROR
        # A figure that is too small for a float is not 0.
        smallest = np.where(mu > 0, np.finfo(np.float64).tiny, 0.0)[:, None]
        at = np.append(0.0, epsilons)
        delta = np.clip(gaussian_delta(at, mu[:, None]) * more, smallest, 1.0)
        return self._composed(
            Risk(
                advantage=delta[:, 0],
                true_positive_rate=np.minimum(ndtr(ndtri(rates) + mu[:, None]) * more, 1.0),
                delta=delta[:, 1:],
                mu=mu,
            )
        )


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
        replaced = self.account.neighbouring == "replace_one"
        worst = self._columns(self.worst_case).items()
        frame.attrs = {
            "sensitive": "for the curator only",
            "disclaimer": DISCLAIMER.replace("epsilon", "risk"),
            "null_hypothesis": "replaced" if replaced else "absent",
            "worst_case": {name: float(values[0]) for name, values in worst},
            "claim": self.claim,
            "claim_reason": self.claim_reason,
            "account": dict(vars(self.account)),
        }
        return frame

    def _columns(self, risk: Risk) -> dict[str, FloatArray]:
        rates = [f"true_positive_rate_at_{rate:g}" for rate in self.false_positive_rate]
        at = [f"delta_at_{epsilon:g}" for epsilon in self.epsilon]
        return {
            "advantage": risk.advantage,
            **dict(zip(rates, risk.true_positive_rate.T, strict=True)),
            **dict(zip(at, risk.delta.T, strict=True)),
            "mu": risk.mu,
        }


def membership_risk(
    log: NormLog,
    *,
    delta: float,
    false_positive_rate: ArrayLike = 0.01,
    epsilon: ArrayLike = (),
    between_records: str = "last",
    participation: str | None = None,
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
        `indpriv.account(accountant="pld")` rounds them.

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
    methods.check_logs(log)
    who = methods.usual_participation(log) if participation is None else participation
    by_losses = Method(delta=delta, accountant="pld", between_records=between_records)
    method = replace(by_losses, participation=who)
    readings = Readings.of(false_positive_rate, epsilon, delta=method.delta)
    rates, at = readings.false_positive_rate, readings.epsilon
    methods.warn_of(log, method)
    if method.participation == "known":
        units, account = Units.of(log), methods.account_of(log, method, methods.most_rows(log))
        # Of the largest unit: no other one costs more
        readings = replace(readings, clipping_norm_cost=account.clipping_norm_epsilon)
        known = known_units(log, method, progress=progress, workers=workers)
        worst = readings.off_gaussian(np.sqrt(known["clipped"].max(keepdims=True)))
        found = readings.off_gaussian(np.sqrt(known["own"]))
        ids = np.asarray(log.example_ids if units is None else units.ids)
        return RiskTable(ids, found, worst, rates, at, *methods.claim_of(log, method), account)
    methods.check_poisson_pairs(log, method.relation_of(log.neighbouring), _CURVE)
    log = checked(log, method)
    readings, limit = _worst_case(log, method, readings)
    steps = Steps.of(log, method.between_records)
    pairs = Pairs(steps.laws, min(method.delta, _LEAST_DELTA), float(log.total_steps))

    def of_block(block: NormLog) -> Risk:
        found = readings.off(pairs, Met.of(steps.counts(block)))
        clipped = found.advantage >= limit.advantage * (1 - 1e-3)
        if clipped.any():
            clipped[clipped] = steps.norms.always_clipped(block.take(np.flatnonzero(clipped)))
        return found.at_most(limit, clipped)

    size = steps.block_size
    blocks = in_blocks(log, of_block, size=size, workers=workers, progress=progress)
    individual, ids = Risk(**joined([vars(one) for one in blocks])), np.asarray(log.example_ids)
    account = methods.account_of(log, method)
    return RiskTable(ids, individual, limit, rates, at, *methods.claim_of(log, method), account)


def worst_case_risk(log: NormLog, *, delta: float, false_positive_rate: ArrayLike) -> Risk:
    """`RiskTable.worst_case` of a log, without reading its rows.

    It is the risk of one row at max_grad_norm in every step; a unit of several rows has more.
    """
    methods.check_poisson_pairs(log, "add_remove", _CURVE)
    method = Method(delta=delta, accountant="pld")
    return _worst_case(log, method, Readings.of(false_positive_rate, (), delta=delta))[1]


def _worst_case(log: NormLog, method: Method, asked: Readings) -> tuple[Readings, Risk]:
    """The readings of a log's steps, and the worst case of one row."""
    by_orders, cost = replace(method, accountant="rdp"), log.clipping_norm_epsilon
    largest = float(worst_case(log, by_orders)["epsilon"][0])
    readings = replace(asked, clipping_norm_cost=cost, largest_epsilon=largest)
    least = min(method.delta, _LEAST_DELTA)
    return readings, readings.off(*clipped_in_every_step(log, least, down=False))


def has_risk_curve(account: Account) -> bool:
    """Whether `worst_case_risk` describes the neighbours and the sampler of an account."""
    return account.neighbouring != "replace_one" and account.sampler != "truncated_poisson"


def predicted_evidence(
    log: NormLog, *, between_records: str = "last", orders: tuple[float, ...] = (1.5, 2.0)
) -> pd.DataFrame:
    """What the account of a log predicts of the strongest attack on each of its examples.

    The attacker's evidence about an example is the sum over steps of the log-likelihood ratio
    log f(z) (see `indpriv.attack_scores`). With z ~ N(0, 1), its mean is the sum of KL(P||Q) =
    E[f log f] if the example takes part (with_example), and minus the sum of KL(Q||P) = E[-log f]
    if it does not (without_example). A row for each example has these sums; their sum, the
    separation, which is the square of a mu; and under each order, above 1, the sum of Rényi
    divergences, which are the evidence's exponential moments.

    >>> log = NormLog.from_arrays([[0.5, 2.0]], [0], total_steps=4, noise_multiplier=2.0,
    ...                           max_grad_norm=1.0, sample_rate=1.0)
    >>> predicted_evidence(log)["separation"].tolist()
    [0.25, 1.0]
    """
    methods.check_poisson_pairs(log, log.neighbouring, "predicted_evidence")
    steps = Steps.of(log, between_records)
    kl = kl_divergences(steps.laws.shift, steps.laws.rate)
    renyi = steps.laws.divergences(np.asarray(orders, dtype=np.float64))
    table = steps.laws.steps @ np.vstack([kl, kl.sum(axis=0), renyi]).T

    def sums(block: NormLog) -> FloatArray:
        return np.asarray(steps.counts(block) @ table)

    columns = ["with_example", "without_example", "separation", *orders]
    found = np.vstack(list(in_blocks(log, sums, size=steps.block_size)))
    return pd.DataFrame(found, columns=columns)
