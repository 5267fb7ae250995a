"""What readers see: numbers, where no epsilon is too small, and texts of files, made harmless."""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_CEILING, Context
from typing import Any

import rich.console
import rich.markup
from rich.segment import Segment

_DELTA_DIGITS = 6  # significant
_NO_LIMIT = 1e6  # from here on, the end of an interval of epsilons or their ratios says nothing
_FLOAT_NOISE = 1e-12  # relative, of values from 1 up; 1.5500000000000003 is shown as 1.55

_JOINERS = "\u200c\u200d"  # parts of words in some scripts, and of emoji


def round_up(value: float, digits: int = 2, towards: Callable[[float], int] = math.ceil) -> str:
    """A number with these decimals, rounded up, as an upper bound must be."""
    scaled = value * 10.0**digits
    near = abs(scaled - round(scaled)) <= _FLOAT_NOISE * max(1.0, abs(scaled))
    return f"{(round(scaled) if near else towards(scaled)) / 10.0**digits + 0.0:.{digits}f}"


def round_down(value: float, digits: int = 2) -> str:
    """A number with these decimals, rounded down, as a lower bound must be."""
    return round_up(value, digits, math.floor)


def format_epsilon(value: float | None) -> str:
    """An epsilon rounded up: two decimals, or two significant digits below 0.1; a dash for None."""
    if value is None:
        return "–"
    if value <= 0:
        return "0"
    return round_up(value, 2 if value >= 0.1 else 1 - math.floor(math.log10(value)))


def format_delta(value: float) -> str:
    """A delta to six digits, rounded up, without the padding of its exponent."""
    rounded = Context(prec=_DELTA_DIGITS, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return re.sub(r"e([+-])0+", r"e\1", f"{float(rounded):g}")


def format_edges(edges: Sequence[float]) -> list[str]:
    """Equally spaced, increasing edges of bins of epsilon, rounded up, with enough decimals."""
    digits = max(2, 1 - math.floor(math.log10(edges[1] - edges[0])))
    return [round_up(edge, digits) for edge in edges]


def format_rows(least: int, most: int) -> str:
    """Numbers of rows from least to most."""
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def format_share(value: float | None, digits: int = 0) -> str:
    """A share in per cent; only 0 is shown as 0 %, and only 1 as 100 %."""
    if value is None:
        return "–"
    smallest = 10.0**-digits
    percent = round(100 * value, digits)
    if percent == 0 and value > 0:
        return f"< {smallest:.{digits}f} %"
    if percent == 100 and value < 1:
        return f"> {100 - smallest:.{digits}f} %"
    return f"{percent:.{digits}f} %"


def format_share_up(value: float) -> str:
    """A share in per cent, rounded up: a bound is never shown smaller than it is."""
    return f"{math.ceil(value * 1000 * (1 - _FLOAT_NOISE)) / 10:g} %"


def format_number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits; a dash for None."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def format_in_full(value: float) -> str:
    """A number with all of its digits, as a setting that somebody may use again."""
    return repr(float(value)).removesuffix(".0")


def format_p_value(value: float) -> str:
    """A p-value to two significant digits, rounded up; 0 is one that no float holds."""
    if value < 1e-6:
        return f"{Context(prec=2, rounding=ROUND_CEILING).create_decimal(max(value, 1e-300)):.1e}"
    return round_up(value, 1 - math.floor(math.log10(value)) if value < 0.1 else 2)


def format_lower_bound(value: float) -> str:
    """A lower bound on epsilon, rounded down to two decimals."""
    return round_down(value) if value > 0 else "0"


def format_interval(low: float, high: float, digits: int = 2) -> str:
    """A confidence interval, rounded outwards."""
    most = round_up(high, digits) if high < _NO_LIMIT else "no limit"
    return f"[{round_down(low, digits)}, {most}]"


def format_cost(pass_seconds: float, training_seconds: float | None) -> str:
    """Time that norm passes took, compared with training if its time is known."""
    passes = f"{pass_seconds:,.1f} s of norm passes"
    if not training_seconds:
        return passes
    share = format_share(pass_seconds / training_seconds)
    return f"{passes} beside {training_seconds:,.1f} s of training ({share})"


def capitalised(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """The text as a sentence of its own."""
    return capitalised(text) if text.endswith("…") else capitalised(text).rstrip(".") + "."


def _or_dash(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """The same, with a dash for None and for an interval of which an end is not known."""

    def shown(value: Any) -> str:
        ends = [getattr(value, end, 0.0) for end in ("low", "high")]
        return "–" if value is None or any(map(math.isnan, ends)) else form(value)

    return shown


def _percents(of: Any, digits: int) -> tuple[float, float]:
    """The ends of an interval of shares, rounded outwards."""
    return float(round_down(100 * of.low, digits)), float(round_up(100 * of.high, digits))


def formatted(value: Any, form: str) -> str:
    """A figure, or a dash for None; form: of `FORMATS`, or of Python, e.g. ".3f"."""
    if form in FORMATS:
        return FORMATS[form](value)
    return "–" if value is None else format(value, form)


# Epsilons, limits and ceilings are rounded up, lower bounds down.
FORMATS: dict[str, Callable[[Any], str]] = {
    "text": _or_dash(str),
    "eps": format_epsilon,
    "delta": _or_dash(format_delta),
    "least": _or_dash(format_lower_bound),
    "share": format_share,
    "share1": lambda value: format_share(value, 1),
    "share2": lambda value: format_share(value, 2),
    "percent": _or_dash(lambda value: f"{format_number(100 * value)} %"),
    "up": _or_dash(format_share_up),
    "int": _or_dash("{:,}".format),
    "num": format_number,
    "full": _or_dash(format_in_full),
    "num2": lambda value: format_number(value, 2),
    "points": _or_dash(lambda value: f"{100 * value:+.2f} %"),
    "p": _or_dash(format_p_value),
    "span": _or_dash(lambda of: format_interval(of.low, of.high)),
    "span3": _or_dash(lambda of: format_interval(of.low, of.high, 3)),
    "percent_span": _or_dash(lambda of: "{:.1f} to {:.1f} %".format(*_percents(of, 1))),
    "percent_span2": _or_dash(lambda of: "{:.2f} to {:.2f} %".format(*_percents(of, 2))),
    "points_span": _or_dash(lambda of: "[{:+.2f}, {:+.2f}] %".format(*_percents(of, 2))),
}


# --- texts that come from files


def clean(text: str, kept: str = "") -> str:
    """A text whose control, bidirectional and other invisible characters are U+FFFD, but `kept`."""
    if text.isprintable():
        return text
    hidden = (c for c in {*text} if not c.isprintable() and unicodedata.category(c) != "Zs")
    return text.translate({ord(c): "\ufffd" for c in hidden if c not in _JOINERS + kept})


def escape(text: str) -> str:
    """A text of a message for a Console: clean, and no markup in it is obeyed.

    Line breaks are those of our own messages: before an indented line or a dash.
    """
    return rich.markup.escape(re.sub(r"\n(?!  |- )", "\ufffd", clean(text, kept="\n")))


def shown(value: Any) -> Any:
    """What an expression in a template of a page gives: a text is clean, markup stays."""
    return clean(value, kept="\n") if type(value) is str else value


class Console(rich.console.Console):
    """A console to which no text can bring a control character, whatever draws it."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        """See rich; styles are added later."""
        for part in super().render(*arguments, **options):
            yield part if part.control else Segment(clean(part.text, kept="\n"), part.style)
