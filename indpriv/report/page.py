"""Pages from Markdown templates: one text, as Markdown, as HTML and on a terminal. Sensitive.

A template is Markdown with jinja2 expressions. What an expression gives is text, in which neither
Markdown nor HTML is obeyed, unless it is `Safe`. Tables, figures and what is folded away are
blocks: Markdown has their text, HTML and a terminal draw them in the place of their number.
"""

import base64
import hashlib
import operator
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup
from markupsafe import escape as escape_html
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text

from indpriv._facts import refused
from indpriv._files import write_atomically, write_json
from indpriv._folders import make_folder
from indpriv._formatting import FORMATS, clean, format_edges, formatted, shown
from indpriv._formatting import Console as CleanConsole
from indpriv._plain import form_of, records
from indpriv.analysis.statistics import Interval
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.errors import InputError
from indpriv.report.figures import FIGURES
from indpriv.report.formats import CONSTANTS, JINJA, TEMPLATES, WORDS, data_of, shown_rows

Target = Literal["markdown", "html", "terminal"]
Template = str | Path  # the name of one of ours, or the path, without its suffix, of another
_ACTIVE = re.compile(r"[\\`*\[\]<>|~$&]|(?<!\w)#|(?<![^\W_])_|_(?![^\W_])")
_LEADING = re.compile(r"^(?:([-+])(?= |$)|(\d+)([.)])(?= |$)|(?==+$))")
_NUMBER = re.compile(r"(?:[-+−<>\d.,%*()\[\]/ –±]|to|of|e-)*")
_NO_BREAK = re.compile(r"(?<=\d) (?=%)|(?<=\d,) (?=[\d.-]+\])")
_LONG = 40  # characters from which a column of texts needs room
_WIDEST = 500  # of a table on a terminal
_CONTENTS = {"lookup": "One example", "since": "What changed"}  # instead of a section's id
_STYLES = {"warning": "yellow", "caution": "bold red", "em": "italic"}


class Safe(str):
    """Markdown of a template, which is not escaped."""


def escape(text: object) -> str:
    r"""A text on one line, in which neither Markdown nor HTML is obeyed.

    >>> print(escape("a|b <b> *x* _y_ sample_rate"))
    a\|b \<b\> \*x\* \_y\_ sample_rate
    """
    if isinstance(text, Safe):
        return text
    found = _ACTIVE.sub(r"\\\g<0>", clean(" ".join(str(text).split())))
    return _LEADING.sub(lambda m: f"{m[2] or ''}\\{m[1] or m[3] or ''}", found)


class Figure:
    """A figure of a registered column: as text, in the format of that column."""

    form = ""

    def __str__(self) -> str:
        return formatted(self, self.form)


@cache
def _figures(kind: type, form: str) -> Any:
    return type("Figure", (Figure, kind), {"form": form})


def _of(row: Any, name: Any) -> Any:
    """A value of a row by the name of its column, or what a macro makes of the row."""
    if callable(name):
        return name(row)
    if isinstance(row, Mapping):
        return _figure(row[name], form_of(row, name))
    first, _, rest = name.partition(".")
    value = _figure(getattr(row, first), form_of(row, first))
    return _of(value, rest) if rest else value


def _figure(value: Any, form: str) -> Any:
    """The same value as a `Figure` of this format, or several of them."""
    if not form or isinstance(value, str | bool | Figure):
        return value
    if type(value) is tuple:
        return tuple(_figure(one, form) for one in value)
    if isinstance(value, Mapping):
        return {key: _figure(one, form) for key, one in value.items()}
    if isinstance(value, int | float | Interval):
        kind, ends = cast(Any, type(value)), isinstance(value, Interval)
        return _figures(kind, form)(*(vars(value).values() if ends else [value]))
    return value


def _by_hand(form: Callable[..., str]) -> Callable[..., str]:
    """A filter for figures that are no registered column: those have a format already."""

    def checked(*values: Any) -> str:
        if any(isinstance(value, Figure) for value in values):
            raise TypeError("a registered column is shown in its own format: leave out the filter")
        return form(*values)

    return checked


