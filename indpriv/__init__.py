"""indpriv audits the individual privacy of DP-SGD training runs.

    training run or saved checkpoints -> recording -> NormLog + ExampleTable
    NormLog -> accountant -> EpsilonTable
    EpsilonTable + ExampleTable (+ AttackScores <- attacks) -> analysis -> report
    EpsilonTable -> release

Reports are sensitive and for the curator of the data; releases are for others.

The names here are the audit side: they never import torch. The run side is `indpriv.recording`.
Each name is imported on first use, which keeps `import indpriv` and `indpriv --help` quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # in the order of the data flow
    # isort: off
    from indpriv.norm_log.norm_log import NormLog as NormLog
    from indpriv.example_table import ExampleTable as ExampleTable
    from indpriv.round_recorder import CanaryClients as CanaryClients
    from indpriv.round_recorder import RoundRecorder as RoundRecorder
    from indpriv.accountant import PrivacyFilter as PrivacyFilter
    from indpriv.accountant import RiskTable as RiskTable
    from indpriv.accountant import membership_risk as membership_risk
    from indpriv.accountant.account import account as account
    from indpriv.epsilon_table import EpsilonTable as EpsilonTable
    from indpriv.attack_scores import AttackScores as AttackScores
    from indpriv.attack_signals import AttackSignals as AttackSignals
    from indpriv._storage import upload as upload
    from indpriv.errors import EvidenceError as EvidenceError
    from indpriv.errors import InputError as InputError
    # isort: on


_MODULES = {  # public name -> the module that defines it
    "AttackScores": "indpriv.attack_scores",
    "AttackSignals": "indpriv.attack_signals",
    "CanaryClients": "indpriv.round_recorder",
    "EpsilonTable": "indpriv.epsilon_table",
    "EvidenceError": "indpriv.errors",
    "ExampleTable": "indpriv.example_table",
    "InputError": "indpriv.errors",
    "NormLog": "indpriv.norm_log.norm_log",
    "PrivacyFilter": "indpriv.accountant",
    "RiskTable": "indpriv.accountant",
    "RoundRecorder": "indpriv.round_recorder",
    "account": "indpriv.accountant",
    "membership_risk": "indpriv.accountant",
    "upload": "indpriv._storage",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
