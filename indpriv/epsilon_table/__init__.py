"""EpsilonTable: the epsilon of each example, in memory or in the parts of a data set. Sensitive."""

from indpriv.epsilon_table.parts import EpsilonParts, Epsilons, beside
from indpriv.epsilon_table.table import (
    DISCLAIMER,
    FALSE_POSITIVE_RATE,
    Account,
    EpsilonTable,
    relation_words,
)

__all__ = [
    "DISCLAIMER",
    "FALSE_POSITIVE_RATE",
    "Account",
    "EpsilonParts",
    "EpsilonTable",
    "Epsilons",
    "beside",
    "relation_words",
]