def _text(value: object) -> str:
    """A value as text, or a dash for None."""
    if isinstance(value, float) and not isinstance(value, Figure):
        raise TypeError(f"{value} is of no registered column, so a filter should give its format")
    return FORMATS["text"](value)


class _Environment(Environment):
    """Templates in which figures of registered columns have their format."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _figure(super().getattr(obj, attribute), form_of(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return _figure(found, form_of(obj, argument)) if isinstance(argument, str) else found


def _finalized(value: object) -> str:
    """What an expression gives: text with the spaces that a template puts at its ends."""
    text = _text(value)
    if isinstance(value, Safe) or not text.strip():
        return text
    return " " * (text[0] == " ") + escape(text) + " " * (text[-1] == " ")


# --- templates


_RENDERED: "ContextVar[_Rendering]" = ContextVar("rendered")  # the page whose template is filled


@cache  # compiling templates takes most of the time of a short page
def environment(*folders: Path) -> Environment:
    """Of the templates, here or in these folders, with filters and blocks."""
    loader = FileSystemLoader([*folders, TEMPLATES])
    made = _Environment(loader=loader, finalize=_finalized, **JINJA)
    forms = FORMATS | {"format": made.filters["format"]}
    made.filters.update({name: _by_hand(form) for name, form in forms.items()} | WORDS)
    made.filters.update(text=_text, md=Safe, merged=operator.or_)
    made.filters.update(edges=format_edges, records=records, shown_rows=shown_rows)
    for name in ("table", "figure", "folded", "section", "block"):
        made.globals[name] = made.filters[name] = partial(_block, name)
    made.globals.update(CONSTANTS | {"code": _code, "typed": _typed, "zip": zip})
    return made


def _block(kind: str, *values: Any, **options: Any) -> Any:
    """A block of the page whose template is filled."""
    return getattr(_RENDERED.get(), kind)(*values, **options)


class _Rendering:
    """A template that is rendered for one target, and the blocks that it has met."""

    def __init__(self, target: Target, shown_beside: Mapping[str, Any]) -> None:
        self.target = target
        self.blocks: list[tuple[str, dict[str, Any]]] = []
        self.beside = shown_beside
        self.sections: list[tuple[str, str]] = []  # id, and name in the contents
        self.end = ""  # of the section that is open

    def text(self, template: Template, values: Mapping[str, Any]) -> str:
        """The Markdown of a template."""
        path = TEMPLATES / template  # a path that is absolute stays what it is
        _RENDERED.set(self)
        text = environment(path.parent).get_template(f"{path.name}.md.j2").render(**values)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def block(self, kind: str, **values: Any) -> Safe:
        """A block of a page alone, drawn by the macro of this name; empty elsewhere."""
        return self._place(kind, values) if self.target == "html" else Safe("")

    def _place(self, kind: str, values: dict[str, Any]) -> Safe:
        self.blocks.append((kind, values))
        return Safe(f"\n\n```block\n{len(self.blocks) - 1}\n```\n\n")

    def table(self, rows: Any, columns: Any, caption: str = "", **options: Any) -> Safe:
        """A table; see `Table`."""
        made = Table(rows, columns, caption, **options)
        if self.target == "markdown":
            return Safe(f"\n\n{made.markdown()}\n\n")
        return self._place("table", {"table": made})

    def figure(self, draw: str | Callable[..., str], *arguments: Any, caption: str = "") -> Safe:
        """A figure, of `FIGURES` where it is a name; empty where there is nothing to draw."""
        draw = FIGURES[draw] if isinstance(draw, str) else draw
        if self.target != "html" or not (svg := draw(*arguments)):
            return Safe("")
        return self._place("figure", {"svg": Markup(svg), "caption": inline_html(escape(caption))})

    def folded(self, title: str, caller: Callable[[], str], *, everywhere: bool = False) -> Safe:
        """What the page folds away and does not print; left out elsewhere, or shown unfolded."""
        if self.target != "html":
            return Safe(caller() if everywhere else "")
        return self._place("folded", {"title": title, "body": Markup(self.html(caller()))})

    def section(self, name: str, title: str, *, folded: bool = False) -> Safe:
        """The heading of a section, which the page links to; folded: with its text folded away."""
        if self.target != "html":
            return Safe(f"\n\n## {escape(title)}\n\n")
        end, self.end = self.end, f"</div>{'</details>' * folded}</section>"
        self.sections.append((name, _CONTENTS.get(name, name.capitalize())))
        values = {"name": name, "title": title, "folded": folded, "end": Markup(end)}
        return self._place("section", values)

    @cached_property
    def macros(self) -> Any:
        """What draws the blocks of this page, each by the name of its kind."""
        known = {"own": self.beside, "cell": lambda text: Markup(inline_html(text))}
        return _html_templates().get_template("blocks.html.j2").make_module(known)

    def html(self, text: str) -> str:
        """Markdown with the blocks of this page as HTML."""
        return str(_markdown().render(text, {"page": self, "left": set(glossary())}))


def _code(text: str) -> Safe:
    """Text as it would be typed."""
    return Safe(f"`{clean(str(text)).replace('`', ' ')}`")


def _typed(text: str) -> Safe:
    """Text of several lines inside a fence."""
    return Safe(clean(str(text), kept="\n").replace("`", " "))


class Table:
    """A table of Markdown cells.

    Args:
        rows: of a frame, or objects whose attributes `columns` names, or sequences of texts.
        columns: heading -> the column, "attribute|format" of what is none, or a macro of the row;
            headings alone where rows are sequences.
        caption: above the table.
        style: "facts" (names and values), "key" (name, large figure, remark), or "".
        small, total: attributes, or macros, of rows that are too few to read, or that sum up the
            others.
        first: a page and a terminal show this many columns, and the page folds the others away.
    """

    def __init__(
        self,
        rows: Any,
        columns: Mapping[str, Any] | Sequence[str],
        caption: str = "",
        *,
        style: str = "",
        small: Any = "",
        total: Any = "",
        first: int = 0,
        row_names: bool = True,
    ) -> None:
        self.head = [escape(str(head).strip()) for head in columns]
        self.caption, self.style, self.first, self.row_names = caption, style, first, row_names
        self.rows: list[tuple[str, list[str]]] = []
        for row in records(rows) if isinstance(rows, pd.DataFrame) else rows:
            if isinstance(columns, Mapping):
                cells = [_cell(row, of) for of in columns.values()]
            else:
                cells = [escape(_text(cell)) for cell in row]
            is_small, is_total = small and _of(row, small), total and _of(row, total)
            self.rows.append(("small" if is_small else "total" if is_total else "", cells))

    @property
    def kinds(self) -> list[str]:
        """Of each column: "name", "number", "text" (long) or "word"."""
        return [self._kind(column) for column in range(len(self.head))]

    def _kind(self, column: int) -> str:
        if self.row_names and column == 0:
            return "name"
        cells = [plain(cells[column]) for _, cells in self.rows]
        if all(map(_NUMBER.fullmatch, cells)):
            return "number"
        return "text" if max(map(len, cells), default=0) > _LONG else "word"

    def only(self, columns: Iterable[int]) -> "Table":
        """The table with some of its columns."""
        kept = list(columns)
        made = Table((), [], self.caption, style=self.style, row_names=self.row_names)
        made.head = [Safe(self.head[i]) for i in kept]
        made.rows = [(style, [cells[i] for i in kept]) for style, cells in self.rows]
        return made

    @property
    def short(self) -> "Table":
        """The columns that a page does not fold away."""
        return self.only(range(self.first)) if self.first else self

    def markdown(self) -> str:
        """The whole table as Markdown."""
        head = [""] * len(self.head) if self.style else self.head
        rule = ["---:" if kind == "number" else "---" for kind in self.kinds]
        lines = (f"| {' | '.join(line)} |" for line in (head, rule, *(row for _, row in self.rows)))
        return (f"{escape(self.caption)}:\n\n" if self.caption else "") + "\n".join(lines)

    def print(self, console: Console) -> None:
        """Print it at its full width even if the terminal is narrower: no figure is cut off."""
        grid = self.short._grid()
        room = console.options.update(width=_WIDEST)
        width = max(Measurement.get(console, room, grid).maximum, console.width)
        colours: Literal["truecolor"] | None = "truecolor" if console.color_system else None
        CleanConsole(
            file=console.file, width=width, force_terminal=console.is_terminal, color_system=colours
        ).print(grid)

    def _grid(self) -> Grid:
        grid = Grid(
            title=Text(clean(self.caption)) if self.caption else None,
            title_justify="left",
            title_style="bold",
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            header_style="bold",
            show_header=not self.style,
        )
        for head, kind in zip(self.head, self.kinds, strict=True):
            side: Literal["right", "left"] = "right" if kind == "number" else "left"
            grid.add_column(_line(head), justify=side, no_wrap=True)
        for _, cells in self.rows:
            grid.add_row(*map(_line, cells))
        return grid


def _cell(row: Any, of: Any) -> str:
    if callable(of):  # a macro, whose text is Markdown
        return Safe(" ".join(of(row).split()))
    name, _, form = of.partition("|")
    value = _of(row, name)
    if form in WORDS:
        return escape(WORDS[form](value))
    return escape(_by_hand(formatted)(value, form) if form else _text(value))


# --- HTML


@cache
def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}, renderer_cls=_Html)


@cache
def _html_templates() -> Environment:
    loader = FileSystemLoader(TEMPLATES)
    return Environment(loader=loader, autoescape=True, finalize=shown, **JINJA)


@cache
def glossary() -> dict[str, str]:
    """Words of a page, in small letters, and what they mean."""
    entries = data_of("glossary")["entry"]
    return {word.lower(): one["meaning"] for one in entries for word in one["words"]}


@cache
def _words() -> re.Pattern[str]:
    longest_first = sorted(glossary(), key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])", re.I)


def _explained(word: str, left: set[str]) -> str:
    """A word with its meaning, if it is the first of its entry; `left` are those to come."""
    meaning = glossary()[word.lower()]
    if word.lower() not in left:
        return word
    left.difference_update([one for one, said in glossary().items() if said == meaning])
    return f'<abbr tabindex="0" title="{escape_html(meaning)}">{word}</abbr>'


class _Html(RendererHTML):
    """HTML of Markdown; env has the page with its blocks, and the words still to be explained."""

    def fence(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        token = tokens[idx]
        if token.info == "block":
            kind, values = env["page"].blocks[int(token.content)]
            if kind == "section":
                env["left"] = set(glossary())
            return str(getattr(env["page"].macros, kind)(**values))
        return f"<pre><code>{escape_html(token.content)}</code></pre>\n"

    def text(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Escaped text without line breaks inside 1e-5 or an interval, or before a per cent sign.

        The first use of a word of the glossary in a section explains it.
        """
        text = str(escape_html(_NO_BREAK.sub("\u00a0", clean(tokens[idx].content))))
        if left := env.get("left"):
            text = _words().sub(lambda found: _explained(found[0], left), text)
        return re.sub(r"\d[\d.]*e-\d+", r'<span class="nb">\g<0></span>', text)

    def heading_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """A heading, in which no word is explained."""
        if tokens[idx].nesting == 1:
            env["left"], env["kept"] = None, env.get("left")
            return f"<{tokens[idx].tag}>"
        env["left"] = env["kept"]
        return f"</{tokens[idx].tag}>\n"

    heading_close = heading_open

    def paragraph_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """A paragraph that is emphasised as a whole is a note."""
        if tokens[idx].hidden:
            return ""
        inside = tokens[idx + 1].children or []
        note = len(inside) > 2 and (inside[0].type, inside[-1].type) == ("em_open", "em_close")
        return '<p class="note">' if note else "<p>"

    def blockquote_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """A quotation, or a callout, which begins with [!NOTE], [!WARNING] or [!CAUTION]."""
        kind = _callout(tokens, idx)
        return f'<blockquote class="{kind}">\n' if kind else '<blockquote class="publish">\n'


