"""Findings, and the audit that they make: everything found, by key of audit.json. Sensitive.

A finding is one file of `indpriv.analysis` with `FINDING` or `FINDINGS`, and one template.
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from indpriv import _plain
from indpriv.epsilon_table import DISCLAIMER
from indpriv.errors import InputError

SCHEMA_VERSION = 2
SENSITIVE = "SENSITIVE: for the curator only"


def nothing(_: "Audit") -> tuple[str, ...]:
    """Sentences of a finding that has none to say."""
    return ()


class Finding:
    """One thing that an audit looks at.

    Attributes:
        name: of the finding and of its template.
        place: on the page, from 0 on.
        find: values of its keys from an `AuditedRun`; what is left out is empty.
        alarms: what contradicts the account, in sentences. Each fails the gate.
        watched: what the gate calls it that there are none.
        public: what the gate says of it to everybody, without figures of the data; None withholds.
        notes: what a reader should look at, in sentences. None fails the gate.
        keys: key of audit.json -> the kind of its value, and what it holds.
    """

    def __init__(
        self,
        name: str,
        place: int,
        find: Callable[[Any], Mapping[str, Any]],
        /,
        *,
        alarms: Callable[["Audit"], Iterable[str]] = nothing,
        watched: str = "",
        public: Callable[["Audit"], str] | None = None,
        notes: Callable[["Audit"], Iterable[str]] = nothing,
        **keys: tuple[Any, str],
    ) -> None:
        self.name, self.place, self.find, self.keys = name, place, find, keys
        self.alarms, self.watched, self.public, self.notes = alarms, watched, public, notes

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
    return tuple(sorted(found, key=lambda one: (one.place, one.name)))


@cache
def keys() -> Mapping[str, tuple[Any, str]]:
    """Every key of audit.json: the kind of its value, and what it holds."""
    return {key: kind for finding in findings() for key, kind in finding.keys.items()}


def column_at(path: str) -> _plain.Column:
    """The column of a figure, e.g. "individual.median"; private, unless it or its class is not."""
    first, *names = path.split(".")
    found = _plain.column(*keys()[first])
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
        fixed = {key: schema["const"] for key, schema in _FIXED.items()}
        content = {key: _plain.to_json(getattr(self, key)) for key in keys()}
        return {**fixed, "meaning": self.account.describe(), **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Audit":
        """Read the content of audit.json.

        Raises:
            InputError: another schema version, a key is absent, or a value is of another kind.
        """
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"audit.json has schema_version={version!r}, not {SCHEMA_VERSION}; make the audit "
                "again"
            )
        return cls(**_plain.read_fields(keys(), content))


def alarms_of(audit: Audit) -> list[str]:
    """What contradicts the account, in sentences."""
    return [text for finding in findings() for text in finding.alarms(audit)]


def notes_of(audit: Audit) -> list[str]:
    """What a reader should look at, in sentences."""
    return [text for finding in findings() for text in finding.notes(audit)]


def attacks_on(found: Audit, model: str) -> list[Any]:
    """Rows of the attacks on one model, the strongest first."""
    return list(_plain.records(found.attacks[found.attacks["model"] == model]))


_FIXED: dict[str, dict[str, Any]] = {
    "schema_version": {"const": SCHEMA_VERSION},
    "sensitive": {"const": SENSITIVE},
    "disclaimer": {"const": DISCLAIMER},
}


def audit_schema() -> dict[str, Any]:
    """The JSON Schema of audit.json, which report/audit.schema.json holds."""
    schema = _plain.fields_schema(keys())
    meaning = {
        "description": "What every epsilon in this file means, in one line.",
        "type": "string",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:indpriv:audit:{SCHEMA_VERSION}",
        "title": "indpriv audit",
        **schema,
        "description": f"audit.json of an audit directory. {SENSITIVE}. "
        "Every number is finite; what is undefined is null. What does not say private: false is "
        "computed from the data, and not for publication.",
        "required": [*_FIXED, "meaning", *schema["required"]],
        "properties": {**_FIXED, "meaning": meaning, **schema["properties"]},
    }
