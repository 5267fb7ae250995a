"""How far an estimate still moves with the spacing of its records, where no exact values exist. Sensitive."""

from dataclasses import dataclass

import numpy as np

from indpriv._plain import AtLeastZero, Count, Share
from indpriv.analysis.statistics.correlation import pearson
from indpriv.epsilon_table import EpsilonTable


@dataclass(frozen=True)
class Spacing:
    """The account of every second record beside the account of all; shifts are every second minus all, in epsilon.

    A shift is no bound: the error of the estimate is of its order, and may be larger. In the Adult demo with 40 checkpoints,
    half an epoch apart, the mean shift was +0.05 where the mean error was +0.09.

    Attributes:
        n_records: records of the log.
        n_kept: every second of them.
        every: median number of steps between records of the log.
        between_records: what both accounts assume between records.
        pearson: Pearson's r between both; None where undefined.
        mean_shift: above 0, sparser records give larger epsilons.
        mean_absolute, p95_absolute, largest_absolute: of the shifts.
        share_larger: share of examples that get a larger epsilon from fewer records.
    """

    n_records: Count
    n_kept: Count
    every: Count
    between_records: str
    pearson: float | None
    mean_shift: float
    mean_absolute: AtLeastZero
    p95_absolute: AtLeastZero
    largest_absolute: AtLeastZero
    share_larger: Share


def spacing_effect(
    table: EpsilonTable, sparser: EpsilonTable, *, n_records: int, n_kept: int, every: int
) -> Spacing:
    """Compare the account of all records with that of every second one, of the same examples in the same order."""
    shift = sparser.epsilon - table.epsilon
    return Spacing(
        n_records=n_records,
        n_kept=n_kept,
        every=every,
        between_records=table.account.between_records,
        pearson=pearson(sparser.epsilon, table.epsilon),
        mean_shift=float(shift.mean()),
        mean_absolute=float(np.abs(shift).mean()),
        p95_absolute=float(np.quantile(np.abs(shift), 0.95)),
        largest_absolute=float(np.abs(shift).max()),
        share_larger=float((shift > 0).mean()),
    )
