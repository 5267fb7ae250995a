"""The tables of an audit, and what columns.toml says of their rows and columns."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd

from indpriv import _kinds
from indpriv._kinds import figure
from indpriv._plain import Columns
from indpriv.analysis.statistics.intervals import Interval, Shares, Span

_KINDS: dict[str, Any] = {
    **vars(_kinds),
    **{"text": str, "texts": tuple[str, ...], "yes or no": bool, "Span": Span, "Shares": Shares},
}
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_EACH = _TABLES.pop("each")


def _columns(
    name: str, text: str, columns: Mapping[str, Any], optional: Sequence[str] = ()
) -> Columns:
    """The columns of one table."""
    kinds: dict[str, Any] = {}
    for column, (kind, meaning) in columns.items():
        known = _KINDS[kind.removesuffix(" or null")]
        if column == "rate":
            meaning = "; ".join(f"{rate}: {of}" for rate, (_, _, of) in _EACH.items()) + "."
        kinds[column] = (known | None if kind.endswith(" or null") else known, meaning)
    forms = {rate: form for rate, (form, _, _) in _EACH.items()}
    return Columns(name, text, kinds, optional, ("rate", forms) if "rate" in columns else None)


GROUPS, SENSITIVITY, RATES, TRIED, BINS, ATTRIBUTES = (
    _columns(**_TABLES[name])
    for name in ("groups", "sensitivity", "rates", "tried", "bins", "attributes")
)
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
