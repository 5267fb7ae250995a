"""NormLog -> accountant -> EpsilonTable: the privacy of each example. Needs no model and no torch.

`account` gives the epsilon of every example, `membership_risk` what its whole privacy curve says
about attacks, and `cap_rows` the guarantee under a cap on the rows of a unit. `compose` accounts
for several runs on the same people together.
"""

from indpriv.accountant.account import account
from indpriv.accountant.method import Method
from indpriv.accountant.privacy_filter import PrivacyFilter
from indpriv.accountant.risk import RiskTable, membership_risk
from indpriv.accountant.runs import Tuning, compose
from indpriv.accountant.units import cap_rows

__all__ = [
    "Method",
    "PrivacyFilter",
    "RiskTable",
    "Tuning",
    "account",
    "cap_rows",
    "compose",
    "membership_risk",
]
