"""The figures of a report, as inline SVG. Drawn from bins and group means: no single example is in them. Sensitive."""

from collections.abc import Sequence

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from indpriv._formatting import format_epsilon, format_number, format_share
from indpriv.analysis.distribution import Distribution
from indpriv.analysis.fidelity.comparison import Fidelity
from indpriv.analysis.groups.group_rows import MIN_GROUP, GroupRow
from indpriv.analysis.groups.group_table import GroupTable
from indpriv.analysis.loss import LossBins, LossRelation
from indpriv.report.figures.svg import (
    ACCENT,
    INK,
    MUTED,
    SECOND,
    WARN,
    bare,
    new_figure,
    placeholder,
    style,
    to_svg,
)

MOST_GROUPS = 14  # bars that can be read; beyond, the worst and the best are drawn
BEST_SHOWN = 4
MOST_LABELS = 3  # panels within label that fit beside each other


def shown_rows(rows: Sequence[GroupRow], most: int = MOST_GROUPS) -> list[int]:
    """Positions of the rows to show: all, or the worst and a few of the best, of groups that have examples."""
    present = [index for index, row in enumerate(rows) if row.epsilon.mean is not None]
    if len(present) <= most:
        return present
    return present[: most - BEST_SHOWN] + present[-BEST_SHOWN:]


def epsilon_histogram(
    individual: Distribution,
    worst_case_epsilon: float | None,
    everybody: str = "examples",
    name: str = "histogram",
) -> str:
    """Histogram of individual epsilon with the median marked, and the worst case unless it is None (far beyond)."""
    edges, counts = np.array(individual.edges), np.array(individual.counts)
    with style():
        figure = new_figure(3.1)
        axes = figure.add_axes((0.07, 0.18, 0.91, 0.66))
        centres = (edges[:-1] + edges[1:]) / 2
        sns.histplot(
            x=centres,
            weights=counts,
            bins=edges.tolist(),
            ax=axes,
            color=ACCENT,
            alpha=0.85,
            linewidth=0,
            shrink=0.86,
        )
        top = float(counts.max()) * 1.04
        axes.set_ylim(0, top)
        axes.set_xlim(edges[0], edges[-1] * 1.012)
        axes.set_xlabel("individual epsilon")
        axes.set_ylabel(everybody)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(axis="y")
        bare(axes)
        if worst_case_epsilon is not None:
            axes.axvline(worst_case_epsilon, color=WARN, linewidth=1.6)
            share = format_share(individual.share_at_worst_case)
            text = f"worst case {format_epsilon(worst_case_epsilon)}: {share} of {everybody}"
            _above(axes, worst_case_epsilon, text, WARN, align="right")
        axes.plot(
            [individual.median] * 2, [0, top], color=INK, linewidth=1.0, linestyle=(0, (2, 2))
        )
        close = individual.median > 0.4 * edges[-1]
        _above(
            axes,
            individual.median,
            f"median {format_epsilon(individual.median)}",
            INK,
            align="right" if close else "left",
            row=1 if close else 0,
        )
        return to_svg(
            figure,
            name,
            "Histogram of individual epsilon",
            f"{individual.n:,} {everybody} in {len(counts)} bins from 0 to {format_epsilon(float(edges[-1]))}. Median "
            f"{format_epsilon(individual.median)}, 95th percentile {format_epsilon(individual.p95)}; "
            f"{format_share(individual.share_at_worst_case)} are at the worst case"
            + (
                "."
                if worst_case_epsilon is None
                else f" of {format_epsilon(worst_case_epsilon)}, marked by a line."
            ),
        )


def epsilon_against_loss(
    loss: LossRelation,
    worst_case_epsilon: float | None,
    everybody: str = "examples",
    name: str = "loss",
) -> str:
    """Binned epsilon against loss with the median, the quartiles and the fitted logarithm; "" where undefined."""
    bins = loss.bins
    if bins is None or loss.line.slope is None or loss.line.intercept is None:
        return ""
    edges, top = np.array(bins.loss_edges), bins.epsilon_edges[-1]
    with style():
        figure = new_figure(4.2)
        axes = figure.add_axes((0.07, 0.13, 0.91, 0.82))
        axes.set_xscale("log")
        _density(axes, bins)
        _quartiles(axes, bins)
        fitted = loss.line.intercept + loss.line.slope * np.log(edges)
        inside = (fitted >= 0) & (fitted <= top)
        sign = "+" if loss.line.slope >= 0 else "−"
        label = f"{format_number(loss.line.intercept)} {sign} {format_number(abs(loss.line.slope))} ln(loss)"
        axes.plot(
            edges[inside],
            fitted[inside],
            color=SECOND,
            linewidth=1.6,
            linestyle=(0, (4, 2)),
            label=label,
        )
        if worst_case_epsilon is not None:
            worst = f"worst case {format_epsilon(worst_case_epsilon)}"
            axes.axhline(worst_case_epsilon, color=WARN, linewidth=1.4, label=worst)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, top * 1.05)
        axes.set_xlabel("loss of the final model (nats, logarithmic)")
        axes.set_ylabel("individual epsilon")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y")
        bare(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(0.01, 0.93), handlelength=1.8)
        return to_svg(
            figure,
            name,
            "Individual epsilon against loss",
            f"Density of {loss.every.n:,} {everybody} in {len(bins.counts)} bins of loss, with the median and quartiles of epsilon "
            f"per bin and the fitted logarithm. Pearson's r of epsilon and log loss is "
            f"{format_number(loss.every.pearson)}.",
        )


