"""How far epsilons move with choices that somebody made: the rounding of norms, and what holds between records. Sensitive.

The same log is accounted again under another choice. A shift is no error: it says how much of a figure is the choice's.
"""

from dataclasses import dataclass

import numpy as np

from indpriv._plain import AtLeastZero, Count, Share
from indpriv.analysis.statistics.correlation import pearson
from indpriv.epsilon_table import EpsilonTable


@dataclass(frozen=True)
class Sensitivity:
    """One choice changed; shifts are the epsilon under the other choice minus the one of this audit.

    Attributes:
        choice: "rounding" or "between_records".
        here: its value in this audit; instead: the other one.
        n: examples compared.
        pearson: Pearson's r between both; None where undefined.
        mean_shift: above 0, the other choice gives larger epsilons.
        p95_absolute, largest_absolute: of the absolute shifts.
        share_smaller: share of examples that the other choice gives a smaller epsilon.
    """

    choice: str
    here: str
    instead: str
    n: Count
    pearson: float | None
    mean_shift: float
    p95_absolute: AtLeastZero
    largest_absolute: AtLeastZero
    share_smaller: Share


def sensitivity_to(choice: str, here: EpsilonTable, instead: EpsilonTable) -> Sensitivity:
    """Compare two accounts of the same examples, in the same order, that differ in one choice.

    Args:
        choice: "rounding" or "between_records", a field of `Account`.
        here: the audit's own account.
        instead: the other.
    """
    shift = instead.epsilon - here.epsilon
    return Sensitivity(
        choice=choice,
        here=str(getattr(here.account, choice)),
        instead=str(getattr(instead.account, choice)),
        n=len(shift),
        pearson=pearson(instead.epsilon, here.epsilon),
        mean_shift=float(shift.mean()),
        p95_absolute=float(np.quantile(np.abs(shift), 0.95)),
        largest_absolute=float(np.abs(shift).max()),
        share_smaller=float((shift < 0).mean()),
    )
