"""The tables and records of an audit, made of columns.toml, which says what each column is."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd

from indpriv import _plain
from indpriv._plain import Columns, OneOf, figure
from indpriv.analysis.statistics.intervals import Interval, Shares, Span

_KINDS: dict[str, Any] = {
    **vars(_plain),
    **{"text": str, "yes or no": bool, "anything": Any},
    **{"Span": Span, "Shares": Shares},
}
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_EACH = _TABLES.pop("each")


def _kind(said: str) -> Any:
    """The kind that a column says."""
    if said.endswith(" list"):
        return tuple.__class_getitem__((_kind(said.removesuffix(" list")), ...))
    if said.endswith(" or null"):
        return _kind(said.removesuffix(" or null")) | None
    if " | " in said:
        return Annotated[str, OneOf(*said.split(" | "))]
    if said.startswith("shown "):
        _, form, _, unit, *least = said.split()
        return Annotated[float, figure(form, unit, **({"ge": 0} if least else {}))]
    return _KINDS[said]


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


GROUPS, SENSITIVITY, CHANGES, RATES, TRIED, BINS, ATTRIBUTES = (
    _columns(**_TABLES[name])
    for name in ("groups", "sensitivity", "changes", "rates", "tried", "bins", "attributes")
)
_KINDS["Groups"] = Annotated[pd.DataFrame, GROUPS]
_ONE = {
    f"{rate}{of}": (Annotated[kind, figure(form)], meaning)
    for rate, (value, span, meaning) in _EACH.items()
    for of, kind, form in (
        *(("", float, value), ("_n", int, ",")),
        *(("_interval", Interval, span), ("_joint", Interval, span)),
    )
}
Columns("Achieved", "What one attack achieves: see `rates.achieved`.", {**TRIED.kinds, **_ONE})


def table(columns: Columns, rows: Iterable[Mapping[str, Any]] = ()) -> pd.DataFrame:
    """A frame of these rows; what a row lacks is unknown."""
    rows = list(rows)
    return columns.frame(
        {name: [row.get(name) for row in rows] for name in columns.kinds}, len(rows)
    )


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
    _KINDS[about["name"]] = made
    return made
