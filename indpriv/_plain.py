"""Dataclasses as JSON: written, read back by pydantic, and shown.

What a field holds follows from its annotation. A data frame is `Annotated[pd.DataFrame,
Columns(...)]`, in JSON a list of one object a row. A key whose field has a default may be absent
where JSON is read; keys that are not known are passed over. A kind of a column says also how values
are shown, in which unit they are, and whether they are private.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, NotRequired, TypeVar

import numpy as np
import pandas as pd
from pydantic import Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, core_schema
from typing_extensions import TypedDict

from indpriv import _formatting, _reading
from indpriv.errors import InputError

T = TypeVar("T")
Kinds = Mapping[str, tuple[Any, str]]  # key -> the kind of its value, and what it holds
_TABLES: dict[str, "Columns"] = {}  # by the name of a row

# --- kinds of columns: the type of a value, its limits, its unit and how it is shown. A column is
# private, since it is computed from the data, unless it or what holds it is `Public`.


def figure(form: str, unit: str = "1", **limits: Any) -> Any:
    """A kind of numbers: the format of `formatted` that shows it, its unit and its limits."""
    return Field(json_schema_extra={"unit": unit, "shown": form}, **limits)


Public = Annotated[T, Field(json_schema_extra={"private": False})]
Epsilon = Annotated[float, figure("eps", "nats", ge=0)]
LowerBound = Annotated[float, figure("least", "nats", ge=0)]
Shift = Annotated[float, figure("+.3f", "nats")]  # of epsilons
Error = Annotated[float, figure(".3f", "nats", ge=0)]  # of epsilons
Delta = Annotated[float, figure("delta", "probability", ge=0)]
PValue = Annotated[float, figure("p", "probability", ge=0, le=1)]
Share = Annotated[float, figure("share1", ge=0, le=1)]
RoundShare = Annotated[float, figure("share", ge=0, le=1)]
Ceiling = Annotated[float, figure("up", ge=0, le=1)]  # of a share
Loss = Annotated[float, figure("num", "nats")]
Number = Annotated[float, figure("num")]
AtLeastZero = Annotated[float, figure("num", ge=0)]
Correlation = Annotated[float, figure(".4f")]
Rounded = Annotated[float, figure(".2f")]
Percent = Annotated[float, figure("percent", ge=0)]
Points = Annotated[float, figure("points")]  # a difference of shares
OfRate = Annotated[float, figure("each")]
Count = Annotated[int, figure(",", ge=0)]
Seed = Annotated[int, figure("text")]


# --- tables and documents


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a data frame, where NaN or None stands for an unknown value."""

    name: str  # of a row, in the schema, as the next
    text: str
    kinds: Kinds
    optional: Collection[str] = ()  # columns that JSON may lack; their values are then unknown
    # A column, and the format "each" of its rows by their value of that column.
    each: tuple[str, Mapping[str, str]] | None = None

    def __post_init__(self) -> None:
        _TABLES[self.name] = self

    @functools.cached_property
    def columns(self) -> "Mapping[str, Column]":
        """What is known of each column."""
        return {name: column(kind) for name, (kind, _) in self.kinds.items()}

    def frame(self, values: Mapping[str, Any], n: int) -> pd.DataFrame:
        """A frame of n rows with these columns in this order; those without values are unknown."""
        made = {
            name: pd.Series(values.get(name, [None] * n), range(n), _dtype(kind))
            for name, (kind, _) in self.kinds.items()
        }
        return pd.DataFrame(made, range(n))

    def of_rows(self, rows: Iterable[Mapping[Any, Any]] = ()) -> pd.DataFrame:
        """A frame of these rows; what a row lacks is unknown."""
        rows = list(rows)
        return self.frame({name: [row.get(name) for row in rows] for name in self.kinds}, len(rows))

    def __get_pydantic_core_schema__(self, _kind: Any, handler: GetCoreSchemaHandler) -> Any:
        row: Any = keyed(self.name, self.kinds, self.text, self.optional)
        rows = handler.generate_schema(list[row])
        return core_schema.no_info_after_validator_function(self._read, rows)

    def _read(self, rows: list[dict[str, Any]]) -> pd.DataFrame:
        try:
            return self.of_rows(rows)
        except (OverflowError, TypeError) as error:  # kinds are right, numbers too large
            raise ValueError("its whole numbers should have 64 bits") from error


def keyed(name: str, kinds: Kinds, text: str = "", optional: Collection[str] = ()) -> Any:
    """The kind of an object of JSON with values by key."""
    fields = {key: Annotated[kind, Field(description=what)] for key, (kind, what) in kinds.items()}
    given = {key: NotRequired[kind] if key in optional else kind for key, kind in fields.items()}
    found = TypedDict(name, given)  # type: ignore[misc]
    found.__doc__ = text
    return found


