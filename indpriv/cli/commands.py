"""Commands with their options and settings, as commands.toml describes them."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from indpriv.errors import InputError

Function = TypeVar("Function", bound=Callable[..., None])
Keys = Mapping[str, Sequence[str]]  # key -> what a value may be, and what it means

_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
_KINDS: dict[str, type] = {"number": float, "whole number": int, "path": Path, "text": str}
_YES_OR_NO = {"yes": True, "no": False}


class _InOrder(TyperGroup):
    """Commands as commands.toml has them; typer puts those that have commands last."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return list(dict.fromkeys(name.split()[0] for name in _TABLE["commands"]))


app = typer.Typer(
    name="indpriv",
    cls=_InOrder,
    help=(
        "How much privacy did each training example get in this DP-SGD run, and which groups are "
        "worse off?"
    ),
    epilog="Start with: indpriv demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
publish_app = typer.Typer(
    help="Write what others may read: quantiles, statements for owners, a model card, a PDF.",
    no_args_is_help=True,
)
app.add_typer(publish_app, name="publish", rich_help_panel="Publish")


def command(name: str) -> Callable[[Function], Function]:
    """Register a function, whose parameters are its options, as a command: `indpriv NAME`."""
    about = _TABLE["commands"][name]

    def register(function: Function) -> Function:
        hints, keys = get_type_hints(function), inspect.signature(function).parameters
        function.__annotations__ = {key: Annotated[hints[key], option(key, name)] for key in keys}
        examples = [f"Example: {example}" for example in about["examples"]]
        parts = [inspect.getdoc(function) or "", *examples, about.get("more", "").strip()]
        group = publish_app if name.startswith("publish ") else app
        group.command(
            name.split()[-1],
            help="\n\n".join(filter(None, parts)),
            rich_help_panel=about.get("panel"),
        )(function)
        return function

    return register


def option(name: str, of: str = "") -> Any:
    """An option or argument as typer has it; of: the command, which may have words of its own."""
    about = _TABLE["commands"].get(of, {})
    flag = f"--{name.strip('_').replace('_', '-')}"
    if name in about.get("settings", {}):
        keys = ", ".join(keys_of(of, name))
        text = f"Can be given several times; {flag} help explains each: {keys}."
        return typer.Option(flag, metavar="KEY=VALUE", help=text)
    given = about.get("options", {}).get(name) or _TABLE["options"][name]
    given = {"help": given} if isinstance(given, str) else given
    shown = {"help": given["help"], "show_default": given.get("default", True)}
    if "argument" in given:
        return typer.Argument(metavar=given["argument"], **shown)
    return typer.Option(given.get("flag", flag), **shown)


def keys_of(name: str, parameter: str = "set_") -> Keys:
    """The settings that a parameter of a command takes."""
    own = _TABLE["commands"][name]["settings"]
    keys = own[parameter]
    return (
        keys if isinstance(keys, dict) else {k: own.get(k) or _TABLE["settings"][k] for k in keys}
    )


def settings_of(name: str, pairs: Sequence[str] | None, parameter: str = "set_") -> dict[str, Any]:
    """The settings of a command that were typed as KEY=VALUE; a key alone is one that is yes.

    Raises:
        InputError: another key, a value that it cannot have, or a key that is typed twice.
    """
    keys, option, found = keys_of(name, parameter), f"--{parameter.strip('_')}", dict[str, Any]()
    listed = "".join(f"\n  {key} ({kind}): {meaning}" for key, (kind, meaning) in keys.items())
    for pair in pairs or ():
        typed, equals, text = pair.partition("=")
        key = typed.strip().replace("-", "_")
        if key == "help":
            typer.echo(f"{option} KEY=VALUE{listed}")
            raise typer.Exit
        if key not in keys:
            near = "".join(f"; did you mean {one}?" for one in get_close_matches(key, keys, 1))
            raise InputError(f"{option} has no {typed!r}{near} Its keys are:{listed}")
        kind, meaning = keys[key]
        value = _value(kind, text if equals else "yes")
        if value is None:
            raise InputError(f"{option} {pair}: {key} is {kind} ({meaning})")
        if kind == "texts":
            value = [*found.get(key, []), text]
        elif key in found:
            raise InputError(f"{option} {key} is typed twice; type it once")
        found[key] = value
    return found


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
