"""Errors of epsilon against the number of steps between records."""

from collections.abc import Sequence

from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from indpriv.analysis.fidelity import Fidelity
from indpriv.report.figures.svg import ACCENT, INK, MUTED, bare, new_figure, style, to_svg

_COLOURS = {"last": ACCENT, "closest": INK, "worst_case": MUTED}


def fidelity_against_k(
    rows: Sequence[Fidelity], plural: str = "examples", name: str = "fidelity"
) -> str:
    """Errors and share under-reported against K, one colour a rule; "" with fewer than two K."""
    rows = sorted((row for row in rows if not row.is_this_log), key=lambda row: row.every)
    if len({row.every for row in rows}) < 2:
        return ""
    with style():
        figure = new_figure(3.3)
        error = figure.add_axes((0.07, 0.17, 0.41, 0.68))
        share = figure.add_axes((0.575, 0.17, 0.41, 0.68))
        curves = (
            (error, "o--", "p95_absolute", "95th percentile"),
            (error, "o-", "mean_absolute", "mean"),
            (share, "o--", "share_under", "by any amount"),
            (share, "o-", "share_under_1_percent", "by more than 1 %"),
        )
        for rule in dict.fromkeys(row.between_records for row in rows):
            line = [row for row in rows if row.between_records == rule]
            for axes, shape, field, what in curves:
                axes.plot(
                    [row.epochs for row in line],
                    [getattr(row, field) for row in line],
                    shape,
                    color=_COLOURS[rule],
                    label=f"{rule.replace('_', ' ')}: {what}",
                    markersize=3,
                    linewidth=1.6 if shape == "o-" else 1.2,
                )
        for axes, title in (
            (error, "absolute error of epsilon"),
            (share, f"share of {plural} under-reported"),
        ):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(sorted({row.epochs for row in rows})))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
            axes.set_ylim(bottom=0)
            bare(axes, "K, in epochs", title=title)
            axes.legend(loc="best", handlelength=2.2, fontsize=7.5)
        share.set_ylim(0, 1)
        share.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        error.yaxis.set_major_locator(MaxNLocator(5))
        return to_svg(
            figure,
            name,
            "Error of epsilon against K",
            "Left: mean and 95th percentile of the absolute error of individual epsilon, against "
            f"K in epochs. Right: share of {plural} whose epsilon is under-reported. One "
            "colour for each rule between records.",
        )
