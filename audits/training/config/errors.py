"""What is wrong with an audit file, in one sentence: from pydantic's errors and the JSON Schema."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

Schema = Mapping[str, Any]

UNKNOWN, MISSING = "unexpected_keyword_argument", "missing"  # pydantic's names


def explain(error: ValidationError, schema: Schema, whole: str = "the file") -> str:
    """One problem: an unknown key, else all missing keys of a table, else a wrong value.

    whole: what the schema describes.
    """
    problems = error.errors()
    kinds = [problem["type"] for problem in problems]
    kind = next((kind for kind in (UNKNOWN, MISSING) if kind in kinds), kinds[0])
    problem = problems[kinds.index(kind)]
    if kind not in (UNKNOWN, MISSING):
        return _wrong_value(problem["loc"], problem["input"], problem.get("ctx", {}), schema)
    *tables, key = problem["loc"]
    where = f"[{tables[0]}]" if tables else whole
    if kind == MISSING:
        missing = [
            str(other["loc"][-1])
            for other in problems
            if other["type"] == MISSING and list(other["loc"][:-1]) == tables
        ]
        return f"{where} lacks {', '.join(missing)}"
    known = list(_keys_of(str(tables[0]), schema) if tables else schema["properties"])
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where} has the key {key!r}, which is not known; {hint}known are {', '.join(known)}"


def _wrong_value(
    location: tuple[int | str, ...], value: object, context: Mapping[str, Any], schema: Schema
) -> str:
    """A value that is not accepted, or (in `context`) values that do not fit together."""
    if not location:
        return str(context["error"])
    if isinstance(value, Mapping) and len(location) > 1 and "error" in context:  # of a schedule
        return f"[{location[0]}] {location[1]}: {context['error']}"
    section = str(location[0])
    if "$ref" not in _variants(schema["properties"][section])[0]:  # a key outside tables
        return _rejected(section, value, schema["properties"][section])
    if len(location) == 1:
        if "error" in context:
            return f"[{section}] {context['error']}"
        return f"{section} = {value!r} is not a table; write it as [{section}]"
    key = str(location[1])
    accepted = _keys_of(section, schema)[key]
    if any(isinstance(part, int) for part in location[2:]):
        accepted = _variants(accepted)[0]["items"]
    return f"[{section}] {_rejected(key, value, accepted)}"


def _rejected(key: str, value: object, schema: Schema) -> str:
    accepted = " or ".join(_in_words(variant) for variant in _variants(schema))
    return f"{key} = {value!r} is not accepted; it takes {accepted}"


def _keys_of(section: str, schema: Schema) -> Mapping[str, Schema]:
    name = _variants(schema["properties"][section])[0]["$ref"].rpartition("/")[2]
    keys: Mapping[str, Schema] = schema["$defs"][name]["properties"]
    return keys


def _variants(schema: Schema) -> list[Schema]:
    """The schemas that a value may follow, without null."""
    variants = schema.get("anyOf", [schema])
    return [variant for variant in variants if variant.get("type") != "null"]


def _in_words(schema: Schema) -> str:
    """What a JSON Schema accepts."""
    if "description" in schema:
        return str(schema["description"])
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    if "$ref" in schema:
        return 'a schedule such as { law = "linear", start = 4.0, end = 2.0 }'
    if schema["type"] == "boolean":
        return "true or false"
    if schema["type"] == "array":
        return f"a list of at least {schema['minItems']}" if "minItems" in schema else "a list"
    words = {
        "exclusiveMinimum": "above",
        "minimum": "of at least",
        "maximum": "of at most",
        "exclusiveMaximum": "below",
    }
    limits = [f"{word} {schema[key]:g}" for key, word in words.items() if key in schema]
    number = "a whole number" if schema["type"] == "integer" else "a number"
    return f"{number} {' and '.join(limits)}"
