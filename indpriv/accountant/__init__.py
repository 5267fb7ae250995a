"""NormLog -> accountant -> EpsilonTable: the privacy of each example. Needs no model and no torch.

`account` gives the epsilon of every example, `membership_risk` what its whole privacy curve says
about attacks, and `cap_rows` the guarantee under a cap on the rows of a unit. `compose` accounts
for several runs on the same people together.
"""

from indpriv.accountant.account import account as account
from indpriv.accountant.method import Method as Method
from indpriv.accountant.privacy_filter import PrivacyFilter as PrivacyFilter
from indpriv.accountant.risk import RiskTable as RiskTable
from indpriv.accountant.risk import membership_risk as membership_risk
from indpriv.accountant.runs import Tuning as Tuning
from indpriv.accountant.runs import compose as compose
from indpriv.accountant.units import cap_rows as cap_rows
