"""`membership_risk`: the privacy curve of every example as attack success rates. Sensitive.

An attacker sees the whole trajectory and must decide whether an example was in the training set.
"Absent" is the null hypothesis ("replaced" where another takes its place): the false-positive rate
is how often the attack says "present" of a run without the example, the true-positive rate how
often it says so of a run with it. Individual figures describe attacks on this run's trajectory as
it happened; only those of the worst case limit attacks in general.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from indpriv._arrays import FloatArray
from indpriv._progress import Progress
from indpriv.accountant.account import checked
from indpriv.accountant.blocks import block_size, in_blocks
from indpriv.accountant.claims import claim_if_known, claim_of
from indpriv.accountant.histogram.histogram import Histogram, whole_histograms
from indpriv.accountant.known import known_account, known_units
from indpriv.accountant.method import (
    Method,
    account_of,
    check_poisson_pairs,
    owners_of,
    warn_of_delta,
)
from indpriv.accountant.readings import Readings, Risk
from indpriv.accountant.units import Units
from indpriv.accountant.worst_case import worst_case_participations, worst_case_rdp
from indpriv.epsilon_table import DISCLAIMER, Account
from indpriv.norm_log.norm_log import NormLog

# Of a worst case whose curve is read: beyond them that takes minutes.
_MOST_STEPS, _MOST_KINDS, _MOST_OF_BOTH = 10**6, 1000, 10**7


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
    >>> round(float(table.worst_case.delta[0, 0]), 9), table.claim
    (1e-05, 'estimate')
    """
    method = Method(
        delta=delta,
        accountant="pld",
        between_records=between_records,
        participation=participation,
    )
    risk_of = _known_risk if participation == "known" else _secret_risk
    return risk_of(log, method, false_positive_rate, epsilon, progress, workers)


def _secret_risk(
    log: NormLog,
    method: Method,
    false_positive_rate: ArrayLike,
    epsilon: ArrayLike,
    progress: Progress | None,
    workers: int | None,
) -> RiskTable:
    """The table by brackets of privacy losses, for whoever does not know the batches."""
    prepared = prepare_risk(log, method, false_positive_rate=false_positive_rate, epsilon=epsilon)
    blocks: list[Risk] = []
    for block in prepared.blocks(workers=workers):
        blocks.append(block)
        if progress is not None:
            progress(sum(len(done.mu) for done in blocks), log.n_examples)
    return RiskTable(
        example_ids=np.asarray(log.example_ids),
        individual=Risk.concatenated(blocks),
        worst_case=prepared.worst_case,
        false_positive_rate=prepared.readings.false_positive_rate,
        epsilon=prepared.readings.epsilon,
        claim=prepared.claim,
        claim_reason=prepared.claim_reason,
        account=prepared.account,
    )


def _known_risk(
    log: NormLog,
    method: Method,
    false_positive_rate: ArrayLike,
    epsilon: ArrayLike,
    progress: Progress | None,
    workers: int | None,
) -> RiskTable:
    """Of Gaussian mechanisms, in closed form."""
    warn_of_delta(log, method)
    owners = owners_of(log)
    units = None if owners is None else Units.of(owners)
    account = known_account(log, method, units)
    cost = account.clipping_norm_epsilon  # of the largest unit: no other one costs more
    readings = Readings.of(
        false_positive_rate, epsilon, delta=method.delta, clipping_norm_cost=cost
    )
    known = known_units(log, method, units, progress=progress, workers=workers)
    claim, reason = claim_if_known(log)
    mu, least = (np.sqrt(known[name]) for name in ("own", "least"))
    worst = np.sqrt(np.array([known["clipped"].max()]))
    return RiskTable(
        example_ids=np.asarray(log.example_ids if units is None else units.ids),
        individual=readings.off_gaussian(mu, least),
        worst_case=readings.off_gaussian(worst, worst),
        false_positive_rate=readings.false_positive_rate,
        epsilon=readings.epsilon,
        claim=claim,
        claim_reason=reason,
        account=account,
    )


