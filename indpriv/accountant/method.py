"""How a log is accounted: the checked arguments of `indpriv.account`, and what epsilons mean."""

from __future__ import annotations

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
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.validation import NEIGHBOURING

# Of each accountant: the largest relative change of others' epsilons without one person, by the
# rounding of floating-point numbers
NUMERICAL_NOISE = {"rdp": "1e-14", "pld": "1e-9"}
ACCOUNTANTS = tuple(NUMERICAL_NOISE)  # an engine of each is in `indpriv.accountant.account`
CONVERSIONS = ("canonne2020", "mironov2017")
PRESETS = ("yu2023",)
PARTICIPATION = ("secret", "known")


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

        self._check_relation()

    def _check_relation(self) -> None:
        """Refuse relations that an account of this kind cannot be of."""
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


def account_of(log: NormLog, method: Method) -> Account:
    """What an epsilon of one row of this log by this method means."""
    return Account(
        delta=method.delta,
        unit=log.unit,
        neighbouring=method.relation_of(log.neighbouring),
        sampler=log.sampler,
        participation=method.participation,
        accountant=method.accountant,
        conversion=method.conversion,
        between_records=method.between_records,
        rounding=0.0 if log.levels is None else log.levels.rounding,
        rounding_mode="none" if log.levels is None else log.levels.rounding_mode,
        total_steps=log.total_steps,
        recorded_share=log.coverage,
        max_batch_size=None if log.truncation is None else log.truncation.max_batch_size,
        clipping_norm_epsilon=clipping_norm_cost(log, method.relation_of(log.neighbouring), 1),
    )
