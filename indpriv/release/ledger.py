"""What a private release is to contain and may cost, and the ledger of an audit's (0600).

A request is public: nothing is read off the data. The ledger is an append-only hash-chained journal
in AUDIT_DIR/ledger, or in a folder that copies share, with one writer: two processes cannot both
spend what is left. A release exists, and is shown, once its line is on disk; a crash before that
has spent nothing. AUDIT_DIR/paid.json keeps length and last hash, release.json what was spent: a
ledger that is shorter or another is refused. A copy of the whole directory is not noticed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from indpriv import _files
from indpriv._checks import check_choice, check_number
from indpriv._columns import RESULTS
from indpriv._facts import damaged, refused, text
from indpriv._folders import make_folder
from indpriv._formatting import format_delta, format_epsilon
from indpriv._reading import AtLeastZero, Number, Text, check, table
from indpriv.errors import InputError

EXPONENTIAL, HISTOGRAM, DESCENT = "exponential", "histogram", "descent"
METHODS = (EXPONENTIAL, HISTOGRAM, DESCENT)
DEFAULT_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of Table 2 of Yu et al. 2023
_QUANTILE_DIGITS = 4  # decimals; quantiles enter integer arithmetic as fractions
# Least of a share: noise for three layers fits OpenDP's 32 bits with probability 1 - exp(-71)
_LEAST_SHARE, _MOST_EPSILON = 1e-7, 1e4

# Released statistics of one group, as in release.json: "quantiles" (quantile as text -> value,
# increasing), "mean" (None if it was not requested, or if the noise is larger than the group),
# "count" (noisy, None if none was needed) and "expected_error" of each, which is what the mechanism
# alone says: of a mean a bound, of a quantile in people by "rank" where values are close together,
# and "rank_at_most" for any data (None if there is no bound, as in descent).
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantiles", tuple(sorted(map(float, self.quantiles))))
        object.__setattr__(self, "groups", tuple(self.groups))
        cost = check_number("epsilon", self.epsilon, "(0, inf)", "pass what it may cost, e.g. 0.1")
        delta = check_number("delta", self.delta, "[0, 1)", "pass one well below 1/n, e.g. 1e-6")
        object.__setattr__(self, "epsilon", cost)  # of Python, for JSON, as the next
        object.__setattr__(self, "delta", delta)
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
        return (bool(self.groups) or self.method == DESCENT) and not self.mean

    @property
    def shares(self) -> tuple[str, ...]:
        """Statistics that share the budget equally; a histogram is one for all quantiles.

        Under descent shares are of zero-concentrated privacy, which rounds share equally.
        """
        names = ["distribution"] if self.method == HISTOGRAM and self.quantiles else []
        names = names or [f"quantile {quantile:g}" for quantile in self.quantiles]
        names += ["mean and count"] * self.mean + ["count"] * self.counts_people
        return tuple(names)

    def to_json(self) -> dict[str, Any]:
        """Values that are equal for equal requests."""
        lists = {"quantiles": list(self.quantiles), "groups": list(self.groups)}
        return vars(self) | lists | self.cost.to_json()


def as_fraction(quantile: float) -> Fraction:
    """A quantile as the decimal that it is printed as."""
    return Fraction(repr(quantile))


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


# --- the ledger

FOLDER, PAID, SHAREABLE, RELEASE_JSON = "ledger", "paid.json", "shareable", "release.json"
_SCHEMA = 1
_COSTS: dict[Any, str] = {
    Annotated[AtLeastZero, Field(gt=0)]: "epsilon",
    Annotated[AtLeastZero, Field(lt=1)]: "delta",
}
_LINES = {
    "open": table({Text: "fingerprint"}),
    "budget": table(_COSTS),
    "release": table({**_COSTS, dict[str, Any]: "request", dict[str, FIGURES]: "figures"}),  # type: ignore[valid-type]
}


class Ledger:
    """The one open ledger of a directory, which holds its lock until it is closed."""

    def __init__(self, directory: Path, fingerprint: str, folder: str | Path | None = None) -> None:
        """Open or start the ledger of an audit (or run), in its directory or in `folder`.

        InputError: another process has it open, or it is of other values (another fingerprint) or
        releases. EvidenceError: a line was changed or lost.
        """
        self._paid = make_folder(directory) / PAID
        folder = make_folder(Path(folder)) if folder else make_folder(directory, FOLDER)
        self._journal = _files.JournalWriter(folder)
        with _files.on_failure(self._journal.close):
            self._entries = self._journal.entries
            if self._entries:
                _check_lines(folder, self._entries, fingerprint)
            _compare(folder, self._entries, directory)
            if not self._entries:
                self._append("open", schema=_SCHEMA, fingerprint=fingerprint)

    @property
    def budget(self) -> Budget | None:
        """The limit on all releases together, None if none was set."""
        return next((_cost(entry) for entry in self._entries if entry["kind"] == "budget"), None)

    @property
    def spent(self) -> Budget:
        """What all releases cost together."""
        return sum(map(_cost, self.releases), Budget())

    @property
    def releases(self) -> list[dict[str, Any]]:
        """The lines of all releases."""
        return [entry for entry in self._entries if entry["kind"] == "release"]

    def set_budget(self, budget: Budget) -> None:
        """Limit all releases together; InputError if another limit is set, or more is spent."""
        if self.budget not in (None, budget):
            raise refused("refusal.ledger", "set_once", budget=self.budget)
        if not budget.covers(self.spent):
            raise InputError(f"{self.spent} is spent already, more than a budget of {budget}")
        if self.budget is None:
            self._append("budget", **budget.to_json())

    def stored(self, request: Request) -> dict[str, Any] | None:
        """Figures of the last release that answered the same request, None if there was none."""
        unnamed: dict[str, Any] = {"public_n": None}  # a request of before could name it
        wanted = unnamed | request.to_json()
        every = [(entry["figures"], unnamed | entry["request"]) for entry in self.releases]
        same = [figures for figures, asked in every if asked == wanted]
        return same[-1] if same else None

    def record(self, request: Request, figures: Mapping[str, Any]) -> None:
        """Append a release; it is on disk when this returns."""
        self._append(
            "release", request=request.to_json(), figures=dict(figures), **request.cost.to_json()
        )

    def _append(self, kind: str, **values: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        self._journal.append(kind, time=time, **values)
        self._entries.append({"kind": kind, "time": time, **values})
        if kind != "open":  # which nothing was paid with
            paid = {"lines": len(self._journal), "chain": self._journal.chain}
            _files.write_json(self._paid, paid)

    def close(self) -> None:
        """Release the lock."""
        self._journal.close()


def _check_lines(folder: Path, entries: list[dict[str, Any]], fingerprint: str) -> None:
    first = entries[0]
    kind, schema = first.get("kind"), first.get("schema")
    if (kind, schema) != ("open", _SCHEMA):
        said = {"folder": folder, "schema": _SCHEMA, "kind": kind, "other": schema}
        raise damaged("refusal.ledger", "schema", **said)
    if first.get("fingerprint") != fingerprint:
        raise refused("refusal.ledger", "other_values", folder=folder)
    for number, entry in enumerate(entries, 1):
        kind, where = str(entry.get("kind")), f"{folder / _files.JOURNAL} line {number}"
        if kind not in _LINES:
            raise damaged("refusal.ledger", "kind", where=where, kind=kind)
        check(_LINES[kind], entry, where)


def _compare(folder: Path, entries: list[dict[str, Any]], directory: Path) -> None:
    """Refuse a ledger that is not, or not beyond, what a directory says that its releases cost."""
    releases = (_cost(entry) for entry in entries if entry["kind"] == "release")
    spent = [*accumulate(releases, initial=Budget())]
    lines = [{"lines": n, "chain": at} for n, at in enumerate(_files.chains(entries))]
    costs = [{"releases": n, **cost.to_json()} for n, cost in enumerate(spent)]
    for name, states in ((PAID, lines), (f"{SHAREABLE}/{RELEASE_JSON}", costs)):
        path = directory / name
        content = _files.read_json(path) if path.is_file() else states[0]
        told = {key: _files.first_at(content, ("spent", key), (key,)) for key in states[0]}
        if told not in states:
            said = {"folder": folder, "n": len(entries), "spent": spent[-1], "path": path}
            raise refused("refusal.ledger", "cut", told=told, **said)


def _cost(entry: Mapping[str, Any]) -> Budget:
    return Budget.of(entry["epsilon"], entry["delta"])
