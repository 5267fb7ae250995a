"""Errors of epsilon against the number of steps between records."""

from collections.abc import Sequence

from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from indpriv.analysis.fidelity.comparison import Fidelity
from indpriv.report.figures.svg import ACCENT, INK, MUTED, bare, new_figure, style, to_svg


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
            "Left: mean and 95th percentile of the absolute error of individual epsilon, against "
            f"K in epochs. Right: share of {everybody} whose epsilon is under-reported. One "
            "colour for each rule between records.",
        )
