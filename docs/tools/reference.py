"""Reference tables generated from the code: commands, audit files, audit.json, checks."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from audit_schema import audit_schema

from audits.__main__ import app as audits_app
from audits.training import config
from indpriv._facts import FILES, INDIVIDUAL, WORST_CASE, Template, templates
from indpriv.cli import app
from indpriv.cli.commands import keys_of
from indpriv.norm_log.fields import RecordingPolicy

Schema = Mapping[str, Any]


def commands() -> str:
    """Every command with its text, arguments and options, from the typer app."""
    return _commands(app, "indpriv")


def experiments() -> str:
    """The same of the experiments."""
    return _commands(audits_app, "python -m audits")


def _commands(of: typer.Typer, program: str) -> str:
    return "\n".join(
        _command((program, *path), command)
        for path, command in _leaves((), typer.main.get_command(of))
    )


def _leaves(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name in command.list_commands(None):
            yield from _leaves((*path, name), command.commands[name])
    else:
        yield path, command


def _command(path: tuple[str, ...], command: Any) -> str:
    name = " ".join(path)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    json_too = ["[--json]"] * any(p.opts == ["--json"] for p in options)
    usage = " ".join((name, *map(_metavar, arguments), "[OPTIONS]", *json_too))
    rows = [(f"`{_metavar(p)}`", p.help, _default(p)) for p in arguments]
    for p in options:
        if p.opts == ["--json"]:  # in the usage, and the page says once what it does
            continue
        rows.append((", ".join(f"`{name}`" for name in p.opts), p.help, _default(p)))
        if p.metavar == "KEY=VALUE":
            keys = keys_of(" ".join(path[1:]), p.name)
            rows[-1] = (rows[-1][0], "KEY=VALUE, any number of times:", "")
            rows += [
                (f"… `{key}`", f"{kind.replace(' | ', ' or ')}: {meaning}", "")
                for key, (kind, meaning) in keys.items()
            ]
    table = _table(("argument or option", "meaning", "default"), rows)
    about = _text(inspect.cleandoc(command.help or ""))
    return f"## {name}\n\n```text\n{usage}\n```\n\n{about}\n\n{table}\n"


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(getattr(parameter, "show_default", None), str):
        return str(parameter.show_default)
    value = parameter.default
    return "" if value is None or value is False or not str(value) else f"`{value}`"


def audit_file() -> str:
    """Every table and key of an audit file, from its JSON Schema and the docstrings."""
    schema = config.AuditConfig.json_schema()
    sections = []
    for table, content in schema["properties"].items():
        name = next(filter(None, map(_target, content.get("anyOf", [content]))), None)
        if name is None:
            sections.append(f"## {table}\n\nAt the top of the file: {_kind(content, schema)}.\n")
            continue
        definition = schema["$defs"][name]
        about = _attributes(RecordingPolicy) | _attributes(getattr(config, name))
        required = definition.get("required", ())
        rows = [
            (f"`{key}`", _kind(value, schema), _initial(value, key in required), about.get(key, ""))
            for key, value in definition["properties"].items()
        ]
        heading = _text(definition["description"].split("\n\nAttributes:")[0])
        table_of = _table(("key", "value", "default", "meaning"), rows)
        sections.append(f"## {table}\n\n{heading}\n\n{table_of}\n")
    return "\n".join(sections)


_MOST_READ = (
    *("Account", "Bound", "Distribution", "Fact", "GroupRow", "GroupTable"),
    *("Guarantee", "Rate", "RunFacts"),
)


def audit_json() -> str:
    """The keys of audit.json, and the fields of what is read most, from its schema."""
    schema = audit_schema()
    parts = [f"{_text(schema['description'])}\n", _fields("audit.json", schema, schema)]
    for name in _MOST_READ:
        parts.append(_fields(name, schema["$defs"][name], schema))
    return "\n".join(parts)


def _fields(title: str, definition: Schema, schema: Schema) -> str:
    about = definition.get("description", "") if title != "audit.json" else ""
    lines = [f"## {title}", _text(about), ""]
    fields = (
        (_told(key, value, schema), key) for key, value in definition.get("properties", {}).items()
    )
    for told, alike in itertools.groupby(fields, lambda field: field[0]):
        lines.append(f"- {', '.join(f'`{key}`' for _, key in alike)}{told}")
    return "\n".join(lines) + "\n"


def _told(key: str, value: Schema, schema: Schema) -> str:
    """What a field holds, its unit, whether it is private, and what its name does not say."""
    kind, meaning = _kind(value, schema, links=True), value.get("description", "")
    kind = re.sub(r" [≥>≤<] [^,]+?(?=,| or |$)|, (?=[≥>≤<])", "", kind)
    if re.match("string|number|integer|boolean", kind):
        kind = "or null" if "null" in kind and "null" not in meaning.lower() else ""
    if kind.startswith("`") and all(word in meaning for word in re.findall('`"?(.*?)"?`', kind)):
        kind = ""
    unit = re.sub("^1$", "", next(_said(value, "unit"), ""))
    private = "not private" if False in _said(value, "private") else ""
    facts = ", ".join(filter(None, (kind, unit, private)))
    own = set(re.findall("[a-z]+", meaning.lower())) - {"number", "of", "the", "its", "name", "a"}
    if own <= set(key.split("_")):
        meaning = ""
    return f" ({facts})" * bool(facts) + f": {meaning}" * bool(meaning)


def _kind(value: Schema, schema: Schema, *, links: bool = False) -> str:
    """What a JSON Schema accepts, in a few words."""
    if options := value.get("anyOf"):
        kinds = [_kind(option, schema, links=links) for option in options]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null" or links))
    if name := _target(value):
        return f"[{name}](#{name.lower()})" if links and name in _MOST_READ else name
    if "const" in value:
        return f"`{json.dumps(value['const'], ensure_ascii=False)}`"
    if "enum" in value:
        return ", ".join(f"`{json.dumps(option)}`" for option in value["enum"])
    kinds = value.get("type", "anything")
    kind = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if kind == "array":
        return f"list of {_kind(value.get('items', {}), schema, links=links)}"
    if value.get("pattern") and not links:
        return str(value["description"])
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {value[key]}" for key, sign in bounds.items() if key in value]
    return f"{kind} {', '.join(limits)}".strip()


def _said(value: Schema, key: str) -> Iterator[Any]:
    """What a schema, its alternatives or its items say of a column."""
    if key in value:
        yield value[key]
    for part in (*value.get("anyOf", ()), value.get("items"), value.get("additionalProperties")):
        if isinstance(part, Mapping):
            yield from _said(part, key)


def _target(value: Schema) -> str | None:
    reference = value.get("$ref")
    return None if reference is None else str(reference).rsplit("/", 1)[-1]


def _initial(value: Schema, required: bool) -> str:
    if required:
        return "required"
    default = value.get("default")
    return "" if default is None else f"`{json.dumps(default)}`"


def _attributes(described: type) -> dict[str, str]:
    """The entries under "Attributes:" in a docstring, by name."""
    section = inspect.cleandoc(described.__doc__ or "").partition("Attributes:\n")[2]
    section = re.split(r"\n(?=\S)", section)[0]
    entries = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     +.*)*)", section, re.MULTILINE)
    return {
        name: " ".join(text.split())
        for names, text in entries
        for name in names.split(", ")
        if not text.startswith("see ")
    }


_COSTS = {
    WORST_CASE: "the guarantee",
    INDIVIDUAL: "the individual epsilons",
    FILES: "neither",
}


def checks() -> str:
    """The lines of evidence, and every check: what it states, what a failure costs and means."""
    every, lines = templates("check"), templates("line").values()
    rows = [
        (
            line.title,
            _text(line.about),
            ", ".join(f"[{every[key].title}](#{key})" for key in line.needs) or "nobody can see it",
            _text(line.advice),
        )
        for line in lines
    ]
    head = ("line", "what has to hold", "verified by", "what would verify it")
    return f"## Lines of evidence\n\n{_table(head, rows)}\n\n" + "\n".join(
        f"## {area}\n\n" + "\n".join(map(_check, found))
        for area, found in itertools.groupby(every.values(), lambda one: one.group)
    )


def _check(check: Template) -> str:
    return (
        f"### {check.title} {{#{check.key}}}\n\n"
        f"{check.holds} (`{check.key}`; {_COSTS[check.bears_on]})\n\n"
        f"*If it fails:* {check.failure}\n\n*What to do:* {check.advice}\n"
    )


def lint_rules() -> str:
    """Every rule of the settings of DP-SGD, from its texts."""
    rows = [
        (f"`{rule.key}`", rule.kind, _text(rule.title), _text(rule.about), rule.source)
        for rule in templates("rule").values()
    ]
    return _table(("rule", "severity", "what should hold", "literature", "source"), rows) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [tuple(_cell(cell) for cell in row) for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *cells)]
    return "\n".join(lines)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _text(text: str) -> str:
    """A plain text as Markdown: nothing in it is markup but code in backticks."""
    return re.sub(r"([*_\[\]<])(?![^`]*`[^`]*(?:`[^`]*`[^`]*)*$)", r"\\\1", text)


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "experiments": experiments,
    "audit-file": audit_file,
    "audit-json": audit_json,
    "lint-rules": lint_rules,
    "checks": checks,
}