def _callout(tokens: Sequence[Token], at: int) -> str:
    """The kind of a callout, whose marker is taken out; "" for a quotation."""
    inline = tokens[at + 2]
    match = re.match(r"\[!(NOTE|WARNING|CAUTION)\]$", inline.content.partition("\n")[0])
    if match is None or not inline.children:
        return str(tokens[at].meta.get("kind", ""))
    while inline.children and inline.children[0].type != "softbreak":
        del inline.children[0]
    del inline.children[:1]
    inline.content = inline.content.partition("\n")[2]
    tokens[at].meta["kind"] = match[1].lower()
    return match[1].lower()


def inline_html(text: str) -> str:
    """Markdown of a cell or a caption as HTML."""
    rendered: str = _markdown().renderInline(text)
    return rendered


def plain(text: str) -> str:
    """Markdown of a cell as text."""
    return "".join(token.content for token in _markdown().parseInline(text)[0].children or ())


# --- the terminal


def _line(text: str, style: str = "") -> Text:
    """Markdown of a line as a text with styles."""
    return _styled(_markdown().parseInline(text)[0].children or (), style)


def _styled(tokens: Iterable[Token], style: str = "") -> Text:
    made, styles = Text(style=style), list[str]()
    for token in tokens:
        if token.nesting == 1:
            styles.append({"strong": "bold", "em": "italic"}.get(token.tag, ""))
        elif token.nesting == -1:
            styles.pop()
        else:
            content = "\n" if token.type in ("softbreak", "hardbreak") else token.content
            made.append(clean(content, kept="\n"), " ".join(filter(None, styles)) or None)
    return made


