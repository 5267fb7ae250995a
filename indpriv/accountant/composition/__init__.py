"""Several runs on the same people, and the five historical rules of composition."""

from indpriv.accountant.composition.historical_rules import composed_epsilons
from indpriv.accountant.composition.runs import compose
from indpriv.accountant.composition.tuning import Tuning

__all__ = ["Tuning", "compose", "composed_epsilons"]
