"""Frozen dataclasses as JSON: written, read back, and described by a JSON Schema.

What a field holds follows from its annotation: a dataclass, a tuple, a mapping from texts, a plain
value, or one of them or None. A data frame is `Annotated[pd.DataFrame, Columns(...)]`, in JSON a
list of one object a row. A field's metadata changes how it is written:

    {"json": "other_key"}             another key
    {"flatten": True}                 a nested dataclass whose keys stand among those of its parent
    {"flatten": "prefix_"}            the same, each key with a prefix
    {"flatten": {"inner": "outer"}}   the same, with these keys renamed
    {"via": Via(kind, write, read)}   converted to `kind` before it is written, and back

A key whose field has a default may be absent where JSON is read. A flattened field that may be None
is None where all its keys are null. `Annotated[float, Limits(0)]` narrows the schema.
"""

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import numpy as np
import pandas as pd

from indpriv.errors import InputError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the schema says of a value beyond its type: its range, or the only texts it can be."""

    minimum: float | None = None
    maximum: float | None = None
    texts: tuple[str, ...] = ()

    def allow(self, value: Any) -> bool:
        """Whether a value is within them."""
        low, high = self.minimum, self.maximum
        return value is None or (
            ((low is None or value >= low) and (high is None or value <= high))
            and (not self.texts or value in self.texts)
        )

    def keywords(self) -> dict[str, Any]:
        """As keywords of JSON Schema."""
        limits = {
            "minimum": self.minimum,
            "maximum": self.maximum,
            "enum": list(self.texts) or None,
        }
        return {key: limit for key, limit in limits.items() if limit is not None}


Share = Annotated[float, Limits(0, 1)]
AtLeastZero = Annotated[float, Limits(0)]
Count = Annotated[int, Limits(0)]


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a data frame.

    Attributes:
        name, text: of a row, in the schema.
        kinds: the type of each column and what it holds; NaN or None stands for an unknown value.
        optional: columns that JSON may lack; their values are then unknown.
    """

    name: str
    text: str
    kinds: Mapping[str, tuple[Any, str]]
    optional: Collection[str] = ()

    def frame(self, values: Mapping[str, Any], n: int) -> pd.DataFrame:
        """A frame of n rows with these columns in this order; those without values are unknown."""
        made = {
            name: pd.Series(values.get(name, [None] * n), range(n), _dtype(kind))
            for name, (kind, _) in self.kinds.items()
        }
        return pd.DataFrame(made, range(n))


def _dtype(kind: Any) -> Any:
    numbers = {bool: "bool", int: "Int64" if _allows_none(kind) else "int64", float: "float64"}
    return numbers.get(_without_limits(_without_none(kind)), object)


def records(frame: pd.DataFrame) -> Iterator[Any]:
    """The rows of a frame as named tuples, with None for what is unknown."""
    return frame.astype(object).where(frame.notna(), None).itertuples(index=False, name="Row")


_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Via:
    """How a field is written as a value of another kind, and read from it."""

    kind: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class _Field:
    """One field of a dataclass; optional: JSON may lack it."""

    name: str
    key: str
    kind: Any
    optional: bool
    metadata: Mapping[str, Any]

    @functools.cached_property
    def flattened(self) -> Any:
        """The dataclass whose keys stand among those of the parent; None for an ordinary field."""
        return _without_none(self.kind) if "flatten" in self.metadata else None

    def outer(self, key: str) -> str:
        """The parent's key of a key of the flattened dataclass."""
        how = self.metadata["flatten"]
        if isinstance(how, Mapping):
            return str(how.get(key, key))
        return key if how is True else f"{how}{key}"


