"""The JSON Schema of audit.json, from the findings and indpriv/analysis/columns.toml.

`make schema` writes it to indpriv/report/audit.schema.json.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from indpriv import _plain
from indpriv.analysis.summary import FIXED, LATER, SCHEMA_VERSION, SENSITIVE, keys

_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.+)", re.DOTALL)


def audit_schema() -> dict[str, Any]:
    """The JSON Schema of audit.json, which report/audit.schema.json holds."""
    schema = fields_schema(keys(), LATER)
    fixed = {key: {"const": value} for key, value in FIXED.items()}
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
        "required": [*fixed, "meaning", *schema["required"]],
        "properties": {**fixed, "meaning": meaning, **schema["properties"]},
    }


def fields_schema(kinds: _plain.Kinds, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON Schema of an object with these keys, described by the docstrings of its classes."""
    kind = _plain.keyed("Top", kinds, optional=optional)
    return TypeAdapter(kind).json_schema(schema_generator=_Schema, mode="validation")


class _Schema(GenerateJsonSchema):
    """No titles, no defaults, no further keys; descriptions from docstrings."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        found = super().nullable_schema(schema)
        inner = found["anyOf"][0]
        if isinstance(inner.get("type"), str) and "enum" not in inner:
            return {**inner, "type": [inner["type"], "null"]}
        return found

    def typed_dict_schema(self, schema: Any) -> dict[str, Any]:
        return self._closed(super().typed_dict_schema(schema))

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        kind = schema["cls"]
        found = self._closed(super().dataclass_schema(schema))
        found["description"] = (inspect.getdoc(kind) or "").splitlines()[0]
        texts = _descriptions(kind)
        for name, field in found["properties"].items():
            if name in texts:
                found["properties"][name] = {"description": texts[name], **field}
        return found

    @staticmethod
    def _closed(found: dict[str, Any]) -> dict[str, Any]:
        found.pop("title", None)
        return {**found, "additionalProperties": False}


@functools.cache
def _descriptions(kind: Any) -> dict[str, str]:
    """Field -> its text in the Attributes section of a class, or of one that it inherits from."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        texts |= vars(each).get("_texts", {})
        doc = inspect.cleandoc(each.__doc__ or "")
        section = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
        for entry in re.split(r"\n    (?! )", "\n" + section[1]) if section else ():
            if match := _ENTRY.match(entry):
                text = " ".join(match[2].split())
                texts |= dict.fromkeys(match[1].split(", "), text[:1].upper() + text[1:])
    return texts


if __name__ == "__main__":
    print(json.dumps(audit_schema(), indent=2, ensure_ascii=False))
