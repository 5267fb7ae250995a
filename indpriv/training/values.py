"""Checks of configuration values: each takes (key, value) and returns the value, or raises InputError."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from indpriv.errors import InputError

Check = Callable[[str, Any], Any]


def whole(minimum: int) -> Check:
    """A whole number of at least `minimum`."""

    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise _rejected(key, value, f"a whole number of at least {minimum}")
        return value

    return check


def number(
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Check:
    """A finite number within bounds; whole numbers become floats."""
    bounds = {"above": above, "of at least": at_least, "of at most": at_most, "below": below}
    expected = "a number " + " and ".join(
        f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None
    )

    def check(key: str, value: Any) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise _rejected(key, value, expected)
        if (
            (above is not None and value <= above)
            or (at_least is not None and value < at_least)
            or (at_most is not None and value > at_most)
            or (below is not None and value >= below)
        ):
            raise _rejected(key, value, expected)
        return float(value)

    return check


def one_of(choices: Collection[str]) -> Check:
    """One of some strings."""

    def check(key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _rejected(key, value, "one of " + ", ".join(map(repr, choices)))
        return value

    return check


def flag(key: str, value: Any) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise _rejected(key, value, "true or false")
    return value


def steps_or(*words: str) -> Check:
    """A number of steps, or one of some words."""

    def check(key: str, value: Any) -> int | str:
        if isinstance(value, str) and value in words:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            known = " or ".join(f'"{word}"' for word in words)
            raise _rejected(key, value, f"a whole number of steps of at least 1, or {known}")
        return value

    return check


def identifier(key: str, value: Any) -> str:
    """Check for a plain name: it ends up in paths and pages."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", value):
        raise _rejected(key, value, "a name of at most 64 letters, digits, - and _")
    return value


def list_of(check: Check, *, minimum: int) -> Check:
    """A list, without repetitions of strings, of values that `check` accepts; becomes a tuple."""

    def check_list(key: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) < minimum:
            raise _rejected(key, value, f"a list of at least {minimum}" if minimum else "a list")
        items = tuple(check(key, item) for item in value)
        if any(isinstance(item, str) for item in items) and len(set(items)) < len(items):
            raise _rejected(key, value, "a list that names each once")
        return items

    return check_list


def optional(check: Check) -> Check:
    """What `check` accepts, or None where the key is left out."""
    return lambda key, value: None if value is None else check(key, value)


def check_keys(
    where: str, table: Mapping[str, Any], *, required: Collection[str], known: Collection[str]
) -> None:
    """Raise InputError on a key that is not known (with the nearest that is) or missing."""
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise InputError(
                f"{where} has the key {key!r}, which is not known; {hint}known are {', '.join(known)}"
            )
    missing = [key for key in known if key in required and key not in table]
    if missing:
        raise InputError(f"{where} lacks {', '.join(missing)}")


def _rejected(key: str, value: Any, expected: str) -> InputError:
    return InputError(f"{key} = {value!r} is not accepted; it takes {expected}")
