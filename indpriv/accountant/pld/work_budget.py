"""How much work one call may do, so that none runs for hours whatever it is given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WorkBudget:
    """Work that is left, counted in elementary operations: never in seconds, so that results do not hang on the machine."""

    left: float

    def affords(self, work: float) -> bool:
        """Spend the work if there is enough left; else leave what there is to smaller pieces."""
        if work > self.left:
            return False
        self.left -= work
        return True