def to_json(value: Any) -> Any:
    """A dataclass, mapping, sequence or scalar as JSON values.

    Raises:
        InputError: a number that is not finite.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_pairs(value))
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
        raise InputError(
            f"{value} cannot be written as JSON; use None for a quantity that is undefined"
        )
    return value


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    kind: Any = type(value)
    for field in _fields(kind):
        item = getattr(value, field.name)
        if field.flattened is not None:
            inner = (
                {key: None for key, _, _ in _keys(field.flattened)}
                if item is None
                else to_json(item)
            )
            yield from ((field.outer(key), part) for key, part in inner.items())
        else:
            via = field.metadata.get("via")
            yield field.key, to_json(item if via is None else via.write(item))


def from_json(kind: type[T], content: object, where: str = "audit.json") -> T:
    """Read what `to_json` wrote.

    Args:
        kind: the dataclass.
        content: JSON values.
        where: names the document in error messages.

    Raises:
        InputError: a key is absent, or a value is of another kind.
    """
    value: T = _read(kind, content, where, "")
    return value


def read_fields(
    kinds: Mapping[str, tuple[Any, str]], content: Mapping[str, Any], where: str = "audit.json"
) -> dict[str, Any]:
    """Read values by key, where each key has a kind and a meaning; errors as in `from_json`."""
    for key in kinds:
        if key not in content:
            raise InputError(f"{where} lacks {key}; make the audit again")
    return {key: _read(kind, content[key], where, key) for key, (kind, _) in kinds.items()}


def empty(kind: Any) -> Any:
    """The value of a kind that holds nothing: None, no rows, no items, or 0."""
    if _allows_none(kind):
        return None
    if typing.get_origin(kind) is Annotated and isinstance(of := typing.get_args(kind)[1], Columns):
        return of.frame({}, 0)
    kind = _without_limits(kind)
    return () if typing.get_origin(kind) is tuple else {} if typing.get_origin(kind) else kind()


def _read(kind: Any, content: Any, where: str, path: str) -> Any:
    if typing.get_origin(kind) is Annotated:
        kind, limits = typing.get_args(kind)
        if isinstance(limits, Columns):
            return _read_frame(limits, _expect(content, list, where, path), where, path)
        value = _read(kind, content, where, path)
        if not limits.allow(value):
            raise InputError(
                f"{where}: {path}={value!r:.60} is out of range ({limits.keywords()}); make the "
                "audit again"
            )
        return value
    if _allows_none(kind):
        return None if content is None else _read(_without_none(kind), content, where, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, _expect(content, Mapping, where, path), where, path)
    if origin is tuple:
        items = _expect(content, list | tuple, where, path)
        kinds = [arguments[0]] * len(items) if arguments[-1] is ... else arguments
        if len(kinds) != len(items):
            raise InputError(f"{where}: {path} has {len(items)} values, not {len(kinds)}")
        pairs = enumerate(zip(kinds, items, strict=True))
        return tuple(_read(each, item, where, f"{path}[{i}]") for i, (each, item) in pairs)
    if origin is not None and issubclass(origin, Mapping):
        items = _expect(content, Mapping, where, path)
        return {key: _read(arguments[1], items[key], where, f"{path}.{key}") for key in items}
    if kind is Any:
        return content
    if kind is float:
        value = float(_expect(content, int | float, where, path))
        if not math.isfinite(value):
            raise InputError(
                f"{where}: {path}={value} is not a finite number; make the audit again"
            )
        return value
    return _expect(content, kind, where, path)


def _read_dataclass(kind: Any, content: Mapping[str, Any], where: str, path: str) -> Any:
    values = {}
    for field in _fields(kind):
        inside = f"{path}.{field.key}".lstrip(".")
        if field.flattened is not None:
            keys = [key for key, _, _ in _keys(field.flattened)]
            inner = {key: content[field.outer(key)] for key in keys if field.outer(key) in content}
            absent = _allows_none(field.kind) and all(item is None for item in inner.values())
            values[field.name] = None if absent else _read(field.flattened, inner, where, path)
        elif field.key in content:
            via = field.metadata.get("via")
            found = _read(
                field.kind if via is None else via.kind, content[field.key], where, inside
            )
            values[field.name] = found if via is None else via.read(found)
        elif not field.optional:
            raise InputError(f"{where} lacks {inside}; make the audit again")
    return kind(**values)


def _read_frame(columns: Columns, rows: list[Any], where: str, path: str) -> pd.DataFrame:
    values: dict[str, list[Any]] = {name: [] for name in columns.kinds}
    for number, row in enumerate(rows):
        inside = f"{path}[{number}]"
        row = _expect(row, Mapping, where, inside)
        for name, (kind, _) in columns.kinds.items():
            if name in row:
                values[name].append(_read(kind, row[name], where, f"{inside}.{name}"))
            elif name in columns.optional:
                values[name].append(None)
            else:
                raise InputError(f"{where} lacks {inside}.{name}; make the audit again")
    return columns.frame(values, len(rows))


def _expect(content: Any, kind: Any, where: str, path: str) -> Any:
    if not isinstance(content, kind) or (isinstance(content, bool) and kind is not bool):
        name = getattr(kind, "__name__", str(kind))
        raise InputError(
            f"{where}: {path or 'the content'}={content!r:.60} is not a {name}; make the audit "
            "again"
        )
    return content


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of a dataclass: types from annotations, descriptions from docstrings.

    The first line of a class's docstring describes the class; its Attributes section describes the
    fields.
    """
    definitions: dict[str, Any] = {}
    top = _object(kind, definitions)
    return {**top, "$defs": dict(sorted(definitions.items()))}


