"""Mean epsilon and test accuracy by group."""

from collections.abc import Sequence

import seaborn as sns
from matplotlib.axes import Axes

from indpriv._formatting import format_epsilon, format_share
from indpriv.analysis.groups.group_table import GroupTable
from indpriv.report.figures import svg
from indpriv.report.wording import shown_rows

_MOST_GROUPS = 14  # bars that can be read; of more groups, the worst and the best are drawn
_MOST_LABELS = 3  # panels within label that fit beside each other
_LEFT, _GAP, _RIGHT = 0.2, 0.018, 0.985  # of the panels, as fractions of the figure

_Values = list[float | None]


def group_bars(table: GroupTable, worst_case_epsilon: float | None, name: str) -> str:
    """Bars of mean epsilon by group (raw, within label, label-standardised) and of test accuracy.

    Returns "" where no group has examples.
    """
    positions = shown_rows(table.rows, _MOST_GROUPS)
    if not positions:
        return ""
    rows = [table.rows[index] for index in positions]
    texts = [row.name for row in rows]
    panels: list[tuple[str, _Values]] = [("epsilon, all", [row.epsilon.mean for row in rows])]
    for within in table.within_label if len(table.within_label) <= _MOST_LABELS else ():
        means = [within.rows[index].epsilon.mean for index in positions]
        panels.append((svg.placeholder(len(texts)), means))
        texts.append(within.label)
    panels.append(("standardised", [row.standardised.mean for row in rows]))
    known = [value for _, values in panels for value in values if value is not None]
    limit = max(worst_case_epsilon or 0.0, *known) or 1.0
    accuracy = [row.test_accuracy.share for row in rows]
    panels = [panel for panel in (*panels, ("test accuracy", accuracy)) if _any_known(panel[1])]
    with svg.style():
        height = 0.62 + 0.3 * len(rows)
        figure = svg.new_figure(height)
        width = (_RIGHT - _LEFT - _GAP * (len(panels) - 1)) / len(panels)
        for index, (title, values) in enumerate(panels):
            left, bottom = _LEFT + index * (width + _GAP), 0.1 / height
            axes = figure.add_axes((left, bottom, width, 1 - 0.44 / height))
            if values is accuracy:
                _bars(axes, values, [format_share(value, 1) for value in values], 1.0, svg.SECOND)
            else:
                _bars(axes, values, list(map(format_epsilon, values)), limit, svg.ACCENT)
                if worst_case_epsilon is not None:
                    axes.axvline(worst_case_epsilon, color=svg.WARN, linewidth=1.0, alpha=0.8)
            stressed = index == 0 or values is accuracy
            axes.set_title(title, fontsize=8.5, color=svg.INK if stressed else svg.MUTED, pad=7)
            if index == 0:
                names = list(map(svg.placeholder, range(len(rows))))
                axes.set_yticks(range(len(rows)), names, color=svg.INK)
        skipped = len(table.rows) - len(rows)
        description = f"Bars of {len(rows)} groups, worst first"
        description += f" ({skipped} groups not drawn)" if skipped else ""
        if worst_case_epsilon is not None:
            worst = format_epsilon(worst_case_epsilon)
            description += f"; a line marks the worst case of {worst}"
        title = f"Mean epsilon and test accuracy by {table.by}"
        return svg.to_svg(figure, name, title, f"{description}; the table holds the values.", texts)


def _any_known(values: _Values) -> bool:
    """Whether there is anything to draw."""
    return any(value is not None for value in values)


def _bars(axes: Axes, values: _Values, labels: Sequence[str], limit: float, colour: str) -> None:
    """Horizontal bars with their values beside them."""
    drawn = [0.0 if value is None else value for value in values]
    axes.barh(range(len(drawn)), drawn, height=0.62, color=colour, alpha=0.85, linewidth=0)
    axes.set_xlim(0, limit * 1.62)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    for row, label in enumerate(labels):
        axes.text(limit * 1.02, row, f" {label}", va="center", fontsize=8, color=svg.INK)
    axes.set_xticks([])
    axes.set_yticks([])
    sns.despine(ax=axes, bottom=True)
