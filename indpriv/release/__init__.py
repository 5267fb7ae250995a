"""EpsilonTable -> release: private statistics for others, and statements for owners.

release: quantiles and mean of individual epsilon with differential privacy, counted in a ledger.
private_median_norm: a clipping norm by the data, at a cost that the run adds to its epsilons.
docs/explanation/releases.md says why one person is one record of {epsilon_i}.
"""

from indpriv.release.ledger import METHODS as METHODS
from indpriv.release.ledger import Budget as Budget
from indpriv.release.ledger import Request as Request
from indpriv.release.ledger import parse_budget as parse_budget
from indpriv.release.ledger import parse_quantiles as parse_quantiles
from indpriv.release.mechanisms import private_median_norm as private_median_norm
from indpriv.release.publish import Published as Published
from indpriv.release.publish import release as release
