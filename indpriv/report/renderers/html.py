"""The report of an audit as one HTML page without outside requests. Sensitive.

Its policy allows one script: ours. Without scripts, the page lacks only the search.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from indpriv._shown import clean, shown
from indpriv.analysis.lookup import Lookup
from indpriv.analysis.summary import SENSITIVE, Audit
from indpriv.report.document import Block, Figure, Page
from indpriv.report.figures import FIGURES
from indpriv.report.script import page_script, script_hash, search_data
from indpriv.report.sections import sections_of
from indpriv.report.wording import disclaimer

_NO_BREAK = re.compile(r"(?<=\d) (?=%)|(?<=\d,) (?=[\d.-]+\])")


def render_html(
    summary: Audit,
    pictures: Mapping[Any, str] | None = None,
    lookup: Lookup | None = None,
    reconstructed: Mapping[str, str] | None = None,
) -> str:
    """The whole page as text, with every text of the data escaped.

    Args:
        summary: of the audit.
        pictures: data URIs by example id, from `indpriv.report.pictures`; without them, no example
            is on the page.
        lookup: single examples that the page can be searched for; without them, no epsilon of one
            example is on the page.
        reconstructed: data URIs of pictures above their reconstructions, by the name of the attack.
    """
    run = summary.run
    page = Page(
        title=f"Privacy audit of {summary.name}",
        eyebrow="Individual privacy audit",
        name=summary.name,
        meta=f"{run.n_examples:,} training examples · {run.settings.total_steps:,} steps of DP-SGD "
        f"· audited {summary.created[:10]} with indpriv {summary.versions['indpriv']}",
        sections=sections_of(summary),
        disclaimer=disclaimer(summary),
    )
    data = None if lookup is None else search_data(summary, lookup)
    return render_page(
        page,
        pictures=pictures,
        reconstructed=reconstructed,
        search_data=data,
        account=summary.account,
    )


def render_page(page: Page, **content: Any) -> str:
    """A page as text; content: what single blocks of an audit's page show."""
    environment = Environment(
        loader=FileSystemLoader(
            [Path(__file__).parent / "templates", Path(__file__).parents[1] / "templates"]
        ),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(figure=_figure, kind=_kind, unbroken=_unbroken)
    environment.globals.update(
        {"pictures": None, "reconstructed": None, "search_data": None, **content}
    )
    return environment.get_template("report.html.j2").render(
        page=page,
        sensitive=SENSITIVE,
        script=Markup(page_script()),
        script_hash=script_hash(),
    )


def _kind(block: Block) -> str:
    return type(block).__name__


def _figure(block: Figure) -> Markup:
    """The figure as SVG (figures escape their texts); empty if nothing can be drawn."""
    draw = FIGURES[block.name] if isinstance(block.name, str) else block.name
    return Markup(draw(*block.arguments))


def _unbroken(text: str) -> Markup:
    """Escaped text without line breaks inside 1e-5 or an interval, or before a per cent sign."""
    text = str(escape(_NO_BREAK.sub("\u00a0", clean(text))))
    return Markup(re.sub(r"\d[\d.]*e-\d+", r'<span class="nb">\g<0></span>', text))
