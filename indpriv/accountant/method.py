"""How epsilons are computed: the checked arguments of `indpriv.account`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from indpriv import _checks
from indpriv.accountant.engines import ENGINES
from indpriv.accountant.histogram.governing_norms import BETWEEN_RECORDS
from indpriv.accountant.rdp import check_orders
from indpriv.accountant.rdp_orders import CONVERSIONS

PRESETS = ("yu2023",)


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", _checks.check_delta(self.delta))
        _checks.check_choice("accountant", self.accountant, tuple(ENGINES))
        _checks.check_choice("conversion", self.conversion, CONVERSIONS)
        _checks.check_choice("between_records", self.between_records, BETWEEN_RECORDS)
        if self.orders is not None:
            object.__setattr__(self, "orders", check_orders(self.orders))
        if self.preset is not None:
            _checks.check_choice("preset", self.preset, PRESETS)
            object.__setattr__(self, "accountant", "rdp")
            object.__setattr__(self, "conversion", "mironov2017")
            object.__setattr__(self, "between_records", "last")

    @property
    def rdp_orders(self) -> NDArray[np.float64] | None:
        """(n_orders,) exactly these Rényi orders; None for the search over the default grid."""
        return None if self.orders is None else np.asarray(self.orders, np.float64)
