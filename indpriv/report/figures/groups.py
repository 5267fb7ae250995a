"""Mean epsilon and test accuracy by group."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from indpriv._formatting import format_epsilon, format_share
from indpriv.analysis.groups import GroupTable
from indpriv.report.figures import svg
from indpriv.report.wording import shown_rows

_MOST_GROUPS = 14  # bars that can be read; of more groups, the worst and the best are drawn
_MOST_LABELS = 3  # panels within label that fit beside each other
_LEFT, _GAP, _RIGHT = 0.2, 0.018, 0.985  # of the panels, as fractions of the figure


def group_bars(table: GroupTable, worst_case_epsilon: float | None, name: str) -> str:
    """Bars of mean epsilon by group (raw, within label, label-standardised) and of test accuracy.

    Returns "" where no group has examples.
    """
    rows = table.rows.iloc[shown := shown_rows(table.rows, _MOST_GROUPS)]
    if not shown:
        return ""
    texts = rows["name"].tolist()
    epsilons = {"epsilon, all": rows["mean"]}
    for within in table.within_label if len(table.within_label) <= _MOST_LABELS else ():
        epsilons[svg.placeholder(len(texts))] = within.rows["mean"].iloc[shown]
        texts.append(within.label)
    epsilons["standardised"] = rows["standardised_mean"]
    limit = max(worst_case_epsilon or 0.0, pd.concat(epsilons).max()) or 1.0
    panels = {**epsilons, "test accuracy": rows["test_accuracy"]}
    panels = {title: values for title, values in panels.items() if values.notna().any()}
    with svg.style():
        height = 0.62 + 0.3 * len(rows)
        figure = svg.new_figure(height)
        width = (_RIGHT - _LEFT - _GAP * (len(panels) - 1)) / len(panels)
        for index, (title, values) in enumerate(panels.items()):
            left, bottom = _LEFT + index * (width + _GAP), 0.1 / height
            axes = figure.add_axes((left, bottom, width, 1 - 0.44 / height))
            if title in epsilons:
                _bars(axes, values, format_epsilon, limit, svg.ACCENT)
                if worst_case_epsilon is not None:
                    axes.axvline(worst_case_epsilon, color=svg.WARN, linewidth=1.0, alpha=0.8)
            else:
                _bars(axes, values, lambda share: format_share(share, 1), 1.0, svg.SECOND)
            stressed = index == 0 or title not in epsilons
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


def _bars(
    axes: Axes, values: "pd.Series[float]", text: Callable[[float], str], limit: float, colour: str
) -> None:
    """Horizontal bars with their values beside them."""
    axes.barh(range(len(values)), values.fillna(0), height=0.62, color=colour, alpha=0.85, lw=0)
    axes.set_xlim(0, limit * 1.62)
    axes.set_ylim(len(values) - 0.5, -0.5)
    for row, value in enumerate(values):
        label = "–" if np.isnan(value) else text(value)
        axes.text(limit * 1.02, row, f" {label}", va="center", fontsize=8, color=svg.INK)
    axes.set_xticks([])
    axes.set_yticks([])
    sns.despine(ax=axes, bottom=True)
