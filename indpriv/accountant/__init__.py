"""NormLog -> accountant -> EpsilonTable: how much privacy each example got. Needs no model and no torch.

account: the epsilon of every example. membership_risk: what its whole curve says of attacks. account_if,
noise_for_worst_case, noise_for_quantile: what other settings would have given. composed_epsilons: five historical rules,
for comparison only.
"""

from indpriv.accountant.composition import composed_epsilons
from indpriv.accountant.method import Method
from indpriv.accountant.per_example import account
from indpriv.accountant.privacy_filter import PrivacyFilter
from indpriv.accountant.risk import RiskTable, membership_risk
from indpriv.accountant.what_if import (
    account_if,
    cap_rows,
    noise_for_quantile,
    noise_for_worst_case,
)

__all__ = [
    "Method",
    "PrivacyFilter",
    "RiskTable",
    "account",
    "account_if",
    "cap_rows",
    "composed_epsilons",
    "membership_risk",
    "noise_for_quantile",
    "noise_for_worst_case",
]
