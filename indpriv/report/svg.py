"""SVG for a page: ids that do not clash, colours of the page's theme, escaped texts of the data.

Texts from the data never reach matplotlib (where `$` is mathematics and an unknown glyph a
warning): figures are drawn with placeholders, which are replaced here by escaped texts.
"""

import html
import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from indpriv._shown import clean

# Drawn in these, replaced by the page's custom properties, which change with light and dark mode.
INK, MUTED, RULE, ACCENT, SECOND, WARN = (
    "#01020a",
    "#01020b",
    "#01020c",
    "#01020d",
    "#01020e",
    "#01020f",
)
_THEME = {
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    ACCENT: "accent",
    SECOND: "second",
    WARN: "warn",
}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "indpriv",  # the same figure gives the same bytes
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.linewidth": 0.8,
    "axes.grid": False,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.8,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}

WIDTH = 9.0  # inches; the page scales figures to its column
_TEXT_LENGTH = 22  # characters of a text from the data; the table beside it shows all of them


def escape(text: str) -> str:
    """A text of the data inside SVG."""
    return html.escape(clean(text))


def new_figure(height: float) -> Figure:
    """An empty transparent figure of the page's width; draw on it inside `style()`."""
    figure = Figure(figsize=(WIDTH, height), facecolor="none")
    FigureCanvasSVG(figure)
    return figure


def style() -> AbstractContextManager[None]:
    """Context in which figures are drawn and written."""
    return mpl.rc_context(STYLE)


def bare(axes: Axes, xlabel: str, ylabel: str = "", *, title: str = "") -> None:
    """Label axes, leave only the lower edge of their frame, and draw horizontal lines."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title, color=INK, pad=8)
    axes.grid(axis="y")
    sns.despine(ax=axes, left=True)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_color(RULE)


def placeholder(index: int) -> str:
    """What to draw instead of the index-th text from the data."""
    return f"TEXT{index:05d}"


def shorten(text: str) -> str:
    """A text from the data as a figure shows it."""
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 1] + "…"


def _font(match: re.Match[str]) -> str:
    """Keep size and weight; the family is the page's."""
    weight = f"font-weight: {600 if match[1] in ('bold', '700') else 400}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}"


def to_svg(
    figure: Figure,
    name: str,
    title: str,
    description: str,
    texts: Sequence[str] = (),
    tips: Sequence[str] = (),
) -> str:
    """A figure as an inline SVG element.

    Args:
        figure: drawn in the colours of this module, inside `style()`.
        name: unique on the page; prefixes every id.
        title: its accessible name.
        description: alternative text: what the figure shows.
        texts: what placeholder(0), placeholder(1), ... stand for.
        tips: what is shown where the pointer is on the part with the gid tip0, tip1, ...
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(
        rf'<g id="{name}-tip(\d+)">',
        lambda match: f'<g class="tip"><title>{escape(tips[int(match[1])])}</title>',
        svg,
    )
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(
        r"<style.*?</style>", "", svg, flags=re.DOTALL
    )  # its rule for * would hold for the whole page
    svg = re.sub(r" font-family: [^;\"]+;?", "", svg)
    svg = re.sub(r"font: (?:(\w+) )?([0-9.]+px) [^;\"]+", _font, svg)
    for colour, variable in _THEME.items():
        svg = svg.replace(colour, f"var(--{variable})")
    svg = re.sub(r"TEXT(\d{5})", lambda match: escape(shorten(texts[int(match[1])])), svg)
    view = re.search(r'viewBox="[^"]+"', svg)
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        'class="figure" '
        f'{view.group(0) if view else ""} role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>'
    )
    return head + svg[svg.index(">") + 1 :].strip()
