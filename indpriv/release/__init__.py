"""EpsilonTable -> release: private statistics for others, and statements for owners.

release: quantiles and mean of individual epsilon with differential privacy, counted in a ledger.
private_median_norm: a clipping norm by the data, at a cost that the run adds to its epsilons.
statements: what one owner may be told. docs/explanation/releases.md says why one person is one
record of {epsilon_i}, and where that fails.
"""

from indpriv.release.mechanisms import private_median_norm
from indpriv.release.publish import Published, release
from indpriv.release.request import METHODS, Budget, Request, parse_budget, parse_quantiles

__all__ = [
    "METHODS",
    "Budget",
    "Published",
    "Request",
    "parse_budget",
    "parse_quantiles",
    "private_median_norm",
    "release",
]
