"""What an audit finds: tables and records by columns.toml, findings, and the audit. Sensitive.

A finding is one file of `indpriv.analysis` with `FINDING` or `FINDINGS`, and one template.
"""

import pkgutil
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import pandas as pd

from indpriv import _plain
from indpriv._facts import Fact, refused
from indpriv._plain import Columns, figure
from indpriv._types import OneOf
from indpriv.analysis.statistics import Interval, Shares, Span
from indpriv.epsilon_table import DISCLAIMER, Account

KINDS: dict[str, Any] = {  # as columns.toml says them
    **vars(_plain),
    **{"text": str, "yes or no": bool, "anything": Any},
    **{"Span": Span, "Shares": Shares, "Point": tuple[_plain.Share, _plain.Share]},
    **{"Account": Account, "Fact": Fact},
}
_TABLES = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
_EACH = _TABLES.pop("each")


def _kind(said: str) -> Any:
    """The kind that a column says."""
    if said.startswith("public "):
        return _plain.Public[_kind(said.removeprefix("public "))]  # type: ignore[misc]
    if said.endswith(" by name"):
        return Mapping.__class_getitem__((str, _kind(said.removesuffix(" by name"))))  # type: ignore[attr-defined]
    if said.endswith(" list"):
        return tuple.__class_getitem__((_kind(said.removesuffix(" list")), ...))
    if said.endswith(" or null"):
        return _kind(said.removesuffix(" or null")) | None
    if " | " in said:
        return Annotated[str, OneOf(*said.split(" | "))]
    if said.startswith("shown "):
        _, form, _, unit, *least = said.split()
        return Annotated[float, figure(form, unit, **({"ge": 0} if least else {}))]
    return KINDS[said]


def _columns(
    name: str, text: str, columns: Mapping[str, Any], optional: Sequence[str] = ()
) -> Columns:
    """The columns of one table."""
    kinds = {column: (_kind(kind), meaning) for column, (kind, meaning) in columns.items()}
    if "rate" not in columns:
        return Columns(name, text, kinds, optional)
    every = "; ".join(f"{rate}: {meaning}" for rate, (_, _, meaning) in _EACH.items())
    forms = {rate: form for rate, (form, _, _) in _EACH.items()}
    return Columns(name, text, kinds | {"rate": (str, f"{every}.")}, optional, ("rate", forms))


_NAMES = ("groups", "sensitivity", "changes", "rates", "tried", "bins", "attributes")
GROUPS, SENSITIVITY, CHANGES, RATES, TRIED, BINS, ATTRIBUTES = _FRAMES = [
    _columns(**_TABLES[name]) for name in _NAMES
]
for _name, _frame in zip(_NAMES, _FRAMES, strict=True):
    KINDS[_name.capitalize()] = Annotated[pd.DataFrame, _frame]
_ONE = {
    f"{rate}{of}": (Annotated[kind, figure(form)], meaning)
    for rate, (value, span, meaning) in _EACH.items()
    for of, kind, form in (
        *(("", float, value), ("_n", int, ",")),
        *(("_interval", Interval, span), ("_joint", Interval, span)),
    )
}
Columns("Achieved", "What one attack achieves: see `rates.achieved`.", {**TRIED.kinds, **_ONE})


def record(key: str, *bases: type) -> Any:
    """The dataclass of a record; bases: what it can do beside holding its columns."""
    about = _TABLES["records"][key]
    usual = dict.fromkeys(about.get("optional", ())) | about.get("usual", {})
    usual = {column: () if value == [] else value for column, value in usual.items()}
    fields: list[Any] = [
        (column, _kind(kind), *([field(default=usual[column])] if column in usual else []))
        for column, (kind, _) in about["columns"].items()
    ]
    of_frames = "Groups" in {kind for kind, _ in about["columns"].values()}  # which are not equal
    made: Any = make_dataclass(about["name"], fields, bases=bases, frozen=True, eq=not of_frames)
    made.__doc__ = about["text"]
    made._texts = {column: meaning for column, (_, meaning) in about["columns"].items()}
    KINDS[about["name"]] = made
    return made


SCHEMA_VERSION = 2
LATER = ("fitted", "vulnerability")  # keys that audits of earlier versions lack
SENSITIVE = "SENSITIVE: for the curator only"
# What every audit.json says alike.
FIXED = {"schema_version": SCHEMA_VERSION, "sensitive": SENSITIVE, "disclaimer": DISCLAIMER}


