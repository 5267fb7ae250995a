"""Gradient norms and clipping over training, by class."""

import math
from collections.abc import Sequence

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from indpriv.analysis.norms_over_training import Drivers
from indpriv.report.figures import svg

_MOST_LINES = 10  # classes that a figure can tell apart
_FEW_DECADES = 2  # of a logarithmic axis, on which powers of ten alone would be too few ticks
_COLOURS = (svg.ACCENT, svg.SECOND, svg.WARN, svg.INK, svg.MUTED)


def norms_over_training(drivers: Drivers, name: str = "drivers") -> str:
    """Median norm by class and share of clipped examples over training.

    Returns "" with fewer than two records, without classes or with too many of them.
    """
    if len(drivers.steps) < 2 or not 0 < len(drivers.classes) <= _MOST_LINES:
        return ""
    with svg.style():
        figure = svg.new_figure(3.3)
        norms = figure.add_axes((0.07, 0.17, 0.33, 0.7))
        clipped = figure.add_axes((0.485, 0.17, 0.33, 0.7))
        for index in range(len(drivers.classes)):
            colour = _COLOURS[index % len(_COLOURS)]
            line = "-" if index < len(_COLOURS) else "--"
            medians = _numbers(drivers.median_norm[index])
            shares = _numbers(drivers.clipped_share_by_class[index])
            label = svg.placeholder(index)
            norms.plot(drivers.steps, medians, line, color=colour, linewidth=1.5)
            clipped.plot(drivers.steps, shares, line, color=colour, linewidth=1.2, label=label)
        every = drivers.clipped_share
        clipped.plot(drivers.steps, every, ":", color=svg.INK, linewidth=2.0, label="all examples")
        norms.axhline(1.0, color=svg.WARN, linewidth=1.0, alpha=0.8)
        for axes, title in (
            (norms, "median norm over max_grad_norm"),
            (clipped, "share of examples clipped"),
        ):
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            svg.bare(axes, "step", title=title)
        legend = clipped.get_legend_handles_labels()
        figure.legend(*legend, loc="upper left", bbox_to_anchor=(0.825, 0.9), fontsize=7.5)
        drawn = [value for line in drivers.median_norm for value in line if value is not None]
        if min(drawn) > 0:
            norms.set_yscale("log")
            if max(1.0, *drawn) < 10**_FEW_DECADES * min(1.0, *drawn):
                norms.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            norms.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            norms.yaxis.set_minor_locator(NullLocator())
        clipped.set_ylim(0, 1)
        clipped.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        return svg.to_svg(
            figure,
            name,
            "Gradient norms over training by class",
            f"Left: median gradient norm of each of {len(drivers.classes)} classes over the "
            f"clipping norm at {len(drivers.steps)} records. Right: share of examples whose norm "
            "was clipped.",
            drivers.classes,
        )


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
