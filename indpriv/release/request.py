"""What a private release is to contain, checked, how its budget is shared, and what answers it.

A request is public: nothing is read off the data.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from indpriv._checks import check_choice, check_positive_int
from indpriv._columns import RESULTS
from indpriv._facts import refused, text
from indpriv._formatting import format_delta, format_epsilon
from indpriv._reading import Number, table
from indpriv.errors import InputError

EXPONENTIAL, HISTOGRAM, DESCENT = "exponential", "histogram", "descent"
METHODS = (EXPONENTIAL, HISTOGRAM, DESCENT)
DEFAULT_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of Table 2 of Yu et al. 2023
_QUANTILE_DIGITS = 4  # decimals; quantiles enter integer arithmetic as fractions
# Least of a share: noise for three layers fits OpenDP's 32 bits with probability 1 - exp(-71)
_LEAST_SHARE, _MOST_EPSILON = 1e-7, 1e4

# Released statistics of one group, as in release.json: "quantiles" (quantile as text -> value,
# increasing), "mean" (None if it was not requested, or if the noise is larger than the group),
# "count" (noisy number of people, None if none was needed) and "expected_error" of each, which is
# what the mechanism alone says: of a mean a bound in its unit, of a count in people, of a quantile
# in people by "rank" where values are close together, and "rank_at_most" for any data (None if
# there is no bound, as in descent).
Figures = dict[str, Any]
_RANK_ERROR = table({Number: "rank rank_at_most?"})
_ERRORS = table({dict[str, _RANK_ERROR]: "quantiles", Number: "mean? count?"})  # type: ignore[valid-type]
FIGURES = table({dict[str, Number]: "quantiles", Number: "mean? count?", _ERRORS: "expected_error"})


@dataclass(frozen=True)
class Budget:
    """A cost or a limit: (epsilon, delta), summed exactly as the decimals that were passed."""

    epsilon: Fraction = Fraction(0)
    delta: Fraction = Fraction(0)

    @classmethod
    def of(cls, epsilon: float, delta: float) -> "Budget":
        """From floats, read as the decimals that they are printed as: 0.1 is a tenth."""
        return cls(Fraction(repr(float(epsilon))), Fraction(repr(float(delta))))

    def __add__(self, other: "Budget") -> "Budget":
        return Budget(self.epsilon + other.epsilon, self.delta + other.delta)

    def covers(self, cost: "Budget") -> bool:
        """Whether a cost is within this limit."""
        return cost.epsilon <= self.epsilon and cost.delta <= self.delta

    def to_json(self) -> dict[str, float]:
        """As floats."""
        return {"epsilon": float(self.epsilon), "delta": float(self.delta)}

    def __str__(self) -> str:
        """Rounded up."""
        delta = format_delta(float(self.delta)) if self.delta else "0"
        return f"(epsilon {format_epsilon(float(self.epsilon))}, delta {delta})"


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
        for problem in self._problems():
            raise InputError(problem)

    def _problems(self) -> Iterator[str]:
        epsilon, delta, by = self.epsilon, self.delta, self.by
        if not (self.quantiles or self.mean):
            yield "nothing to release; pass --quantiles 0.1,0.5,0.9, --mean, or both"
        for quantile, earlier in zip(self.quantiles, (None, *self.quantiles), strict=False):
            if not 0 < quantile < 1:
                yield text("refusal.request", "quantile", quantile=quantile)
            if round(quantile, _QUANTILE_DIGITS) != quantile:
                yield f"quantile {quantile} has more than {_QUANTILE_DIGITS} decimals; round it"
            if quantile == earlier:
                yield text("refusal.request", "twice", quantile=quantile)
        check_choice("method", self.method, METHODS)
        if not (_is_number(epsilon) and 0 < epsilon < math.inf):
            yield text("refusal.request", "epsilon", epsilon=epsilon)
        if not (_is_number(delta) and 0 <= delta < 1):
            yield f"delta={delta} is not in [0, 1); pass a value well below 1/n, e.g. 1e-6"
        if self.method == DESCENT and delta == 0:
            yield text("refusal.request", "descent")
        if self.method != DESCENT and delta > 0:
            yield f"method={self.method!r} spends no delta; leave delta={delta:g} out"
        if ":bins=" in by:
            yield text("refusal.request", "bins", by=by)
        if results := {part.strip() for part in by.split(",")} & {*RESULTS}:
            yield text("refusal.request", "results", by=by, column=min(results))
        if bool(by) != bool(self.groups):
            groups = ", ".join(self.groups) or "(none)"
            yield text("refusal.request", "groups", by=by or "(none)", groups=groups)
        if len(set(self.groups)) < len(self.groups):
            yield f"a group is listed twice in {', '.join(self.groups)}; name each group once"
        if self.groups and self.public_n is not None:
            yield "public_n is the number of people in all, not in each group; leave it out"
        if self.public_n is not None:
            check_positive_int("public_n", self.public_n)
        least = _LEAST_SHARE * len(self.shares)
        if not least <= epsilon <= _MOST_EPSILON:
            yield text("refusal.request", "range", epsilon=epsilon, least=least, most=_MOST_EPSILON)

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
        lists = {"quantiles": list(self.quantiles), "groups": list(self.groups)}
        return vars(self) | lists | self.cost.to_json()


def as_fraction(quantile: float) -> Fraction:
    """A quantile as the decimal that it is printed as."""
    return Fraction(repr(quantile))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_budget(text: str) -> Budget:
    """A budget from "EPSILON" or "EPSILON,DELTA".

    >>> parse_budget("0.5,1e-6").to_json()
    {'epsilon': 0.5, 'delta': 1e-06}
    """
    parts = text.split(",")
    try:
        epsilon, delta = float(parts[0]), float(parts[1]) if len(parts) > 1 else 0.0
    except ValueError:
        epsilon, delta = -1.0, -1.0
    if len(parts) > 2 or not (0 < epsilon < float("inf") and 0 <= delta < 1):
        raise refused("refusal.request", "budget", text=text)
    return Budget.of(epsilon, delta)


def parse_quantiles(text: str) -> tuple[float, ...]:
    """Quantiles from a list such as "0.1,0.5,0.9"; none from an empty text.

    >>> parse_quantiles("0.1, 0.9")
    (0.1, 0.9)
    """
    try:
        return tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as error:
        raise refused("refusal.request", "numbers", text=text) from error