def fields_schema(kinds: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """The JSON Schema of what `read_fields` reads."""
    definitions: dict[str, Any] = {}
    properties = {
        key: {"description": text} | _schema(kind, definitions)
        for key, (kind, text) in kinds.items()
    }
    return {
        "type": "object",
        "required": list(kinds),
        "additionalProperties": False,
        "properties": properties,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    properties, required = {}, []
    for key, field, text in _keys(kind):
        via = field.metadata.get("via")
        schema = _schema(field.kind if via is None else via.kind, definitions)
        properties[key] = ({"description": text} if text else {}) | schema
        if not field.optional:
            required.append(key)
    return {
        "description": inspect.getdoc(kind).splitlines()[0],  # type: ignore[union-attr]
        "type": "object",
        "required": required,
        "additionalProperties": False,
        "properties": properties,
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if typing.get_origin(kind) is Annotated:
        inner, limits = typing.get_args(kind)
        if isinstance(limits, Columns):
            definitions[limits.name] = {
                "description": limits.text,
                "type": "object",
                "required": [name for name in limits.kinds if name not in limits.optional],
                "additionalProperties": False,
                "properties": {
                    name: {"description": text} | _schema(kind, definitions)
                    for name, (kind, text) in limits.kinds.items()
                },
            }
            return {"type": "array", "items": {"$ref": f"#/$defs/{limits.name}"}}
        return {**_schema(inner, definitions), **limits.keywords()}
    if _allows_none(kind):
        inner = _schema(_without_none(kind), definitions)
        if isinstance(inner.get("type"), str) and "enum" not in inner:
            return {**inner, "type": [inner["type"], "null"]}
        return {"anyOf": [inner, {"type": "null"}]}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        name = typing.cast(type, kind).__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin is tuple and arguments[-1] is ...:
        items = _schema(arguments[0], definitions)
        return {"type": "array", **({"items": items} if items else {})}
    if origin is tuple:
        each, size = [_schema(part, definitions) for part in arguments], len(arguments)
        return {"type": "array", "prefixItems": each, "minItems": size, "maxItems": size}
    if origin is not None and issubclass(origin, Mapping):
        items = _schema(arguments[1], definitions)
        return {"type": "object", **({"additionalProperties": items} if items else {})}
    return {} if kind is Any else {"type": _SCALARS[kind]}


@functools.cache
def _keys(kind: Any) -> tuple[tuple[str, _Field, str], ...]:
    """Every JSON key of a dataclass with its field and description, flattened fields included."""
    return tuple(_each_key(kind))


def _each_key(kind: Any) -> Iterator[tuple[str, _Field, str]]:
    texts = _descriptions(kind)
    for field in _fields(kind):
        if field.flattened is None:
            yield field.key, field, texts.get(field.name, "")
            continue
        for key, inner, text in _keys(field.flattened):
            if _allows_none(field.kind) and not _allows_none(inner.kind):
                inner = dataclasses.replace(inner, kind=inner.kind | None)
            yield field.outer(key), inner, text


@functools.cache
def _fields(kind: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    return tuple(
        _Field(
            name=field.name,
            key=field.metadata.get("json", field.name),
            kind=hints[field.name],
            optional=field.default is not missing or field.default_factory is not missing,
            metadata=field.metadata,
        )
        for field in dataclasses.fields(kind)
    )


@functools.cache
def _descriptions(kind: Any) -> dict[str, str]:
    """Field -> its text in the Attributes section of the docstring; fields may share a text.

    Classes that it inherits from describe the fields that they have.
    """
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        doc = inspect.cleandoc(each.__doc__ or "")
        section = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
        for entry in re.split(r"\n    (?! )", "\n" + section[1]) if section else ():
            if match := _ENTRY.match(entry):
                text = " ".join(match[2].split())
                texts |= dict.fromkeys(match[1].split(", "), text[:1].upper() + text[1:])
    return texts


def _without_limits(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _allows_none(kind: Any) -> bool:
    return types.NoneType in typing.get_args(_without_limits(kind))


def _without_none(kind: Any) -> Any:
    kinds = [part for part in typing.get_args(kind) if part is not types.NoneType]
    return kinds[0] if _allows_none(kind) else kind
