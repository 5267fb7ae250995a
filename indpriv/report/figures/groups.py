"""Mean epsilon and test accuracy by group."""

from collections.abc import Sequence

import seaborn as sns
from matplotlib.axes import Axes

from indpriv._formatting import format_epsilon, format_share
from indpriv.analysis.groups.group_table import GroupTable
from indpriv.report.figures.svg import (
    ACCENT,
    INK,
    MUTED,
    SECOND,
    WARN,
    new_figure,
    placeholder,
    style,
    to_svg,
)
from indpriv.report.wording import shown_rows

_MOST_GROUPS = 14  # bars that can be read; of more groups, the worst and the best are drawn
_MOST_LABELS = 3  # panels within label that fit beside each other


def group_bars(table: GroupTable, worst_case_epsilon: float | None, name: str) -> str:
    """Bars of mean epsilon by group: raw, within label, label-standardised; beside them test accuracy.

    Returns "" where no group has examples.
    """
    positions = shown_rows(table.rows, _MOST_GROUPS)
    if not positions:
        return ""
    rows = [table.rows[index] for index in positions]
    panels: list[tuple[str, list[float | None], bool]] = [
        ("epsilon, all", [row.epsilon.mean for row in rows], True)
    ]
    texts = [row.name for row in rows]
    if 0 < len(table.within_label) <= _MOST_LABELS:
        for within in table.within_label:
            texts.append(within.label)
            panels.append(
                (
                    placeholder(len(texts) - 1),
                    [within.rows[index].epsilon.mean for index in positions],
                    True,
                )
            )
    if any(row.standardised.mean is not None for row in rows):
        panels.append(("standardised", [row.standardised.mean for row in rows], True))
    if any(row.test_accuracy.share is not None for row in rows):
        panels.append(("test accuracy", [row.test_accuracy.share for row in rows], False))
    with style():
        height = 0.62 + 0.3 * len(rows)
        figure = new_figure(height)
        left, gap = 0.2, 0.018
        width = (0.985 - left - gap * (len(panels) - 1)) / len(panels)
        largest = max(
            value
            for _, values, is_epsilon in panels
            if is_epsilon
            for value in values
            if value is not None
        )
        limit = max(worst_case_epsilon or 0.0, largest) or 1.0
        for index, (title, values, is_epsilon) in enumerate(panels):
            axes = figure.add_axes(
                (left + index * (width + gap), 0.1 / height, width, 1 - 0.44 / height)
            )
            _bars(
                axes,
                values,
                limit if is_epsilon else 1.0,
                ACCENT if is_epsilon else SECOND,
                is_epsilon,
            )
            axes.set_title(
                title, fontsize=8.5, color=INK if index == 0 or not is_epsilon else MUTED, pad=7
            )
            if is_epsilon and worst_case_epsilon is not None:
                axes.axvline(worst_case_epsilon, color=WARN, linewidth=1.0, alpha=0.8)
            if index == 0:
                axes.set_yticks(
                    range(len(rows)), [placeholder(row) for row in range(len(rows))], color=INK
                )
        skipped = len(table.rows) - len(rows)
        return to_svg(
            figure,
            name,
            f"Mean epsilon and test accuracy by {table.by}",
            f"Bars of {len(rows)} groups, worst "
            f"first{f' ({skipped} groups not drawn)' if skipped else ''}; "
            + (
                ""
                if worst_case_epsilon is None
                else f"a line marks the worst case of {format_epsilon(worst_case_epsilon)}; "
            )
            + "the table holds the values.",
            texts,
        )


def _bars(
    axes: Axes, values: Sequence[float | None], limit: float, colour: str, is_epsilon: bool
) -> None:
    """Horizontal bars with their values; "lacks a label" is an en dash."""
    drawn = [0.0 if value is None else value for value in values]
    sns.barplot(
        x=drawn,
        y=list(range(len(values))),
        orient="h",
        color=colour,
        saturation=1,
        ax=axes,
        width=0.62,
        errorbar=None,
        alpha=0.85,
    )
    axes.set_xlim(0, limit * 1.62)
    for row, value in enumerate(values):
        text = format_epsilon(value) if is_epsilon else format_share(value, 1)
        axes.annotate(
            text,
            (limit * 1.02, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("")
    axes.set_ylabel("")
    sns.despine(ax=axes, bottom=True)