def _print(page: _Rendering, text: str, console: Console, key_width: int) -> None:
    """Print Markdown; key_width: of the column of bold words that begin paragraphs, or 0."""
    tokens, style, bullet = _markdown().parse(text), "", ""
    for at, token in enumerate(tokens):
        if token.type == "blockquote_open":
            style = _STYLES.get(_callout(tokens, at), "")
        elif token.type == "blockquote_close":
            style = ""
        elif token.type == "list_item_open":
            bullet = "- "
        elif token.type == "fence" and token.info == "block":
            page.blocks[int(token.content)][1]["table"].print(console)
        elif token.type == "fence":
            typed = clean(token.content.rstrip("\n"), kept="\n")
            console.print(Text(typed), soft_wrap=True)
        elif token.type == "inline":
            inside = [one for one in token.children or () if one.type != "text" or one.content]
            if tokens[at - 1].type == "heading_open":
                console.print("\n" * (at > 1), _styled(inside, "bold"), sep="")
            elif key_width and inside[:1] and inside[0].type == "strong_open":
                end = next(i for i, each in enumerate(inside) if each.type == "strong_close") + 1
                key, rest = _styled(inside[:end], style), _styled(inside[end:], style)
                rest = rest[len(rest.plain) - len(rest.plain.lstrip()) :]
                if cell_len(key.plain) >= key_width:  # a long one has a line of its own
                    console.print(key, soft_wrap=True)
                    key = Text()
                _print_beside(key, rest, console, key_width)
            elif bullet:
                _print_beside(Text(bullet, style=style), _styled(inside, style), console, 2)
            else:
                console.print(Text("! " * bool(style), style=style) + _styled(inside, style))
            bullet = ""