def _density(axes: Axes, bins: LossBins) -> None:
    """Cells of the two-dimensional histogram, darker where there are more examples."""
    x, y, counts = np.array(bins.loss_edges), np.array(bins.epsilon_edges), np.array(bins.counts)
    shades = np.round(np.sqrt(counts / counts.max()), 1)
    for shade in np.unique(shades[counts > 0]):
        cells = [
            Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j])
            for i, j in np.argwhere((counts > 0) & (shades == shade))
        ]
        axes.add_collection(
            PatchCollection(cells, facecolor=ACCENT, alpha=0.06 + 0.5 * float(shade), linewidth=0)
        )


def _quartiles(axes: Axes, bins: LossBins) -> None:
    """Median and quartiles of epsilon in each bin of loss with enough examples."""
    x = np.array(bins.loss_edges)
    enough = np.array(bins.counts).sum(axis=1) >= MIN_GROUP
    centres = np.sqrt(x[:-1] * x[1:])[enough]
    low, middle, high = (
        np.array([np.nan if value is None else value for value in part])[enough]
        for part in (bins.p25, bins.median, bins.p75)
    )
    axes.vlines(centres, low, high, color=INK, linewidth=0.8, alpha=0.55)
    label = "median and quartiles of a bin"
    axes.plot(centres, middle, color=INK, linewidth=1.4, marker="o", markersize=2.6, label=label)


def group_bars(table: GroupTable, worst_case_epsilon: float | None, name: str) -> str:
    """Bars of mean epsilon by group: raw, within label, label-standardised; beside them test accuracy.

    Returns "" where no group has examples.
    """
    positions = shown_rows(table.rows)
    if not positions:
        return ""
    rows = [table.rows[index] for index in positions]
    panels: list[tuple[str, list[float | None], bool]] = [
        ("epsilon, all", [row.epsilon.mean for row in rows], True)
    ]
    texts = [row.name for row in rows]
    if 0 < len(table.within_label) <= MOST_LABELS:
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
            f"Bars of {len(rows)} groups, worst first{f' ({skipped} groups not drawn)' if skipped else ''}; "
            + (
                ""
                if worst_case_epsilon is None
                else f"a line marks the worst case of {format_epsilon(worst_case_epsilon)}; "
            )
            + "the table holds the values.",
            texts,
        )


def fidelity_against_k(
    rows: Sequence[Fidelity], everybody: str = "examples", name: str = "fidelity"
) -> str:
    """Errors and share under-reported against K, one colour for each rule; "" with fewer than two K."""
    rows = [row for row in rows if not row.is_this_log]
    if len({row.every for row in rows}) < 2:
        return ""
    colours = {"last": ACCENT, "closest": INK, "worst_case": MUTED}
    with style():
        figure = new_figure(3.3)
        error = figure.add_axes((0.07, 0.17, 0.41, 0.68))
        share = figure.add_axes((0.575, 0.17, 0.41, 0.68))
        for rule in dict.fromkeys(row.between_records for row in rows):
            line = sorted(
                (row for row in rows if row.between_records == rule), key=lambda row: row.every
            )
            epochs, colour, label = (
                [row.epochs for row in line],
                colours[rule],
                rule.replace("_", " "),
            )
            for axes, solid, dashed, solid_label, dashed_label in (
                (error, "mean_absolute", "p95_absolute", "mean", "95th percentile"),
                (
                    share,
                    "share_under_1_percent",
                    "share_under",
                    "by more than 1 %",
                    "by any amount",
                ),
            ):
                values = [getattr(row.errors, dashed) for row in line]
                axes.plot(
                    epochs,
                    values,
                    "o--",
                    color=colour,
                    label=f"{label}: {dashed_label}",
                    markersize=3,
                    linewidth=1.2,
                )
                values = [getattr(row.errors, solid) for row in line]
                axes.plot(
                    epochs,
                    values,
                    "o-",
                    color=colour,
                    label=f"{label}: {solid_label}",
                    markersize=3,
                    linewidth=1.6,
                )
        ticks = sorted({row.epochs for row in rows})
        for axes, title in (
            (error, "absolute error of epsilon"),
            (share, f"share of {everybody} under-reported"),
        ):
            axes.set_title(title, color=INK, pad=8)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
            axes.set_xlabel("K, in epochs")
            axes.grid(axis="y")
            axes.set_ylim(bottom=0)
            bare(axes)
            axes.legend(loc="best", handlelength=2.2, fontsize=7.5)
        share.set_ylim(0, 1)
        share.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        error.yaxis.set_major_locator(MaxNLocator(5))
        return to_svg(
            figure,
            name,
            "Error of epsilon against K",
            "Left: mean and 95th percentile of the absolute error of individual epsilon, against K in epochs. Right: "
            f"share of {everybody} whose epsilon is under-reported. One colour for each rule between records.",
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


def _above(axes: Axes, x: float, text: str, colour: str, *, align: str, row: int = 0) -> None:
    """A label above the plotting area at x."""
    axes.annotate(
        text,
        (x, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 5 + 12 * row),
        textcoords="offset points",
        ha=align,
        va="bottom",
        color=colour,
        fontsize=9,
        annotation_clip=False,
    )
