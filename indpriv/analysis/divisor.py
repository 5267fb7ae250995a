"""Whether the divisor of gradients tells how many examples there are. Releasable.

Opacus divides the sum of clipped gradients and noise by the expected batch size int(n / L), where
L = ceil(n / batch size) is the number of batches of an epoch and 1 / L the sampling rate (Opacus
issues 571 and 819). The noise that anyone sees in an update has standard deviation
noise_multiplier * max_grad_norm / int(n / L). Where one unit more or fewer changes that divisor, it
changes the scale of the noise in every coordinate of every step, and a variance test tells the two
data sets apart, whatever epsilon says. So add/remove is not the relation that such a run satisfies;
with "zero_out", n and with it the divisor are the same in both data sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from indpriv._facts import text


@dataclass(frozen=True)
class Divisor:
    """How Opacus's divisor depends on the number of examples.

    Attributes:
        batch_size: expected batch size, by which gradients are divided.
        neighbour: the one with one unit more or fewer, if that is another; else None.
        rate_changes: the sampling rate can change with one unit more or fewer.
        advantage: largest true-positive less false-positive rate of a test of the variance that
            sees every update; 0 if the divisor stays.
        rows: largest number of rows of a unit.
    """

    batch_size: int
    neighbour: int | None
    rate_changes: bool
    advantage: float
    rows: int

    @property
    def tells_n(self) -> bool:
        """Whether updates tell how many examples there are."""
        return self.neighbour is not None or self.rate_changes

    def describe(self) -> str:
        """What is found, in sentences."""
        told = self.neighbour is not None
        return text(
            "hazard.divisor",
            "told" if told else "rate" if self.rate_changes else "same",
            divisor=self,
            more="one example" if self.rows == 1 else f"{self.rows:,} rows",
            advantage=100 * self.advantage,
        )


def divisor_of(
    n_examples: int, total_steps: int, recorder: Mapping[str, Any], *, rows: int = 1
) -> Divisor | None:
    """The divisor of a run that Opacus set up; None if it is not known, or was set by the user.

    The batch size that was given to the loader is not known, so the rate counts as changing if some
    batch size with this number of batches would change it.

    Args:
        n_examples: n.
        total_steps: number of updates that an attacker sees.
        recorder: what the recorder noted about the run.
        rows: largest number of rows of a unit.
    """
    n, batches = n_examples, recorder.get("steps_per_epoch")
    batch_size, ranks = recorder.get("expected_batch_size"), recorder.get("ranks", 1)
    if batches is None or batch_size is None or ranks != 1 or n <= rows:
        return None
    if batch_size < 1 or batch_size != _divisor(n, batches):
        return None
    # Batch sizes b with ceil(n / b) = L, for which fewer or more rows need L - 1 or L + 1 batches.
    one_batch_more = -(-n // batches) * batches < n + rows
    one_batch_fewer = batches > 1 and -(-(n - rows) // (batches - 1)) * (batches - 1) < n
    rate_changes = one_batch_more or one_batch_fewer
    if recorder.get("loss_reduction") != "mean":
        return Divisor(batch_size, None, rate_changes, 0.0, rows)
    others = {_divisor(n - rows, batches), _divisor(n + rows, batches)} - {batch_size, 0}
    neighbour = min(others, default=None)
    numbers = total_steps * int(recorder.get("n_parameters") or 1)
    advantage = 0.0 if neighbour is None else scale_advantage(batch_size / neighbour, numbers)
    return Divisor(int(batch_size), neighbour, rate_changes, advantage, rows)


def _divisor(n: int, batches: int) -> int:
    return int(n * (1 / batches))


def scale_advantage(ratio: float, numbers: int) -> float:
    """Total variation of this many normal numbers with standard deviation 1, and with `ratio`.

    The likelihood ratio grows with the sum of squares, which is chi-squared.

    >>> round(scale_advantage(600 / 599, 240 * 26_010), 4)
    0.9968
    """
    from scipy import stats

    squared = max(ratio, 1 / ratio) ** 2
    threshold = numbers * math.log(squared) * squared / (squared - 1)
    law = stats.chi2(numbers)
    return float(law.cdf(threshold) - law.cdf(threshold / squared))
