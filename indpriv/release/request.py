"""What a private release is to contain, checked, and how its budget is shared.

All of it is public: nothing is read off the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from indpriv._checks import check_choice, check_positive_int
from indpriv._columns import RESULTS
from indpriv.errors import InputError

EXPONENTIAL, HISTOGRAM, DESCENT = "exponential", "histogram", "descent"
METHODS = (EXPONENTIAL, HISTOGRAM, DESCENT)
DEFAULT_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of Table 2 of Yu et al. 2023
_QUANTILE_DIGITS = 4  # decimals; quantiles enter integer arithmetic as fractions
# Least of a share: noise for three layers fits OpenDP's 32 bits with probability 1 - exp(-71)
_LEAST_SHARE, _MOST_EPSILON = 1e-7, 1e4


@dataclass(frozen=True)
class Budget:
    """A cost or a limit: (epsilon, delta), summed exactly as the decimals that were passed."""

    epsilon: Fraction = Fraction(0)
    delta: Fraction = Fraction(0)

    @classmethod
    def of(cls, epsilon: float, delta: float) -> Budget:
        """From floats, read as the decimals that they are printed as: 0.1 is a tenth."""
        return cls(Fraction(repr(float(epsilon))), Fraction(repr(float(delta))))

    def __add__(self, other: Budget) -> Budget:
        return Budget(self.epsilon + other.epsilon, self.delta + other.delta)

    def covers(self, cost: Budget) -> bool:
        """Whether a cost is within this limit."""
        return cost.epsilon <= self.epsilon and cost.delta <= self.delta

    def to_json(self) -> dict[str, float]:
        """As floats."""
        return {"epsilon": float(self.epsilon), "delta": float(self.delta)}


@dataclass(frozen=True)
class Request:
    """Statistics to release, and what they may cost together.

    Attributes:
        quantiles: increasing, each in (0, 1), with at most four decimals.
        mean: whether the mean is released.
        epsilon, delta: cost of all statistics together, in addition to the training run's own
            guarantee.
        method: of the quantiles: "exponential" (private selection, pure), "histogram" (one noisy
            cumulative distribution for any number of quantiles, pure) or "descent" (Andrew et al.
            2021, Gaussian noise, needs a delta).
        by: column of a partition; "" for all people together.
        groups: names of its groups, declared public. People in none of them are in no figure.
        public_n: number of people, declared public; None: it is private, and estimated with noise
            where needed.

    Raises:
        InputError: a value out of range, or values that do not fit together.
    """

    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    mean: bool = False
    epsilon: float = field(kw_only=True)
    delta: float = field(default=0.0, kw_only=True)
    method: str = field(default=EXPONENTIAL, kw_only=True)
    by: str = field(default="", kw_only=True)
    groups: tuple[str, ...] = field(default=(), kw_only=True)
    public_n: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantiles", tuple(sorted(map(float, self.quantiles))))
        object.__setattr__(self, "groups", tuple(self.groups))
        if not (self.quantiles or self.mean):
            raise InputError("nothing to release; pass --quantiles 0.1,0.5,0.9, --mean, or both")
        _check_quantiles(self.quantiles)
        check_choice("method", self.method, METHODS)
        if not (_is_number(self.epsilon) and 0 < self.epsilon < math.inf):
            raise InputError(
                f"epsilon={self.epsilon} is not a finite number above 0; pass what this release "
                "may cost, e.g. 0.1"
            )
        self._check_delta()
        self._check_groups()
        if self.public_n is not None:
            check_positive_int("public_n", self.public_n)
        least = _LEAST_SHARE * len(self.shares)
        if not least <= self.epsilon <= _MOST_EPSILON:
            raise InputError(
                f"epsilon={self.epsilon} is not between {least:g}, below which all is noise, and "
                f"{_MOST_EPSILON:g}; pass e.g. 0.1"
            )

    def _check_delta(self) -> None:
        if not (_is_number(self.delta) and 0 <= self.delta < 1):
            raise InputError(
                f"delta={self.delta} is not in [0, 1); pass a value well below 1/n, e.g. 1e-6"
            )
        if self.method == DESCENT and self.delta == 0:
            raise InputError(
                "method='descent' adds Gaussian noise, which needs a delta; pass e.g. --delta 1e-6"
            )
        if self.method != DESCENT and self.delta > 0:
            raise InputError(
                f"method={self.method!r} spends no delta; leave --delta {self.delta:g} out"
            )

    def _check_groups(self) -> None:
        if ":bins=" in self.by:
            raise InputError(
                f"--by {self.by}: bins are cut at quantiles of the data, so their edges are "
                "private; make a column of groups with public edges"
            )
        if results := {part.strip() for part in self.by.split(",")} & {*RESULTS}:
            raise InputError(
                f"--by {self.by}: {min(results)} is of the final model, so that one person's data "
                "move others between groups, which no mechanism here allows for; choose a column "
                "of the data"
            )
        if bool(self.by) != bool(self.groups):
            raise InputError(
                f"--by {self.by or '(none)'} with groups {', '.join(self.groups) or '(none)'}: "
                "name a column and every group of it to show, e.g. --by sex --group Male --group "
                "Female. The list must be public: not taken from the data"
            )
        if len(set(self.groups)) < len(self.groups):
            raise InputError(
                f"a group is listed twice in {', '.join(self.groups)}; name each group once"
            )
        if self.groups and self.public_n is not None:
            raise InputError(
                "public_n is the number of people in all, not in each group; leave it out"
            )

    @property
    def cost(self) -> Budget:
        """What the release costs. Groups add nothing: a person is in at most one of them."""
        return Budget.of(self.epsilon, self.delta)

    @property
    def counts_people(self) -> bool:
        """Whether the number of people is estimated on its own, for groups or for descent."""
        needed = bool(self.groups) or self.method == DESCENT
        return needed and not self.mean and self.public_n is None

    @property
    def shares(self) -> tuple[str, ...]:
        """Statistics that share the budget equally.

        Each quantile is one, but a histogram is one for all quantiles. The mean and the count of
        people are one. Under descent the parts are of zero-concentrated privacy, and the rounds of
        a quantile share its part equally.
        """
        names = ["distribution"] if self.method == HISTOGRAM and self.quantiles else []
        names = names or [f"quantile {quantile:g}" for quantile in self.quantiles]
        if self.mean:
            names.append("mean" if self.public_n is not None else "mean and count")
        elif self.counts_people:
            names.append("count")
        return tuple(names)

    def to_json(self) -> dict[str, Any]:
        """Values that are equal for equal requests."""
        return {
            "quantiles": list(self.quantiles),
            "mean": self.mean,
            "epsilon": float(self.epsilon),
            "delta": float(self.delta),
            "method": self.method,
            "by": self.by,
            "groups": list(self.groups),
            "public_n": self.public_n,
        }


def as_fraction(quantile: float) -> Fraction:
    """A quantile as the decimal that it is printed as."""
    return Fraction(repr(quantile))


def _check_quantiles(quantiles: Iterable[float]) -> None:
    seen: set[float] = set()
    for quantile in quantiles:
        if not 0 < quantile < 1:
            raise InputError(
                f"quantile {quantile} is not in (0, 1); pass e.g. 0.1,0.5,0.9 (0 and 1 would be "
                "single people)"
            )
        if round(quantile, _QUANTILE_DIGITS) != quantile:
            raise InputError(
                f"quantile {quantile} has more than {_QUANTILE_DIGITS} decimals; round it"
            )
        if quantile in seen:
            raise InputError(
                f"quantile {quantile} is listed twice and would be paid for twice; list it once"
            )
        seen.add(quantile)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