def _print_beside(first: Text, rest: Text, console: Console, width: int) -> None:
    """Print a text beside a column of this width that holds the first words."""
    for line in _wrapped(rest, console, max(console.width - width, 20)):
        first.pad_right(max(width - cell_len(first.plain), 0))
        console.print(first + line, soft_wrap=True)
        first = Text()


def _wrapped(text: Text, console: Console, width: int) -> list[Text]:
    """Lines of at most this width, without a break before a per cent sign."""
    lines = []
    for row in text.split("\n", allow_blank=True):
        start = end = 0
        for word in re.finditer(r"\S+(?: %\S*)?", row.plain):
            if end and cell_len(row.plain[start : word.end()]) > width:
                lines.append(row[start:end])
                start = word.start()
            end = word.end()
        lines.append(row[start:end])
    return [part for line in lines for part in line.wrap(console, width, overflow="fold") or [line]]


# --- what other files call


def render_markdown(template: Template, **values: Any) -> str:
    """A template as Markdown, without figures and what a page folds away."""
    return _Rendering("markdown", {}).text(template, values)


@dataclass(frozen=True)
class Page:
    """A page that is printed and written."""

    template: Template  # of its text. values: of the template.
    # title, eyebrow, name, meta: of the document, and the lines above the text
    title: str
    eyebrow: str
    name: str
    meta: str
    values: Mapping[str, Any]

    def html(
        self,
        pictures: Mapping[Any, str] | None = None,
        reconstructed: Mapping[str, str] | None = None,
        search_data: Markup | None = None,
    ) -> str:
        """One HTML page without outside requests, whose policy allows one script: ours.

        pictures: data URIs by example id; reconstructed: of pictures above their reconstructions,
        by attack; search_data: of `indpriv.report.report`. Without them, no example and no epsilon
        of one is on the page.
        """
        beside = {"pictures": pictures, "reconstructed": reconstructed, "search_data": search_data}
        made = _Rendering("html", beside)
        script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
        body = made.html(made.text(self.template, self.values)) + made.end
        return (
            _html_templates()
            .get_template("page.html.j2")
            .render(
                head=self,
                body=Markup(body),
                sections=made.sections,
                sensitive=SENSITIVE,
                disclaimer=self.values.get("disclaimer", DISCLAIMER),
                script=Markup(script),
                script_hash=f"sha256-{digest}",
            )
        )

    def markdown(self) -> str:
        """The text below its title and to whom it may be shown; without what a page folds away."""
        text = render_markdown(self.template, **self.values)
        return f"**{SENSITIVE}**\n\n# {escape(self.title)}\n\n{text}"


