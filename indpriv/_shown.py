"""Texts that come from files, made harmless before anybody sees them."""

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import rich.console
import rich.markup
from rich.segment import Segment

_JOINERS = "\u200c\u200d"  # parts of words in some scripts, and of emoji


def clean(text: str, kept: str = "") -> str:
    """A text whose control, bidirectional and other invisible characters are U+FFFD, but `kept`."""
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) or char in kept else "\ufffd" for char in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs"


def clean_lines(text: str) -> str:
    """The same, with the line breaks of our own messages: before an indented line or a dash."""
    return re.sub(r"\n(?!  |- )", "\ufffd", clean(text, kept="\n"))


def escape(text: str) -> str:
    """A text of a message for a Console: clean, and no markup in it is obeyed."""
    return rich.markup.escape(clean_lines(text))


def shown(value: Any) -> Any:
    """What an expression in a template of a page gives: a text is clean, markup stays."""
    return clean(value, kept="\n") if type(value) is str else value


class Console(rich.console.Console):
    """A console to which no text can bring a control character, whatever draws it."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        """See rich; styles are added later."""
        for part in super().render(*arguments, **options):
            yield part if part.control else Segment(clean(part.text, kept="\n"), part.style)
