"""The commands with their options and settings, made of commands.toml.

What a command needs is imported when it runs, so that `--help` and `--version` answer at once.
"""

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from indpriv._formatting import Console
from indpriv.errors import InputError

EXPERIMENTS = "python -m audits"
_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
_KINDS: dict[str, type] = {"number": float, "whole number": int, "path": Path, "text": str}
_TYPES: dict[str, Any] = {**_KINDS, "flag": bool, "texts": list[str], "paths": list[Path]}
_YES_OR_NO = {"yes": True, "no": False}


class _InOrder(TyperGroup):
    """Commands as commands.toml has them; typer puts those that have commands last."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return list(dict.fromkeys(name.split()[0] for name in _TABLE["commands"]))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command; InputError with what to type for a former one, or a setting as an option."""
        if ctx.resilient_parsing:  # completion, which says nothing
            return super().resolve_command(ctx, args)
        words = list(takewhile("--".__ne__, args))
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        for former, now in _TABLE["former"].items():
            command, _, more = former.partition(" ")
            # A run may be called "run": only what another argument follows is none.
            follows = words[1:2] == [more] and not "".join(words[2:3] or "-").startswith("-")
            if words[:1] == [command] and (not more or more in options or follows):
                raise InputError(f"there is no command {former}; type: {now}")
        names = (" ".join(args[:n]) for n in (2, 1))
        name = next((name for name in names if name in _TABLE["commands"]), "")
        every = _TABLE["commands"][name]["options"] if name else {}
        flags = {
            one: (said.get("flag", f"--{key}"), *keys_of(name, key)[one])
            for key, said in every.items()
            for one in said.get("settings", ())
            if one not in every
        }
        for word, after in zip(words, [*words[1:], "-"], strict=True):
            typed, given, value = word.partition("=")
            key = typed.removeprefix("--").replace("-", "_")
            if typed.startswith("--") and key in flags:
                flag, kind, _ = flags[key]
                value = value if given or after.startswith("-") else after
                value = "yes" if kind == "yes | no" else value or "VALUE"
                raise InputError(f"{typed} is a setting; type: {flag} {key}={value}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="indpriv",
    cls=_InOrder,
    help=_TABLE["help"],
    epilog="Start with: indpriv demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
publish_app = typer.Typer(help=_TABLE["publish"], no_args_is_help=True)
app.add_typer(publish_app, name="publish", rich_help_panel="Publish")


def errors() -> Console:
    """Standard error, for warnings and for what a person should read while a command works."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _add(name: str) -> None:
    """Make a command; its settings are read before its function gets them."""
    about = _TABLE["commands"][name]
    settings = [key for key, said in about["options"].items() if "settings" in said]

    def call(**values: Any) -> None:
        values |= {key: settings_of(name, values[key], key) for key in settings}
        module, function = about["run"].split(":")
        getattr(import_module(f"indpriv.cli.{module}"), function)(**values)

    call.__signature__ = inspect.Signature(parameters_of(name))  # type: ignore[attr-defined]
    examples = [f"Example: {example}" for example in about["examples"]]
    text = "\n\n".join([about["help"], *examples, about.get("more", "").strip()]).strip()
    group = publish_app if name.startswith("publish ") else app
    group.command(name.split()[-1], help=text, rich_help_panel=about.get("panel"))(call)


def parameters_of(name: str) -> list[inspect.Parameter]:
    """The options and arguments of a command as typer has them."""
    found = []
    for key, own in _TABLE["commands"][name]["options"].items():
        said = _TABLE["options"].get(key, {}) | own
        kind: Any = _TYPES["texts" if "settings" in said else said.get("kind", "text")]
        default = inspect.Parameter.empty
        if not said.get("required"):
            usual = {"flag": False, "texts": [], "paths": []}.get(said.get("kind", ""))
            default = [] if "settings" in said else said.get("default", usual)
            kind = kind | None if default is None else kind
        kind = Annotated[kind, option(key, name)]
        only = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(key, only, default=default, annotation=kind))
    return found


def option(key: str, of: str = "") -> Any:
    """What typer shows of an option or argument; of: the command, which may have its own words."""
    own = _TABLE["commands"].get(of, {}).get("options", {})
    said = _TABLE["options"].get(key, {}) | own.get(key, {})
    flag = said.get("flag", f"--{key.replace('_', '-')}")
    if "settings" in said:
        keys = ", ".join(said["settings"])
        text = f"Can be given several times; {flag} help explains each: {keys}."

        def explain(pairs: list[str] | None) -> list[str] | None:
            if "help" in (pairs or ()):
                typer.echo(f"{flag} KEY=VALUE{_listed(keys_of(of, key))}")
                raise typer.Exit
            return pairs

        # eager: before arguments that are missing
        return typer.Option(flag, metavar="KEY=VALUE", help=text, callback=explain, is_eager=True)
    shown = {"help": said["help"], "show_default": said.get("shown", True)}
    if "argument" in said:
        return typer.Argument(metavar=said["argument"], **shown)
    return typer.Option(flag, **shown)


def keys_of(name: str, key: str = "settings") -> Mapping[str, tuple[str, str]]:
    """What the settings of a command may be, and what they mean; key: of the option."""
    about = _TABLE["commands"][name]
    every = _TABLE["settings"] | about.get("settings", {})
    return {one: tuple(every[one]) for one in about["options"][key]["settings"]}


def settings_of(name: str, pairs: Sequence[str] | None, key: str = "settings") -> dict[str, Any]:
    """The settings of a command that were typed as KEY=VALUE; a key alone is one that is yes.

    Several may stand in one text, between commas. InputError for another key, a value that it
    cannot have, or a key that is typed twice.
    """
    keys, found = keys_of(name, key), dict[str, Any]()
    option = _TABLE["commands"][name]["options"][key].get("flag", f"--{key}")
    for pair in (one for text in pairs or () for one in _apart(text, keys)):
        typed, equals, text = pair.partition("=")
        one = typed.strip().replace("-", "_")
        if one not in keys:
            near = "".join(f"; did you mean {near}?" for near in get_close_matches(one, keys, 1))
            raise InputError(f"{option} has no {typed!r}{near or '.'} Its keys are:{_listed(keys)}")
        kind, meaning = keys[one]
        value = _value(kind, text if equals else "yes")
        if value is None:
            kind = f"a {kind}" if kind in _KINDS else kind
            raise InputError(f"{option} {pair}: {one} is {kind} ({meaning})")
        if kind == "texts":
            value = [*found.get(one, []), text]
        elif one in found:
            raise InputError(f"{option} {one} is typed twice; type it once")
        found[one] = value
    return found


def _listed(keys: Mapping[str, tuple[str, str]]) -> str:
    return "".join(f"\n  {key} ({kind}): {meaning}" for key, (kind, meaning) in keys.items())


def _apart(text: str, keys: Mapping[str, Any]) -> list[str]:
    """Settings between commas; a value may have commas itself."""
    parts = text.split(",")
    of = [part.partition("=")[0].strip().replace("-", "_") for part in parts]
    return parts if keys.keys() >= {*of} else [text]


def _value(kind: str, text: str) -> Any:
    """The value that a text stands for, or None if the key cannot have it."""
    for one in kind.split(" | "):
        if one in _KINDS:
            try:
                return _KINDS[one](text)
            except ValueError:
                continue
        if one in ("texts", text.replace("-", "_")):
            return _YES_OR_NO.get(one, one)
    return None


for _name in _TABLE["commands"]:
    _add(_name)