@dataclass(frozen=True)
class PreparedRisk:
    """What all examples of a log share in `membership_risk`."""

    log: NormLog
    upper: Histogram
    lower: Histogram
    claim: str
    claim_reason: str
    account: Account
    readings: Readings
    worst_case: Risk

    def blocks(self, *, workers: int | None = None) -> Iterator[Risk]:
        """Yield the risk of consecutive blocks of examples.

        Memory does not grow with their number. workers: threads, by default one for each core.
        """
        size = block_size(self.upper.bytes_per_example + 16 * len(self.upper.mechanisms))
        yield from in_blocks(self.log, self._block, size=size, workers=workers)

    def _block(self, block: NormLog) -> Risk:
        up = self.upper.participations(block)
        down = up if self.lower is self.upper else self.lower.participations(block)
        keys = up.counts if down is up else np.hstack([up.counts, down.counts])
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        distinct = up.select(first)
        risk = self.readings.off(distinct, distinct if down is up else down.select(first)).take(
            inverse.ravel()
        )
        clipped = np.zeros(block.n_examples, bool)
        close = np.flatnonzero(risk.advantage >= self.worst_case.advantage * (1 - 1e-3))
        if len(close):
            clipped[close] = self.lower.norms.always_clipped(block.take(close))
        return _at_most(risk, self.worst_case, clipped)


def prepare_risk(
    log: NormLog, method: Method, *, false_positive_rate: ArrayLike, epsilon: ArrayLike
) -> PreparedRisk:
    """Do what all blocks of examples share; raises and warns as `membership_risk` does."""
    relation = method.relation_of(log.neighbouring)
    check_poisson_pairs(log, relation, "the privacy curve of a run")
    log = checked(log, method)
    upper, lower = whole_histograms(log, method.between_records)
    readings = _readings(log, method, false_positive_rate, epsilon)
    return PreparedRisk(
        log,
        upper,
        lower,
        *claim_of(log, method.between_records),
        account_of(log, method),
        readings,
        _worst_case(log, readings),
    )


def worst_case_risk(log: NormLog, *, delta: float, false_positive_rate: ArrayLike) -> Risk:
    """`RiskTable.worst_case` of a log, without reading its rows.

    It is the risk of one row at max_grad_norm in every step; a unit of several rows has more. Where
    the curve takes minutes, upper figures are those of any mechanism with the run's epsilon at
    delta (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776), and mu is not a number.
    """
    check_poisson_pairs(log, "add_remove", "the privacy curve of a run")
    method = Method(delta=delta, accountant="pld")
    readings = _readings(log, method, false_positive_rate, ())
    if not risk_takes_long(log):
        return _worst_case(log, readings)
    epsilon = min(float(worst_case_rdp(log, method).epsilon[0]) + log.clipping_norm_epsilon, 700.0)
    rates = np.asarray(readings.false_positive_rate)[None]
    above = np.exp(epsilon) * rates + delta
    below = 1 - np.exp(-epsilon) * (1 - delta - rates)
    none, nothing = np.full(1, np.nan), np.zeros((1, 0))
    return Risk(
        advantage=np.full(1, min(np.tanh(epsilon / 2) + 2 * delta / (np.exp(epsilon) + 1), 1.0)),
        advantage_lower=np.zeros(1),
        true_positive_rate=np.minimum(np.minimum(above, below), 1.0),
        true_positive_rate_lower=rates,
        delta=nothing,
        delta_lower=nothing,
        mu=none,
        mu_error=none,
    )


def risk_takes_long(log: NormLog) -> bool:
    """Whether the curve of the worst case takes minutes: of many steps, or many kinds of steps."""
    settings = log.settings
    if len(settings) > _MOST_STEPS:
        return True
    kinds = np.unique(np.column_stack([settings.noise_multiplier, settings.sample_rate]), axis=0)
    return len(kinds) > _MOST_KINDS or len(kinds) * len(settings) > _MOST_OF_BOTH


def has_risk_curve(account: Account) -> bool:
    """Whether `worst_case_risk` describes the neighbours and the sampler of an account."""
    return account.neighbouring != "replace_one" and account.sampler != "truncated_poisson"


def _readings(
    log: NormLog, method: Method, false_positive_rate: ArrayLike, epsilon: ArrayLike
) -> Readings:
    return Readings.of(
        false_positive_rate,
        epsilon,
        delta=method.delta,
        largest_epsilon=float(worst_case_rdp(log, method).epsilon[0]),
        clipping_norm_cost=log.clipping_norm_epsilon,  # of one row that is added or removed
    )


def _worst_case(log: NormLog, readings: Readings) -> Risk:
    return readings.off(*worst_case_participations(log))


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
