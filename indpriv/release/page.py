"""A private release as an HTML page and for a terminal. Releasable: it sees the content of release.json only."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import indpriv.report
from indpriv._formatting import format_delta, format_epsilon, format_number
from indpriv.report.renderers.terminal import clean

_TEMPLATES = Path(__file__).parent / "templates"
_STYLE = (
    Path(indpriv.report.__file__).parent / "renderers" / "templates"
)  # style.css is the report's


def render_release(content: Mapping[str, Any]) -> str:
    """The page as text: self-contained, no script, every text escaped."""
    environment = Environment(
        loader=FileSystemLoader([_TEMPLATES, _STYLE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = table_rows(content)
    return environment.get_template("release.html.j2").render(
        release=content,
        head=rows[0],
        rows=rows[1:],
        error_notes=error_notes(content),
        spending=spending(content),
    )


def table_rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Head and rows of the table of figures: one row, or one a group; each figure with its error where it has one."""
    groups = content["groups"] or {"": content}
    names = sorted(next(iter(groups.values()))["quantiles"], key=float)
    show = _epsilon if content["quantity"] == "individual epsilon" else format_number
    with_mean = any(
        figures["expected_error"]["mean"] is not None or figures["mean"] is not None
        for figures in groups.values()
    )
    with_count = any(figures["count"] is not None for figures in groups.values())
    head = [content["by"] or "", *(f"quantile {name}" for name in names)]
    head += ["mean"] * with_mean + ["people"] * with_count
    rows = []
    for group, figures in groups.items():
        errors = figures["expected_error"]
        row = [group, *(show(figures["quantiles"][name]) for name in names)]
        if with_mean:
            error = errors["mean"]
            row.append(
                "all noise"
                if figures["mean"] is None
                else f"{show(figures['mean'])} ± {format_number(error, 2)}"
            )
        if with_count:
            row.append(f"{format_number(figures['count'])} ± {format_number(errors['count'], 2)}")
        rows.append(row)
    return [head, *rows]


def error_notes(content: Mapping[str, Any]) -> list[str]:
    """How far off the figures are to be expected, by the mechanism alone."""
    figures = next(iter((content["groups"] or {"": content}).values()))
    notes = []
    errors = figures["expected_error"]["quantiles"]
    if errors:
        ranks = "; ".join(
            f"{name}: {_people(error['rank'])}"
            + (
                f", at most {_people(error['rank_at_most'])}"
                if error["rank_at_most"] is not None
                else ""
            )
            for name, error in errors.items()
        )
        each = " of each group" if content["groups"] else ""
        notes.append(
            f"Expected error of a quantile{each}, in people by rank where values lie close together, and its bound for any "
            f"data: {ranks}. What that means in value depends on the data, and is not released."
            if content["method"] != "descent"
            else f"Noise of one comparison{each}, in people: {ranks}. How close descent comes in its rounds is not bounded."
        )
    if (
        figures["expected_error"]["count"] is not None
        or figures["expected_error"]["mean"] is not None
    ):
        notes.append(
            "Behind ± stands the expected size of the noise; the mean's rests on the noisy or declared number of people."
        )
    notes.append(
        "Everybody is in these figures at the same noise: where people are few, they are mostly noise. Differences of the "
        "size of the noise mean nothing."
    )
    return notes


def spending(content: Mapping[str, Any]) -> list[str]:
    """What this release cost, what all did, and with training."""
    spent = content["spent"]
    lines = [
        f"This release: {_cost(content)}, {content['neighbouring'].replace('_', '/')} one {content['unit']}.",
        f"{spent['releases']} release{'s' * (spent['releases'] != 1)} from this audit so far: {_cost(spent)}"
        + (
            f", of a budget of {_cost(spent['budget'])}."
            if spent["budget"]
            else "; no budget is set."
        ),
    ]
    if spent["training"]:
        lines.append(
            f"The training run's own guarantee: {_cost(spent['training'])}. Training and all releases together: "
            f"{_cost(spent['with_training'])}."
        )
    return lines


def print_release(content: Mapping[str, Any], console: Console) -> None:
    """Print the figures, how far off they are, what was spent and what is assumed."""
    console.print(
        Text("PRIVATE RELEASE: for others", style="bold green"),
        Text(clean(content["name"]), style="bold"),
    )
    console.print(Text(content["meaning"]))
    head, *rows = table_rows(content)
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(Text(clean(name)), justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    console.print(table)
    sections = {
        "EXPECTED ERROR": error_notes(content),
        "SPENT": spending(content),
        "ASSUMED": content["assumptions"],
    }
    for title, lines in sections.items():
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(Padding(Text(clean(line)), (0, 0, 0, 2)))
    console.print(
        Text(f"Method: {content['method_description']}. Answers are among {content['values']}.")
    )


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