def print_page(template: Template, console: Console, *, key_width: int = 0, **values: Any) -> None:
    """Print a template; no control character of a text reaches the terminal.

    key_width: of the column in which bold words at the beginning of paragraphs stand; 0 for none.
    """
    page = _Rendering("terminal", {})
    _print(page, page.text(template, values), console, key_width)


def write_page(page: Page, output_dir: Path, stem: str, content: Mapping[str, Any]) -> None:
    """Write STEM.html and STEM.md of a page to a folder, and then STEM.json with the content."""
    make_folder(output_dir)
    for suffix, text in {"html": page.html(), "md": page.markdown()}.items():
        write_atomically(output_dir / f"{stem}.{suffix}", text.encode("utf-8", "replace"))
    write_json(output_dir / f"{stem}.json", dict(content))


BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
)
_SECONDS = 300  # a report prints in a few; after that, a hanging browser is ended
# A profile of its own and no network: the page needs none, and the browser shall not phone home.
_ALONE = (
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def find_browser() -> str | None:
    """Path of an installed browser that prints without a window; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def browser_command(browser: str, profile: Path, *options: str) -> list[str]:
    """Command line of a browser without a window and without network, with a profile of its own."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    as_root = ("--no-sandbox",) if is_root else ()  # the sandbox refuses root
    return [browser, *_ALONE, *as_root, f"--user-data-dir={profile}", *options]


def print_pdf(page: Path, target: Path) -> None:
    """Print a page to a file that only its owner can read.

    InputError for no page, no browser, or one that fails or takes over five minutes.
    """
    if not page.is_file():
        raise refused("refusal.pictures", "no_page", page=page)
    browser = find_browser()
    if browser is None:
        raise refused("refusal.pictures", "no_browser", browsers=", ".join(BROWSERS), page=page)
    with tempfile.TemporaryDirectory() as folder:  # readable by its owner only
        printed = Path(folder) / "report.pdf"
        options = ("--no-pdf-header-footer", f"--print-to-pdf={printed}", page.resolve().as_uri())
        command = browser_command(browser, Path(folder) / "profile", *options)
        try:
            subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = {"browser": browser, "page": page, "error": error}
            raise refused("refusal.pictures", "not_printed", **said) from error
        if not printed.is_file():
            raise InputError(f"{browser} printed nothing; print {page} from any browser")
        write_atomically(target, printed.read_bytes())
