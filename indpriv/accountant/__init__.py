"""NormLog -> accountant -> EpsilonTable: the privacy of each example. Needs no model and no torch.

`account` gives the epsilon of every example, `membership_risk` what its whole privacy curve says
about attacks, and `cap_rows` the guarantee under a cap on the rows of a unit. `compose` accounts
for several runs on the same people together; `composed_epsilons` evaluates five historical
composition rules, for comparison only.
"""

from indpriv.accountant.account import account
from indpriv.accountant.historical_rules import composed_epsilons
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
    "composed_epsilons",
    "membership_risk",
]