def _alternatives(kind: Any) -> set[Any]:
    """The types that a union has, without limits."""
    if typing.get_origin(kind) is Annotated:
        return _alternatives(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return set().union(*map(_alternatives, typing.get_args(kind)))
    return {kind}


def _dtype(kind: Any) -> Any:
    kinds = _alternatives(kind)
    whole = "Int64" if types.NoneType in kinds else "int64"
    numbers = {bool: "bool", int: whole, float: "float64"}
    return numbers.get(next(iter(kinds - {types.NoneType})), object)


def records(frame: pd.DataFrame) -> Iterator[Any]:
    """The rows of a frame as tuples named as its table is, with None for what is unknown."""
    names = (one.name for one in _TABLES.values() if [*one.kinds] == [*frame.columns])
    name = next(names, "Row")
    return frame.astype(object).where(frame.notna(), None).itertuples(index=False, name=name)


class Column(NamedTuple):
    """A column of a table, or a field of a class."""

    kind: Any  # of its values; of the items of a list
    unit: str  # of a number; "" of anything else
    form: str  # the format of `formatted` that shows it; "" of rows and objects
    private: bool  # it is computed from the data, so not for publication


@functools.cache
def columns_of(kind: Any) -> Mapping[str, Column]:
    """The columns of a dataclass, or of a table by the name of its rows; else none."""
    if kind in _TABLES:
        return _TABLES[kind].columns
    if not dataclasses.is_dataclass(kind):
        return {}
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError:  # types that only a checker reads: no field is a column
        return {}
    names = (one.name for one in dataclasses.fields(kind))
    return {name: column(hints[name]) for name in names}


def column(kind: Any) -> Column:
    """The column whose values are of this kind."""
    said: dict[str, Any] = {}
    while True:
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            for mark in inside[1:]:
                said = (getattr(mark, "json_schema_extra", None) or {}) | said
            tables = [mark.name for mark in inside[1:] if isinstance(mark, Columns)]
            kind = tables[0] if tables else inside[0]
        elif origin in (typing.Union, types.UnionType):
            kind = next(one for one in inside if one is not types.NoneType)
        elif origin is tuple and inside:
            kind = inside[0]
        elif origin is Mapping:
            kind = inside[1]
        else:
            form = said.get("shown", "text" if kind in (str, bool) else "")
            return Column(kind, said.get("unit", ""), form, said.get("private", True))


def form_of(row: Any, name: str) -> str:
    """The format of a column of a row; "" of what is none. A mapping is a row of "Achieved"."""
    kind: Any = type(row) if dataclasses.is_dataclass(row) else type(row).__name__
    columns = columns_of("Achieved" if isinstance(row, Mapping) else kind)
    form = columns[name].form if name in columns else ""
    if form == "each" and (each := _TABLES[kind].each):
        return each[1][getattr(row, each[0])]
    return form


def shown(row: Any, name: str) -> str:
    """The value of a column of a row, in the format of that column."""
    return _formatting.formatted(getattr(row, name), form_of(row, name))


def to_json(value: Any) -> Any:
    """A dataclass, mapping, sequence or scalar as JSON values; InputError for one not finite."""
    if hasattr(value, "as_json"):
        return to_json(value.as_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, pd.DataFrame):
        return [to_json(row) for row in records(value)]
    if hasattr(value, "_asdict"):  # a row of a frame
        return to_json(value._asdict())
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{value} cannot be written as JSON; use None for what is undefined")
    return value


def from_json(kind: type[T], content: object, where: str = "audit.json") -> T:
    """Read what `to_json` wrote as a dataclass; InputError names the document and what is wrong."""
    try:
        value: T = _validator(typing.cast(Any, kind)).validate_python(content)
    except ValidationError as error:
        raise InputError(_reading.first_wrong(error, where, "make the audit again")) from error
    return value


@functools.cache
def _validator(kind: Any) -> SchemaValidator:
    return SchemaValidator(_strict(TypeAdapter(kind).core_schema))


def _strict(schema: Any) -> Any:
    """A schema of pydantic whose scalars are read as they are; texts may hold what UTF-8 cannot."""
    if isinstance(schema, list | tuple):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "str":
        return core_schema.is_instance_schema(str, cls_repr="text")
    found = {key: part if key == "metadata" else _strict(part) for key, part in schema.items()}
    if found.get("type") in ("int", "float", "bool"):
        found["strict"] = True
    return found | ({"allow_inf_nan": False} if found.get("type") == "float" else {})


def empty(kind: Any) -> Any:
    """The value of a kind that holds nothing: None, no rows, no items, or 0."""
    if types.NoneType in _alternatives(kind):
        return None
    if typing.get_origin(kind) is Annotated:
        kind, limits = typing.get_args(kind)[:2]
        if isinstance(limits, Columns):
            return limits.frame({}, 0)
    return () if typing.get_origin(kind) is tuple else {} if typing.get_origin(kind) else kind()
