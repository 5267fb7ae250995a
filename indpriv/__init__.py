"""indpriv audits the individual privacy of DP-SGD training runs.

    training run or saved checkpoints -> recording -> NormLog + ExampleTable
    NormLog -> accountant -> EpsilonTable
    EpsilonTable + ExampleTable (+ AttackScores <- attacks) -> analysis -> report     (for the curator: sensitive)
    EpsilonTable -> release                                                           (for others)

The names here are the audit side: they never import torch. The run side is `indpriv.recording`.
"""

# In the order of the data flow.
# isort: off
from indpriv.norm_log.norm_log import NormLog
from indpriv.example_table import ExampleTable
from indpriv.accountant import PrivacyFilter, RiskTable, account, membership_risk
from indpriv.epsilon_table import EpsilonTable
from indpriv.attack_scores import AttackScores
from indpriv.errors import EvidenceError, InputError
# isort: on

__all__ = [
    "AttackScores",
    "EpsilonTable",
    "EvidenceError",
    "ExampleTable",
    "InputError",
    "NormLog",
    "PrivacyFilter",
    "RiskTable",
    "account",
    "membership_risk",
]
