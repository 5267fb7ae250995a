"""Individual epsilon against loss."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from indpriv._formatting import format_epsilon, format_number
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.loss import LossBins, LossRelation
from indpriv.report.figures.svg import ACCENT, INK, SECOND, WARN, bare, new_figure, style, to_svg


def epsilon_against_loss(
    loss: LossRelation,
    worst_case_epsilon: float | None,
    plural: str = "examples",
    name: str = "loss",
) -> str:
    """Counts by loss and epsilon, with quartiles and the fitted logarithm; "" where undefined."""
    bins, line = loss.bins, loss.line
    if bins is None or line.slope is None or line.intercept is None:
        return ""
    edges, top = np.array(bins.loss_edges), bins.epsilon_edges[-1]
    with style():
        figure = new_figure(4.2)
        axes = figure.add_axes((0.07, 0.13, 0.91, 0.82))
        axes.set_xscale("log")
        _density(axes, bins)
        _quartiles(axes, bins)
        fitted = line.intercept + line.slope * np.log(edges)
        fitted[(fitted < 0) | (fitted > top)] = np.nan
        sign = "+" if line.slope >= 0 else "−"
        label = f"{format_number(line.intercept)} {sign} {format_number(abs(line.slope))} ln(loss)"
        dashes = (0, (4, 2))
        axes.plot(edges, fitted, color=SECOND, linewidth=1.6, linestyle=dashes, label=label)
        if worst_case_epsilon is not None:
            worst = f"worst case {format_epsilon(worst_case_epsilon)}"
            axes.axhline(worst_case_epsilon, color=WARN, linewidth=1.4, label=worst)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, top * 1.05)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MaxNLocator(5))
        bare(axes, "loss of the final model (nats, logarithmic)", "individual epsilon")
        axes.legend(loc="upper left", bbox_to_anchor=(0.01, 0.93), handlelength=1.8)
        return to_svg(
            figure,
            name,
            "Individual epsilon against loss",
            f"Density of {loss.every.n:,} {plural} in {len(bins.counts)} bins of loss, with the "
            "median and quartiles of epsilon per bin and the fitted logarithm. Pearson's r of "
            f"epsilon and log loss is {format_number(loss.every.pearson)}.",
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