def nothing(_: "Audit") -> tuple[str, ...]:
    """Sentences of a finding that has none to say."""
    return ()


@dataclass(frozen=True, eq=False)
class Finding:
    """One thing that an audit looks at."""

    name: str  # of the finding, its template, and its keys of audit.json in columns.toml
    # values of its keys from an `AuditedRun`; what is left out is empty
    find: Callable[[Any], Mapping[str, Any]]
    # what contradicts the account, in sentences. Each fails the gate.
    alarms: Callable[["Audit"], Iterable[str]] = nothing
    watched: str = ""  # what the gate calls it that there are none
    # what the gate says of it to everybody, without figures of the data; None withholds
    public: Callable[["Audit"], str] | None = None
    # what a reader should look at, in sentences. None fails the gate.
    notes: Callable[["Audit"], Iterable[str]] = nothing

    @cached_property
    def keys(self) -> Mapping[str, tuple[Any, str]]:
        """Key of audit.json -> the kind of its value, and what it holds."""
        return {
            key: (_kind(kind), text) for key, (kind, text) in _TABLES["audit"][self.name].items()
        }

    def holds_something(self, audit: "Audit") -> bool:
        """Whether an audit has anything of this finding."""
        values = [getattr(audit, key) for key in self.keys]
        return any(len(one) if hasattr(one, "__len__") else one is not None for one in values)


@cache
def findings() -> tuple[Finding, ...]:
    """Every finding of `indpriv.analysis`, in the order of the page."""
    found: list[Finding] = []
    package = import_module("indpriv.analysis")
    for module in pkgutil.walk_packages(package.__path__, "indpriv.analysis."):
        defined = vars(import_module(module.name))
        found += [defined["FINDING"]] if "FINDING" in defined else defined.get("FINDINGS", ())
    order = [*_TABLES["audit"]]
    return tuple(sorted(found, key=lambda one: order.index(one.name)))


@cache
def keys() -> Mapping[str, tuple[Any, str]]:
    """Every key of audit.json: the kind of its value, and what it holds."""
    return {key: kind for finding in findings() for key, kind in finding.keys.items()}


@cache
def document() -> Any:
    """The kind of audit.json, without what every one says alike."""
    return _plain.keyed("Top", keys(), optional=LATER)


def column_at(path: str) -> _plain.Column:
    """The column of a figure, e.g. "individual.median"; private, unless it or its class is not."""
    first, *names = path.split(".")
    found = _plain.column(keys()[first][0])
    for name in names:
        inner = _plain.columns_of(found.kind)[name]
        found = inner._replace(private=found.private and inner.private)
    return found


@cache
def finding_of(key: str) -> Finding:
    """The finding that gives a key of audit.json."""
    return next(one for one in findings() if key in one.keys)


class Audit:
    """What an audit found: an attribute for each key of `keys`; without a value, it is empty."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getattr__(self, key: str) -> Any:
        if key not in keys():
            raise AttributeError(f"an audit has no {key!r}")
        return self._value(key)

    def _value(self, key: str) -> Any:
        value = self._values.get(key)
        return _plain.empty(keys()[key][0]) if value is None else value

    def replace(self, **values: Any) -> "Audit":
        """The same with other values."""
        return Audit(**(self._values | values))

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json: dicts, lists, texts and finite numbers."""
        content = {key: _plain.to_json(getattr(self, key)) for key in keys()}
        return {**FIXED, "meaning": self.account.describe(), **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Audit":
        """Read the content of audit.json; InputError for another version, or what lacks a key."""
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            raise refused("refusal.compared", "schema", version=version, known=SCHEMA_VERSION)
        return cls(**_plain.from_json(document(), content))


def alarms_of(audit: Audit) -> list[str]:
    """What contradicts the account, in sentences."""
    return [text for finding in findings() for text in finding.alarms(audit)]


def notes_of(audit: Audit) -> list[str]:
    """What a reader should look at, in sentences."""
    return [text for finding in findings() for text in finding.notes(audit)]


def attacks_on(found: Audit, model: str) -> list[Any]:
    """Rows of the attacks on one model, the strongest first."""
    return list(_plain.records(found.attacks[found.attacks["model"] == model]))
