"""What a run had learned and spent at its checkpoints, from RUN/curve.parquet."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from indpriv._files import read_parquet
from indpriv._plain import AtLeastZero, Count, Share
from indpriv._reading import named
from indpriv.errors import EvidenceError


@dataclass(frozen=True)
class Curve:
    """Checkpoints of a run; every field has one value for each.

    Attributes:
        steps: updates made. test_accuracy: of the model.
        epsilon: worst case up to there, by Opacus's RDP accountant; empty for a run that has no
            privacy.
    """

    steps: tuple[Count, ...]
    test_accuracy: tuple[Share, ...]
    epsilon: tuple[AtLeastZero, ...]

    @classmethod
    def read(cls, path: Path) -> Curve:
        """RUN/curve.parquet."""
        with named(path):
            kinds = {"step": "i", "test_accuracy": "fi", "worst_case_epsilon": "fi"}
            return cls.of(read_parquet(path, kinds=kinds))

    @classmethod
    def of(cls, table: pd.DataFrame) -> Curve:
        """From the columns of RUN/curve.parquet."""
        if table["step"].lt(0).any() or not table["test_accuracy"].between(0, 1).all():
            raise EvidenceError("steps are at least 0, and accuracies from 0 to 1")
        epsilon = table["worst_case_epsilon"].tolist()
        return cls(
            tuple(table["step"].tolist()),
            tuple(table["test_accuracy"].tolist()),
            () if np.isnan(epsilon).any() else tuple(epsilon),
        )

    def accuracy_at(self, epsilon: float) -> float | None:
        """Test accuracy when the worst case was this epsilon; None beyond the checkpoints.

        Between two checkpoints it is interpolated on a line.
        """
        if not self.epsilon or not self.epsilon[0] <= epsilon <= self.epsilon[-1]:
            return None
        return float(np.interp(epsilon, self.epsilon, self.test_accuracy))

    def epsilon_at(self, accuracy: float) -> float | None:
        """Worst case when test accuracy first reached this value; None if it never did."""
        return self._first(accuracy, self.epsilon)

    def step_at(self, accuracy: float) -> float | None:
        """Number of steps after which test accuracy first reached this value."""
        return self._first(accuracy, self.steps)

    def _first(self, accuracy: float, values: tuple[float, ...]) -> float | None:
        if values and self.test_accuracy[0] >= accuracy:
            return float(values[0])
        points = zip(values, self.test_accuracy, strict=False)
        for (value, reached), (later, better) in pairwise(points):
            if reached < accuracy <= better:
                return float(value + (later - value) * (accuracy - reached) / (better - reached))
        return None
