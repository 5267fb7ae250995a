"""How epsilons are computed: the checked arguments of `indpriv.account`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from indpriv import _checks
from indpriv.accountant.histogram.governing_norms import BETWEEN_RECORDS
from indpriv.accountant.rdp import check_orders
from indpriv.errors import InputError
from indpriv.norm_log.validation import NEIGHBOURING

ACCOUNTANTS = ("rdp", "pld")  # an engine of each is in `indpriv.accountant.engines`
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
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", _checks.check_delta(self.delta))
        _checks.check_choice("accountant", self.accountant, ACCOUNTANTS)
        _checks.check_choice("conversion", self.conversion, CONVERSIONS)
        _checks.check_choice("between_records", self.between_records, BETWEEN_RECORDS)
        object.__setattr__(self, "tolerance", _checks.check_tolerance(self.tolerance))
        if self.orders is not None:
            object.__setattr__(self, "orders", check_orders(self.orders))
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
        """(n_orders,) exactly these Rényi orders; None for the search over the default grid."""
        return None if self.orders is None else np.asarray(self.orders, np.float64)
