"""How a log is accounted: the checked arguments of `indpriv.account`, and what epsilons mean.

An account is called "exact" if it is never too small for this trajectory, else an "estimate".

A clipping norm C may be a private release that costs (c, 0) when one row is added or removed. Each
epsilon then grows by c for each row, or by 2 c if rows are replaced [9.5]; what that does to odds
is [9.6] of docs/explanation/proofs.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from scipy.special import expit, ndtri

from indpriv import _checks
from indpriv._facts import refused, text
from indpriv._types import ArrayLike, FloatArray, NDArray
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, Account, EpsilonTable
from indpriv.norm_log.fields import ACCOUNT_WORDS, is_covered
from indpriv.norm_log.norm_log import NormLog

# Of each accountant: the largest relative change of others' epsilons without one person, by the
# rounding of floating-point numbers
NUMERICAL_NOISE = {"rdp": "1e-14", "pld": "1e-9"}
PRESETS = ("yu2023",)
EXACT, ESTIMATE = "exact", "estimate"

Rows = TypeVar("Rows", float, FloatArray)


@dataclass(frozen=True, eq=False, kw_only=True)
class Method:
    """How to account a log; each attribute is the argument of `indpriv.account` of that name.

    Raises:
        InputError: a bad value, before any work.

    >>> Method(delta=1e-5, accountant="pld").between_records
    'last'
    """

    delta: float
    accountant: str = "rdp"
    conversion: str = "canonne2020"
    between_records: str = "last"
    orders: ArrayLike | None = None
    preset: str | None = None
    participation: str = "secret"
    neighbouring: str | None = None
    brackets: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", _checks.check_delta(self.delta))
        for name, known in {**ACCOUNT_WORDS, "preset": PRESETS}.items():
            if name not in ("preset", "neighbouring") or getattr(self, name) is not None:
                _checks.check_choice(name, getattr(self, name), known)
        if self.orders is not None:
            object.__setattr__(self, "orders", _checks.check_orders(self.orders))
        if self.preset is not None:
            object.__setattr__(self, "accountant", "rdp")
            object.__setattr__(self, "conversion", "mironov2017")
            object.__setattr__(self, "between_records", "last")
        if self.participation == "known" and self.preset is not None:
            raise refused("refusal.account", "secret_preset", preset=self.preset)
        if self.participation == "known" and self.neighbouring == "add_remove":
            raise refused("refusal.account", "known_add_remove")

    def relation_of(self, of_log: str) -> str:
        """The neighbouring relation of an account of a log that declares a relation.

        With known participation, where nobody can be added, one contributes nothing instead.
        """
        if self.neighbouring is not None:
            return self.neighbouring
        known = self.participation == "known" and of_log == "add_remove"
        return "zero_out" if known else of_log

    def to_json(self) -> dict[str, Any]:
        """All attributes, as JSON has them."""
        orders = None if self.orders is None else np.asarray(self.orders).tolist()
        return {**vars(self), "orders": orders}


def usual_participation(log: NormLog, preset: str | None = None, relation: str = "") -> str:
    """Secret, unless that gives no guarantee (of the relation) and the log says who took part."""
    some = log.batch_norms is not None or log.most_participations is not None
    proven = is_covered(log.sampler, relation)
    return "known" if not proven and some and preset is None else "secret"


def owners_of(log: NormLog) -> NDArray[np.generic] | None:
    """(n_examples,) the unit of each row; None if each row is accounted for itself."""
    return None if log.unit == "example" else log.unit_ids


def most_rows(log: NormLog) -> int | None:
    """The largest number of rows of a unit; None if each row is accounted for itself."""
    owners = owners_of(log)
    return None if owners is None else int(pd.Series(owners).value_counts().max())


def warn_of(log: NormLog, method: Method, *, by_row: bool = True) -> None:
    """Warn with PrivacyWarning if delta is at least 1/n, or rows of unit "example" share units."""
    n_units = log.n_examples if log.unit_ids is None else len(pd.unique(log.unit_ids))
    n = log.n_examples if log.unit == "example" else n_units
    if n_units < n and by_row and method.participation == "secret":
        _checks.warn_caller(text("sentence.warnings", "rows", log=log, n_units=n_units))
    if method.delta * n >= 1:
        said = {"delta": method.delta, "share": 1 / n, "log": log}
        _checks.warn_caller(text("sentence.warnings", "delta", **said))


def check_logs(*logs: object) -> None:
    """InputError unless all are norm logs."""
    for log in logs:
        if not isinstance(log, NormLog):
            raise refused("refusal.account", "no_log", log=log)


def check_coins(log: NormLog) -> None:
    """InputError if rows share coins, which then amplify nothing."""
    if log.sampler == "by_client":
        raise refused("refusal.account", "coins")


def check_poisson_pairs(log: NormLog, relation: str, what: str) -> None:
    """InputError unless a step is the pair of adding an example to a Poisson sample."""
    check_coins(log)
    if relation == "replace_one":
        raise refused("refusal.account", "add_remove", what=what)
    if log.truncation is not None:
        raise refused("refusal.account", "truncated", what=what, log=log)


def account_of(log: NormLog, method: Method, rows: int | None = None) -> Account:
    """What the epsilons of a log mean; rows: the most of a unit, if taken together."""
    relation, known = method.relation_of(log.neighbouring), method.participation == "known"
    with_norms = () if log.batch_norms is None else log.batch_norms.steps
    return Account(
        delta=method.delta,
        unit=log.unit,
        neighbouring=relation,
        sampler=log.sampler,
        participation=method.participation,
        accountant="gaussian" if known else method.accountant,
        conversion="none" if known else method.conversion,
        between_records="none" if known else method.between_records,
        rounding=log.levels.rounding,
        rounding_mode=log.levels.rounding_mode,
        total_steps=log.total_steps,
        recorded_share=len(with_norms) / log.total_steps if known else log.coverage,
        max_batch_size=None if log.truncation is None else log.truncation.max_batch_size,
        rows_per_unit=rows,
        clipping_norm_epsilon=clipping_norm_cost(log, relation, rows or 1),
    )


def uses_batch_norms(log: NormLog, between_records: str) -> bool:
    """Whether an account of this log uses its batch norms: some are exact without them."""
    some = log.batch_norms is not None and log.n_records < log.total_steps
    return some and between_records in ("last", "closest") and not log.individually_clipped


def claim_of(log: NormLog, method: Method) -> tuple[str, str]:
    """The claim of an account of this log, and its reason in plain sentences.

    An exact account needs norms that are rounded up or not at all, Poisson sampling, no caveat from
    recording, and every step either recorded, counted at max_grad_norm, or individually clipped at
    its last recorded level. With known participation it reads batch norms only; with fixed-size
    batches it reads no norms. The reason of an estimate names all that makes it one.
    """
    doubts, further = [], []
    mode = log.levels.rounding_mode
    rounded = text("sentence.claim", "not_rounded" if mode == "none" else "rounded_up")
    if mode == "nearest":
        doubts.append(text("sentence.claim", "nearest"))
    if method.participation == "known":
        if log.sampler == "other":
            doubts.append(text("sentence.claim", "unknown_sampler"))
        doubts.extend(log.known_caveats)
        n = 0 if log.batch_norms is None else len(log.batch_norms.steps)
        covered = text(
            "sentence.claim",
            "every_batch" if n == log.total_steps else "some_batches" if n else "no_batch",
            **{"n": n, "log": log, "rounded": rounded},
        )
    elif log.sampler == "fixed_size" and method.relation_of(log.neighbouring) == "replace_one":
        doubts = list(log.known_caveats)  # what concerns the sampler or norms does not matter
        covered = text("sentence.claim", "fixed_size")
    else:
        if log.sampler not in ("poisson", "truncated_poisson"):
            which = "another" if log.sampler == "other" else f"a {log.sampler}"
            doubts.append(text("sentence.claim", "sampler", which=which))
        doubts.extend(log.caveats)
        rule = method.between_records
        by_batch = uses_batch_norms(log, rule)
        why = None if by_batch else _coverage(log, rule)
        covered = f"{why}, and {rounded}"
        if why is None:
            n = log.n_records - log.n_unreadable
            said = {"n": n, "log": log, "rule": rule}
            carried = text("sentence.claim", "carried_by_batch" if by_batch else "carried", **said)
            doubts.append(carried)
        if log.n_unreadable:
            further.append(text("sentence.claim", "unreadable", log=log))
    reasons = (part.strip().rstrip(".") for part in [*(doubts or [covered]), *further])
    reason = " ".join(f"{reason[:1].upper()}{reason[1:]}." for reason in reasons)
    return ESTIMATE if doubts else EXACT, reason


def _coverage(log: NormLog, between_records: str) -> str | None:
    """Why the norm of no step is too small, or None."""
    if log.n_records == 0:
        return "nothing was recorded, so that every step counts at max_grad_norm"
    first = int(log.recorded_steps[0])
    if log.n_records == log.total_steps - first:
        every = "has a record, readable or not" if log.n_unreadable else "was recorded"
        before = f" from step {first} on, earlier ones count at max_grad_norm" if first else ""
        return f"every step {every}{before}"
    if between_records == "worst_case":
        return "steps without a record count at max_grad_norm"
    if log.individually_clipped and between_records == "last":
        return "training clipped each example at its last recorded level"
    return None


def clipping_norm_cost(log: NormLog, neighbouring: str, rows: Rows) -> Rows:
    """What the release of the clipping norm costs units with these numbers of rows."""
    return rows * (log.clipping_norm_epsilon * (2 if neighbouring == "replace_one" else 1))


def with_clipping_norm(table: EpsilonTable, log: NormLog) -> EpsilonTable:
    """The account of a run, from that of its steps: every epsilon grows by what C costs.

    Lower ends stay: they bound the steps alone, and the whole costs no less.
    """
    if not log.clipping_norm_epsilon:
        return table
    relation, most = table.account.neighbouring, table.account.rows_per_unit or 1
    rows = table.details.get("n_rows", np.ones(len(table), np.int64)).astype(np.float64)
    cost = clipping_norm_cost(log, relation, rows)
    worst = clipping_norm_cost(log, relation, float(most))
    details = details_with_release(table.details, cost)
    if "unit_worst_case" in details:
        details["unit_worst_case"] = details["unit_worst_case"] + cost
    return replace(
        table,
        epsilon=table.epsilon + cost,
        epsilon_upper=table.epsilon_upper + cost,
        worst_case_epsilon=table.worst_case_epsilon + worst,
        account=replace(table.account, clipping_norm_epsilon=worst),
        details=details,
    )


def details_with_release(
    details: Mapping[str, NDArray[np.generic]], cost: FloatArray
) -> dict[str, Any]:
    """Further columns of the steps of n examples, as those of the whole; cost is (n,)."""
    found: dict[str, Any] = dict(details)
    if "rdp_epsilon" in found:
        found["rdp_epsilon"] = found["rdp_epsilon"] + cost
    if "mu" in found:
        found["mu"] = mu_with_release(found["mu"], cost)
    if "true_positive_limit" in found:
        # Of the steps at this rate; a concave curve rises to a larger one in proportion at most.
        rate = rate_after_release(FALSE_POSITIVE_RATE, cost)
        limit = found["true_positive_limit"] * rate / FALSE_POSITIVE_RATE
        found["true_positive_limit"] = np.minimum(limit, 1.0)
    return found


def rate_after_release(false_positive_rate: ArrayLike, cost: ArrayLike) -> FloatArray:
    """Largest true-positive rate of a test of C alone, which costs (cost, 0).

    >>> rate_after_release(0.01, [0.0, 0.1]).round(4)
    array([0.01  , 0.0111])
    """
    rate, cost = np.asarray(false_positive_rate, np.float64), np.asarray(cost, np.float64)
    found = np.minimum(np.exp(np.minimum(cost, 700.0)) * rate, 1 - np.exp(-cost) * (1 - rate))
    return np.asarray(np.where(cost > 0, found, rate))


def advantage_with_release(advantage: FloatArray, cost: ArrayLike) -> FloatArray:
    """Membership advantage of a run with C, from that of its steps [9.6]."""
    return np.asarray(advantage + (1 - advantage) * np.tanh(np.asarray(cost, np.float64) / 2))


def mu_with_release(mu: FloatArray, cost: ArrayLike) -> FloatArray:
    """Mu of a Gaussian mechanism together with C, which is post-processing of another one [9.6]."""
    own = -2 * ndtri(expit(-np.asarray(cost, np.float64)))
    return np.asarray(np.hypot(mu, own))
