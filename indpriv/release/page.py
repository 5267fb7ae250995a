"""A private release as an HTML page and for a terminal.

Releasable: it sees only the content of release.json.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

import indpriv.report
from indpriv._formatting import format_delta, format_epsilon, format_number
from indpriv._shown import shown
from indpriv.epsilon_table import relation_words
from indpriv.report.document import Entry, Paragraph, Span, Table, paragraph, table
from indpriv.report.renderers.terminal import print_blocks

_TEMPLATES = Path(__file__).parent / "templates"
_STYLE = Path(indpriv.report.__file__).parent / "renderers" / "templates"  # of the report's CSS


def render_release(content: Mapping[str, Any]) -> str:
    """The page as text: self-contained, no script, every text escaped."""
    environment = Environment(
        loader=FileSystemLoader([_TEMPLATES, _STYLE]),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("release.html.j2").render(
        release=content,
        figures=figures_table(content),
        error_notes=error_notes(content),
        spending=spending(content),
    )


def figures_table(content: Mapping[str, Any]) -> Table:
    """The released figures, one row for each group; with expected errors where there are any."""
    groups = content["groups"] or {"": content}
    names = sorted(next(iter(groups.values()))["quantiles"], key=float)
    show = _epsilon if content["quantity"] == "individual epsilon" else format_number
    shown = [
        name
        for name in ("mean", "count")
        if any(figures[name] is not None for figures in groups.values())
    ]
    titles = {"mean": "mean", "count": "people"}
    head = [content["by"] or "", *(f"quantile {name}" for name in names)]
    rows = []
    for group, figures in groups.items():
        row = [group, *(show(figures["quantiles"][name]) for name in names)]
        for name in shown:
            value, error = figures[name], figures["expected_error"][name]
            form = show if name == "mean" else format_number
            row.append(
                "all noise" if value is None else f"{form(value)} ± {format_number(error, 2)}"
            )
        rows.append(row)
    return table([*head, *(titles[name] for name in shown)], rows)


def error_notes(content: Mapping[str, Any]) -> list[str]:
    """How wrong the figures are expected to be, by the mechanism alone."""
    expected = next(iter((content["groups"] or {"": content}).values()))["expected_error"]
    each = " of each group" if content["groups"] else ""
    notes = []
    if expected["quantiles"]:
        ranks = "; ".join(
            f"{name}: {_rank_error(error)}" for name, error in expected["quantiles"].items()
        )
        if content["method"] == "descent":
            notes.append(
                f"Noise of one comparison{each}, in people: {ranks}. How close descent comes to "
                "the quantile in its rounds is not bounded."
            )
        else:
            notes.append(
                f"Expected error of a quantile{each}, in people by rank, where values are close "
                f"together, and its bound for any data: {ranks}. What that means in value depends "
                "on the data, and is not released."
            )
    if expected["count"] is not None or expected["mean"] is not None:
        notes.append(
            "The number after ± is the expected size of the noise; that of the mean depends on the "
            "noisy or declared number of people."
        )
    notes.append(
        "All people count in these figures with the same noise, so that figures of few people are "
        "mostly noise. Differences of the size of the noise mean nothing."
    )
    return notes


def _rank_error(error: Mapping[str, Any]) -> str:
    most = error["rank_at_most"]
    return _people(error["rank"]) + ("" if most is None else f", at most {_people(most)}")


def spending(content: Mapping[str, Any]) -> list[str]:
    """The cost of this release, of all releases, and of these with training."""
    spent = content["spent"]
    relation = relation_words(content["neighbouring"])
    number = f"{spent['releases']} release{'s' * (spent['releases'] != 1)}"
    budget = "; no budget is set."
    if spent["budget"]:
        budget = f", of a budget of {_cost(spent['budget'])}."
    lines = [
        f"This release: {_cost(content)}, {relation} one {content['unit']}.",
        f"{number} from this audit so far: {_cost(spent)}{budget}",
    ]
    if spent["training"]:
        lines.append(
            f"The training run's own guarantee: {_cost(spent['training'])}. Training and all "
            f"releases together: {_cost(spent['with_training'])}."
        )
    return lines


def print_release(content: Mapping[str, Any], console: Console) -> None:
    """Print the figures, their expected errors, what was spent and what is assumed."""
    blocks: list[Entry | Paragraph | Table] = [
        paragraph(Span(f"PRIVATE RELEASE: for others {content['name']}")),
        paragraph(content["meaning"]),
        figures_table(content),
    ]
    for title, lines in (
        ("EXPECTED ERROR", error_notes(content)),
        ("SPENT", spending(content)),
        ("ASSUMED", content["assumptions"]),
    ):
        blocks += [paragraph(Span(title)), Entry("", tuple(map(paragraph, lines)))]
    method = f"Method: {content['method_description']}. Answers are among {content['values']}."
    print_blocks([*blocks, paragraph(method)], console)


def _epsilon(value: float) -> str:
    """An epsilon to three decimals, rounded up."""
    return f"{math.ceil(value * 1000 - 1e-6) / 1000:.3f}"


def _people(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else format_number(value, 2)


def _cost(cost: Mapping[str, Any]) -> str:
    delta = cost["delta"]
    return (
        f"epsilon {format_epsilon(cost['epsilon'])}, delta {format_delta(delta) if delta else '0'}"
    )
