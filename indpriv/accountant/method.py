"""How a log is accounted: the checked arguments of `indpriv.account`, and what epsilons mean.

An account is called "exact" if it is never too small for this trajectory, else an "estimate".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from indpriv import _checks
from indpriv.accountant.clipping_norm import clipping_norm_cost
from indpriv.accountant.norms import BETWEEN_RECORDS
from indpriv.epsilon_table import Account
from indpriv.errors import InputError
from indpriv.norm_log.fields import NEIGHBOURING
from indpriv.norm_log.norm_log import NormLog

# Of each accountant: the largest relative change of others' epsilons without one person, by the
# rounding of floating-point numbers
NUMERICAL_NOISE = {"rdp": "1e-14", "pld": "1e-9"}
ACCOUNTANTS = tuple(NUMERICAL_NOISE)  # an engine of each is in `indpriv.accountant.account`
CONVERSIONS = ("canonne2020", "mironov2017")
PRESETS = ("yu2023",)
PARTICIPATION = ("secret", "known")
EXACT, ESTIMATE = "exact", "estimate"
GAUSSIAN = "gaussian"  # of accounts with known participation, which have a closed form


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
        _checks.check_choice("accountant", self.accountant, ACCOUNTANTS)
        _checks.check_choice("conversion", self.conversion, CONVERSIONS)
        _checks.check_choice("between_records", self.between_records, BETWEEN_RECORDS)
        if self.orders is not None:
            object.__setattr__(self, "orders", _checks.check_orders(self.orders))
        if self.preset is not None:
            _checks.check_choice("preset", self.preset, PRESETS)
            object.__setattr__(self, "accountant", "rdp")
            object.__setattr__(self, "conversion", "mironov2017")
            object.__setattr__(self, "between_records", "last")
        _checks.check_choice("participation", self.participation, PARTICIPATION)
        if self.neighbouring is not None:
            _checks.check_choice("neighbouring", self.neighbouring, NEIGHBOURING)
        if self.participation == "known" and self.preset is not None:
            raise InputError(
                f'preset="{self.preset}" is an account with secret participation; leave out '
                'participation="known"'
            )
        if self.participation == "known" and self.neighbouring == "add_remove":
            raise InputError(
                'neighbouring="add_remove" with participation="known": an attacker who knows who '
                'took part also knows who is in the data; pass neighbouring="zero_out" (one '
                'example contributes nothing) or "replace_one"'
            )

    def relation_of(self, of_log: str) -> str:
        """The neighbouring relation of an account of a log that declares a relation.

        Adding or removing an example changes who takes part, so with known participation one that
        contributes nothing is in its place.
        """
        if self.neighbouring is not None:
            return self.neighbouring
        known = self.participation == "known" and of_log == "add_remove"
        return "zero_out" if known else of_log

    def to_json(self) -> dict[str, Any]:
        """All attributes, as JSON has them."""
        orders = None if self.orders is None else np.asarray(self.orders).tolist()
        return {**vars(self), "orders": orders}

    @property
    def rdp_orders(self) -> NDArray[np.float64] | None:
        """(n_orders,) exactly these Rényi orders; None for those of a fixed grid."""
        return None if self.orders is None else np.asarray(self.orders, np.float64)


def owners_of(log: NormLog) -> NDArray[np.generic] | None:
    """(n_examples,) the unit of each row; None if each row is accounted for itself."""
    return None if log.unit == "example" else log.unit_ids


def warn_of_delta(log: NormLog, method: Method) -> None:
    """Warn with PrivacyWarning if delta is at least 1/n, of n examples or units."""
    owners = owners_of(log)
    n = log.n_examples if owners is None else len(pd.unique(owners))
    if method.delta * n >= 1:
        _checks.warn_caller(
            f"delta={method.delta:g} is at least 1/n = {1 / n:g}: it would allow publishing a "
            f"random {log.unit} in full; pass a delta well below 1/n"
        )


def check_coins(log: NormLog) -> None:
    """InputError if rows share coins, which then amplify nothing."""
    if log.sampler == "by_client":
        raise InputError(
            'sampler="by_client" with secret participation: all rows of a client share one coin, '
            "and the rest of its update tells whether it took part, so coins amplify nothing; pass "
            'participation="known"'
        )


def check_poisson_pairs(log: NormLog, relation: str, what: str) -> None:
    """InputError unless a step is the pair of adding an example to a Poisson sample.

    It is another one if rows share coins, batches were truncated, or an example is replaced.
    """
    check_coins(log)
    if relation == "replace_one":
        raise InputError(
            f"{what} with secret participation is of an added or removed example, and this log is "
            'of neighbouring="replace_one"; pass participation="known"'
        )
    if log.truncation is not None:
        raise InputError(
            f"{what} assumes Poisson sampling, and batches were truncated at "
            f"max_batch_size={log.truncation.max_batch_size}; indpriv.account allows for that"
        )


def account_of(log: NormLog, method: Method, rows: int | None = None) -> Account:
    """What the epsilons of this log by this method mean.

    rows: the largest number of rows of a unit, where rows of a unit are taken together.
    """
    relation, known = method.relation_of(log.neighbouring), method.participation == "known"
    with_norms = () if log.batch_norms is None else log.batch_norms.steps
    return Account(
        delta=method.delta,
        unit=log.unit,
        neighbouring=relation,
        sampler=log.sampler,
        participation=method.participation,
        accountant=GAUSSIAN if known else method.accountant,
        conversion="none" if known else method.conversion,
        between_records="none" if known else method.between_records,
        rounding=0.0 if log.levels is None else log.levels.rounding,
        rounding_mode="none" if log.levels is None else log.levels.rounding_mode,
        total_steps=log.total_steps,
        recorded_share=len(with_norms) / log.total_steps if known else log.coverage,
        max_batch_size=None if log.truncation is None else log.truncation.max_batch_size,
        rows_per_unit=rows,
        clipping_norm_epsilon=clipping_norm_cost(log, relation, rows or 1),
    )


def uses_batch_norms(log: NormLog, between_records: str) -> bool:
    """Whether an account of this log uses its batch norms.

    It does not if steps without a full record count at max_grad_norm, or if training clipped each
    example at its last full record: such an account is exact without them.
    """
    some = log.batch_norms is not None and log.n_records < log.total_steps
    return some and between_records in ("last", "closest") and not log.individually_clipped


def claim_of(log: NormLog, between_records: str) -> tuple[str, str]:
    """The claim of an account of this log, and its reason in plain sentences.

    An exact account needs norms that are rounded up or not at all, Poisson sampling, no caveat from
    recording, and every step either recorded, counted at max_grad_norm, or individually clipped at
    its last recorded level. The reason of an estimate names all that makes it one.
    """
    doubts, further = _rounding_doubts(log), []
    if log.sampler not in ("poisson", "truncated_poisson"):
        which = "another" if log.sampler == "other" else f"a {log.sampler}"
        doubts.append(
            f"batches were drawn by {which} sampler, and the analysis assumes Poisson sampling"
        )
    doubts.extend(log.caveats)
    by_batch = uses_batch_norms(log, between_records)
    covered = None if by_batch else _coverage(log, between_records)
    if covered is None:
        doubts.append(
            f"only {log.n_records - log.n_unreadable} of {log.total_steps} steps were recorded in "
            f"full, and the norms in between are taken from the {between_records} record"
            f"{' or batch norm of the example' if by_batch else ''}"
        )
    if log.n_unreadable:
        further.append(
            f"{log.n_unreadable} of the {log.n_records} records cannot be read: the steps that "
            "they govern count at max_grad_norm"
        )
    return _claim(doubts, f"{covered}, and {_rounding(log)}", further)


def claim_if_known(log: NormLog) -> tuple[str, str]:
    """The claim of an account of this log with known participation, and its reason.

    It reads batch norms only. It is exact if they are rounded up or not at all, if who takes part
    is drawn without looking at data, and if nothing that was recorded speaks against that.
    """
    doubts = _rounding_doubts(log)
    if log.sampler == "other":
        doubts.append(
            "batches were drawn by another sampler, and nothing shows that it looks at no data"
        )
    doubts.extend(log.known_caveats)
    known = 0 if log.batch_norms is None else len(log.batch_norms.steps)
    if known == log.total_steps:
        covered = "the norms of every batch were recorded as it was trained on, dropout included"
    elif known:
        covered = (
            f"the norms of {known:,} of {log.total_steps:,} batches were recorded, and every "
            "example counts at max_grad_norm in the others"
        )
    else:
        covered = (
            "no norms of batches were recorded, so that every example counts at max_grad_norm in "
            "as many steps as it can have taken part in"
        )
    return _claim(doubts, f"{covered}, and {_rounding(log)}" if known else covered)


def claim_of_worst_case(log: NormLog) -> tuple[str, str]:
    """The claim of an account that reads no norms, and its reason.

    Caveats that concern the sampler or full records do not matter to it.
    """
    return _claim(
        list(log.known_caveats),
        "every example has the worst case, at max_grad_norm in every step: with fixed-size "
        "batches and replaced examples, no smaller epsilon of one example is proven",
    )


def _claim(doubts: list[str], covered: str, further: Sequence[str] = ()) -> tuple[str, str]:
    claim = ESTIMATE if doubts else EXACT
    reasons = (part.strip().rstrip(".") for part in [*(doubts or [covered]), *further])
    return claim, " ".join(f"{reason[:1].upper()}{reason[1:]}." for reason in reasons)


def _rounding_doubts(log: NormLog) -> list[str]:
    if log.levels is None or log.levels.rounding_mode == "up":
        return []
    return [f"norms were rounded to the {log.levels.rounding_mode} level, which can under-report"]


def _rounding(log: NormLog) -> str:
    return "norms are not rounded" if log.levels is None else "norms are rounded up"


def _coverage(log: NormLog, between_records: str) -> str | None:
    """Why the norm of no step is too small, or None."""
    if log.n_records == 0:
        return "nothing was recorded, so that every step counts at max_grad_norm"
    unrecorded_start = int(log.recorded_steps[0])
    if log.n_records == log.total_steps - unrecorded_start:
        before = (
            ""
            if unrecorded_start == 0
            else f" from step {unrecorded_start} on, earlier ones count at max_grad_norm"
        )
        recorded = (
            "every step was recorded"
            if not log.n_unreadable
            else "every step has a record, readable or not"
        )
        return recorded + before
    if between_records == "worst_case":
        return "steps without a record count at max_grad_norm"
    if log.individually_clipped and between_records == "last":
        return "training clipped each example at its last recorded level"
    return None
